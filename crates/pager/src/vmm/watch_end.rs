//! Names of watches, and why they end.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The number of a watch. No other watch of this process has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WatchId(pub(super) u64);

impl WatchId {
    /// The watch with this number.
    #[must_use]
    pub fn new(number: u64) -> Self {
        Self(number)
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for WatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a watch is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WatchEnd {
    /// A snapshot of it was saved.
    #[error("it was saved")]
    Saved,
    /// A client has given it up.
    #[error("it was given up with `thaw`")]
    Thawed,
    /// The VMM was detached.
    #[error("the VMM was detached")]
    Detached,
    /// The kernel has refused to protect a page.
    #[error("its pages could not be protected")]
    Unprotected,
    /// Its image has lost a page.
    #[error("{0}")]
    Lost(LossReason),
    /// It never was one of this VMM, or its end was long ago.
    #[error("the VMM has no such watch")]
    Unknown,
}

/// Why a frozen image cannot be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LossReason {
    /// The VMM has discarded a page of it.
    #[error(
        "the VMM discarded a page of its frozen memory before it was saved: stop its balloon, and freeze it again"
    )]
    Discarded,
    /// The VMM has moved a part of it.
    #[error(
        "the VMM moved a mapping of its frozen memory before it was saved: freeze it again after the move"
    )]
    Moved,
    /// Its copies exceed the budget.
    #[error(
        "the guest wrote more pages than the budget has room for before they were saved: raise the budget of the endpoint"
    )]
    Budget,
}
