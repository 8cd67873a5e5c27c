//! Whether a process still runs, and waits that its end cuts short.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::PlatformError;
use super::process::Process;

/// How long a process that has lost its memory may take to end.
const EXIT_TIMEOUT: Duration = Duration::from_millis(100);

impl Process {
    /// Readable once the process has ended.
    pub(crate) fn ends(&self) -> BorrowedFd<'_> {
        self.born.pidfd.as_fd()
    }

    /// Waits for `length`, or less if the process ends.
    pub(crate) fn pause(&self, length: Duration) {
        let timeout = Timespec::try_from(length).unwrap_or_default();
        let _ = poll(&mut [PollFd::new(&self.born.pidfd, PollFlags::IN)], Some(&timeout));
    }

    /// Refuses a process that has ended.
    pub(crate) fn check_alive(&mut self) -> Result<(), PlatformError> {
        match self.born.try_wait() {
            Ok(Some(status)) => Err(PlatformError::Ended(status)),
            Ok(None) => Ok(()),
            Err(error) => Err(PlatformError::kernel("waiting for the process", error)),
        }
    }

    /// Why something failed that does not while the process lives: mostly it has ended.
    pub(super) fn ended_or(&mut self, error: PlatformError) -> PlatformError {
        self.pause(EXIT_TIMEOUT);
        match self.born.try_wait() {
            Ok(Some(status)) => PlatformError::Ended(status),
            _ => error,
        }
    }
}
