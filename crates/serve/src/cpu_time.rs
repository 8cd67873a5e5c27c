//! The use of a call: CPU time, mapped memory, and bytes to servers outside. CPU time is that of
//! its thread, which runs modules and micro-VMs and serves the system calls of Linux programs, and
//! that of the processes that run these programs.
//!
//! Promises: a call that waits costs nothing. May break it: work that a guest leaves to other
//! threads, such as compilation, is not counted. Mapped memory is known from its first change in
//! the call.

use std::time::Duration;

use afresh_sys::host::thread_cpu_time;

/// The CPU time of this thread from now on.
pub(crate) struct CpuTimer {
    began: Duration,
}

impl CpuTimer {
    pub(crate) fn start() -> Self {
        // Earlier time and memory belong to other calls.
        take_process_time();
        begin_memory_peak();
        Self { began: thread_cpu_time() }
    }

    /// The time since the start, on the same thread.
    pub(crate) fn stop(self) -> Duration {
        thread_cpu_time().saturating_sub(self.began) + take_process_time()
    }
}

#[cfg(linux_guests)]
fn take_process_time() -> Duration {
    afresh::linux::take_guest_cpu_time()
}

#[cfg(not(linux_guests))]
fn take_process_time() -> Duration {
    Duration::ZERO
}

/// CPU time of the call that runs on this thread, for differences of two moments within it.
pub(crate) fn call_cpu_time() -> Duration {
    thread_cpu_time().saturating_add(pending_process_time())
}

#[cfg(linux_guests)]
fn pending_process_time() -> Duration {
    afresh::linux::guest_cpu_time()
}

#[cfg(not(linux_guests))]
fn pending_process_time() -> Duration {
    Duration::ZERO
}

#[cfg(linux_guests)]
fn begin_memory_peak() {
    // Ends with the next timer on this thread, and not before: a command may end in between.
    let _ = afresh::linux::MemoryPeak::start(0);
}

#[cfg(not(linux_guests))]
fn begin_memory_peak() {}

/// The peak of the memory that programs have mapped on this thread since the last timer started; 0
/// if they have changed no mapping since then.
#[cfg(linux_guests)]
pub(crate) fn memory_peak() -> u64 {
    afresh::linux::MemoryPeak::until_now()
}

#[cfg(not(linux_guests))]
pub(crate) fn memory_peak() -> u64 {
    0
}

/// Bytes that programs have sent to servers outside while this thread ran them, since the last
/// call.
#[cfg(linux_guests)]
pub(crate) fn take_outbound_bytes() -> u64 {
    afresh::linux::take_outbound_bytes()
}

#[cfg(not(linux_guests))]
pub(crate) fn take_outbound_bytes() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_counts_and_waits_do_not() {
        let timer = CpuTimer::start();
        let begun = thread_cpu_time();
        while thread_cpu_time() < begun + Duration::from_millis(20) {}
        let worked = timer.stop();
        assert!(worked >= Duration::from_millis(20));
        let timer = CpuTimer::start();
        std::thread::sleep(Duration::from_millis(200));
        assert!(timer.stop() < Duration::from_millis(200));
    }
}
