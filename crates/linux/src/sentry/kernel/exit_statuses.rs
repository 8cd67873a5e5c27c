//! The exit statuses of reaped processes that a descriptor still means (`PIDFD_GET_INFO`).
//!
//! Promises: a status is kept while a descriptor of its process is open. May break it: a descriptor
//! that is closed without `Kernel::forget`.

mod keeping;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Statuses as `wait4` returns them, by PID.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ExitStatuses(BTreeMap<u32, i32>);

impl ExitStatuses {
    pub(in crate::sentry) fn of(&self, process: u32) -> Option<i32> {
        self.0.get(&process).copied()
    }

    /// Whether all are of processes that have ended and have a descriptor.
    pub(in crate::sentry) fn is_sound(&self, is_known: impl Fn(u32) -> bool) -> bool {
        self.0.keys().all(|process| is_known(*process))
    }
}
