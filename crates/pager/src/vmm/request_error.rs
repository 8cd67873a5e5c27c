//! Errors of requests to a VMM that is served.

use std::io;
use std::time::Duration;

use afresh_budget::BudgetExceeded;
use afresh_store::{OpenError, SaveError};
use afresh_sys::SysError;

use super::watch_end::{LossReason, WatchEnd, WatchId};

/// A request of a VMM was refused or failed. The VMM is not affected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The VMM is not served any more.
    #[error("the VMM has ended{}", .0.as_ref().map(|why| format!(": {why}")).unwrap_or_default())]
    Ended(Option<String>),
    /// It is detached, so nothing is filled any more.
    #[error("the VMM is detached: all of its memory is in place")]
    Detached,
    /// Detaching takes longer than the request waits.
    #[error(
        "{missing} pages are still missing after {waited:?}; the VMM is detached once they are filled"
    )]
    NotYet {
        /// Pages that are missing.
        missing: usize,
        /// The time that the request has waited.
        waited: Duration,
    },
    /// Pages were filled ahead, so faults do not show all touched pages.
    #[error(
        "pages were filled ahead of the VMM, so its faults do not show what it reads: serve it with `record`"
    )]
    NotRecorded,
    /// A working set is stored with a snapshot.
    #[error("the memory does not come from a snapshot, which a working set could be stored with")]
    NoSnapshot,
    /// Pages outside of the source.
    #[error("pages {first} to {end} are not all in the snapshot of {pages} pages")]
    Outside {
        /// The first.
        first: usize,
        /// One past the last.
        end: usize,
        /// Pages of the source.
        pages: usize,
    },
    /// Too many ranges wait to be filled.
    #[error("too many ranges wait to be filled: request larger ones, or all pages")]
    TooManyRanges,
    /// The memory of the process cannot be read.
    #[error("the memory of the VMM: {0}")]
    Process(io::Error),
    /// The process that connected does not have the memory of the userfaultfd.
    #[error(
        "process {0}, which connected, does not have the memory of the userfaultfd: the VMM itself must connect"
    )]
    OtherMemory(u32),
    /// Its memory is frozen.
    #[error(
        "the memory of the VMM is frozen, as watch {0}: save it with `snapshot` and this watch, or give it up with `thaw`"
    )]
    Frozen(WatchId),
    /// Its memory is not frozen yet.
    #[error(
        "watch {0} of the VMM is not frozen: pause the guest, and request `freeze` with this watch"
    )]
    NotFrozen(WatchId),
    /// The watch that the request is for does not live.
    #[error(
        "watch {watch} of the VMM is over ({why}), and nothing was saved or frozen: pause the guest, and request `freeze` again"
    )]
    WatchOver {
        /// The watch.
        watch: WatchId,
        /// Why it is over.
        why: WatchEnd,
    },
    /// The frozen memory has lost a page, and was given up.
    #[error("the frozen memory is not saved: {0}")]
    Lost(LossReason),
    /// The record of write protection exceeds the budget.
    #[error("the memory of the VMM is not write-protected: {0}; raise the budget of the endpoint")]
    Budget(#[from] BudgetExceeded),
    /// A list of its pages exceeds the budget.
    #[error("the list of the VMM's pages: {0}; raise the budget of the endpoint")]
    Ranges(#[source] BudgetExceeded),
    /// Its memory is not of a kind that can be frozen.
    #[error("memory in huge pages of hugetlbfs is not frozen: pause the guest for a snapshot")]
    HugePages,
    /// As for huge pages.
    #[error(
        "memory that is shared can be written to through another mapping, so it is not frozen: pause the guest for a snapshot"
    )]
    SharedMemory,
    /// The kernel does not protect its memory.
    #[error("write-protecting the memory of the VMM: {0}")]
    Protect(SysError),
    /// The snapshot could not be written.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// The snapshot could not be read.
    #[error(transparent)]
    Open(#[from] OpenError),
}
