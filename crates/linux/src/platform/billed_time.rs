//! CPU time of the processes that run guests, for bills.
//!
//! Promises: the time of each process is counted once, on the thread that ran its guest, however
//! the process ends. A guest process that waits costs nothing. A measurement is one system call for
//! each process that ran.

use std::cell::Cell;
use std::time::Duration;

use super::process::Process;

thread_local! {
    /// The time that was counted and not taken yet.
    static PENDING_TIME: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// CPU time of guest processes that this thread has run since the last call. The time of the thread
/// itself, which serves their system calls, is not part of it.
#[must_use]
pub fn take_guest_cpu_time() -> Duration {
    PENDING_TIME.take()
}

/// CPU time that was counted on this thread and not taken: for differences of two moments.
#[must_use]
pub fn guest_cpu_time() -> Duration {
    PENDING_TIME.get()
}

impl Process {
    /// Counts the time since the last measurement.
    pub(crate) fn bill(&mut self) {
        let Some(used) = self.born.cpu_time() else { return };
        let more = used.saturating_sub(std::mem::replace(&mut self.billed, used));
        PENDING_TIME.set(PENDING_TIME.get().saturating_add(more));
    }
}
