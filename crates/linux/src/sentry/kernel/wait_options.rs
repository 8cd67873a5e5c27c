//! The children that a `wait` asks for.

use serde::{Deserialize, Serialize};

/// The children that a process waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitOptions {
    pub(crate) target: WaitTarget,
    pub(crate) ended: bool,
    pub(crate) stopped: bool,
    pub(crate) continued: bool,
}

/// Children by their relation to the waiting process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WaitTarget {
    Any,
    One(u32),
    Group(u32),
}

impl WaitTarget {
    pub(super) fn means(self, id: u32, group: u32) -> bool {
        match self {
            Self::Any => true,
            Self::One(one) => one == id,
            Self::Group(one) => one == group,
        }
    }
}
