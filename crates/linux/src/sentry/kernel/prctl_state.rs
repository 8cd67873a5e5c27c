//! Settings of a process that `prctl` reads and writes.

use serde::{Deserialize, Serialize};

/// Default nanoseconds that a timer may be late (`timer_slack`).
pub(in crate::sentry) const SLACK: u64 = 50_000;

/// The last capability (`CAP_CHECKPOINT_RESTORE`).
pub(in crate::sentry) const CAPABILITIES: u64 = 40;

/// Settings that a process has made for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PrctlState {
    /// The signal at its parent's end.
    pub(crate) death: Option<u8>,
    /// Whether it adopts descendants whose parents have ended.
    pub(crate) adopts: bool,
    pub(in crate::sentry) undumpable: bool,
    pub(in crate::sentry) unprivileged: bool,
    pub(in crate::sentry) slack: u64,
}

impl Default for PrctlState {
    fn default() -> Self {
        let (death, adopts, undumpable, unprivileged) = (None, false, false, false);
        Self { death, adopts, undumpable, unprivileged, slack: SLACK }
    }
}

impl PrctlState {
    /// Those of a child.
    pub(in crate::sentry) fn inherited(self) -> Self {
        Self { death: None, adopts: false, ..self }
    }

    pub(in crate::sentry) fn is_sound(self) -> bool {
        self.death.is_none_or(|signal| (1..=64).contains(&signal))
    }
}
