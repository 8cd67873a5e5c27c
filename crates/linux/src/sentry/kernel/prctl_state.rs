//! Settings of a process that `prctl` and calls on its scheduling read and write.

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
    /// How nice it is, from -20 to 19, and its scheduling policy.
    pub(in crate::sentry) nice: i8,
    pub(in crate::sentry) policy: u8,
    /// The priority of its input and output, which means nothing here.
    pub(in crate::sentry) io_priority: u16,
    /// The commands of `membarrier` that it has registered for.
    pub(in crate::sentry) barriers: u32,
    /// Its personality. Flags change nothing here.
    pub(in crate::sentry) persona: u32,
}

impl Default for PrctlState {
    fn default() -> Self {
        let (death, adopts, undumpable, unprivileged) = (None, false, false, false);
        let (nice, policy, io_priority, barriers, persona) = (0, 0, 0, 0, 0);
        Self {
            death,
            adopts,
            undumpable,
            unprivileged,
            slack: SLACK,
            nice,
            policy,
            io_priority,
            barriers,
            persona,
        }
    }
}

impl PrctlState {
    /// Those of a child.
    pub(in crate::sentry) fn inherited(self) -> Self {
        Self { death: None, adopts: false, ..self }
    }

    pub(in crate::sentry) fn is_sound(self) -> bool {
        let nice = (-20..=19).contains(&self.nice);
        nice && self.death.is_none_or(|signal| (1..=64).contains(&signal))
    }
}
