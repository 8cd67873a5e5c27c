//! Whether a process still runs, and waits that its end cuts short.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus, waitid};

use super::PlatformError;
use super::process::Process;

/// Time limit for the end of a process that has lost its memory.
const EXIT_TIMEOUT: Duration = Duration::from_millis(100);
/// The bit of a status that `wait(2)` returns for a core dump.
const CORE_DUMPED: i32 = 0x80;

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

    /// Why something failed that does not while the process lives: mostly it has ended. Its status
    /// stays for a later wait.
    pub(super) fn ended_or(&self, error: PlatformError) -> PlatformError {
        self.pause(EXIT_TIMEOUT);
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::PidFd(self.ends()), options) {
            Ok(Some(status)) => PlatformError::Ended(exit_status_of(&status)),
            _ => error,
        }
    }
}

/// The status of a process that was waited for, in the form of the standard library.
fn exit_status_of(status: &WaitIdStatus) -> ExitStatus {
    let signal = status.terminating_signal().unwrap_or_default();
    let code = status.exit_status().unwrap_or_default();
    let dumped = if status.dumped() { CORE_DUMPED } else { 0 };
    ExitStatus::from_raw(code << 8 | dumped | signal)
}
