//! Limits of this process that handles of guests keep to: its descriptors, and the size of its
//! files.
//!
//! Promises: handles of all guests take at most half of the descriptors; no change of a file raises
//! `SIGXFSZ`. May break it: a host program outside this process that extends a file while a guest
//! appends to it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::error::Refused;

/// Descriptors that handles of all guests have open.
static OPEN: AtomicU64 = AtomicU64::new(0);

/// A descriptor that counts towards the limit of the process.
#[derive(Debug)]
pub(super) struct CountedFd(OwnedFd);

impl CountedFd {
    /// Opens one, unless guests have as many as they may.
    pub(super) fn open(open: impl FnOnce() -> Result<OwnedFd, Errno>) -> Result<Self, Errno> {
        let limit = getrlimit(Resource::Nofile).current.map_or(u64::MAX, |limit| limit / 2);
        let count = |open: u64| (open < limit).then_some(open + 1);
        if OPEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count).is_err() {
            return Err(Errno::MFILE);
        }
        open().map(Self).inspect_err(|_| {
            OPEN.fetch_sub(1, Ordering::Relaxed);
        })
    }
}

impl Drop for CountedFd {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

impl AsFd for CountedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Serializes changes that may extend a file, while this process has a limit of files. Another
/// guest may extend the file between a check and the change.
static EXTENDING: Mutex<()> = Mutex::new(());

/// Runs `change`, which extends a file. It gets the maximum size of a file (`RLIMIT_FSIZE`), beyond
/// which the kernel would send `SIGXFSZ`, whose default action ends this process.
pub(super) fn extend<T>(change: impl FnOnce(u64) -> Result<T, Refused>) -> Result<T, Refused> {
    let Some(limit) = getrlimit(Resource::Fsize).current else { return change(u64::MAX) };
    let _turn = EXTENDING.lock().unwrap_or_else(PoisonError::into_inner);
    change(limit)
}
