//! A process that has ended: plain data.

use serde::{Deserialize, Serialize};

/// A process that has ended, until its parent reaps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ExitedProcess {
    pub(crate) parent: u32,
    pub(crate) group: u32,
    /// As `wait4` returns it.
    pub(crate) status: i32,
    /// Nanoseconds of processor time, its children's included.
    pub(crate) spent: u64,
}
