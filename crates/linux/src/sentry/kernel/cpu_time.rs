//! CPU time of guest processes and threads, and timers that count it.
//!
//! It is the CPU time of the host processes that run them; the time of the sentry does not count.
//! All of it counts as user time (`utime`). It is measured from the first call that needs it, at
//! each switch of processes or threads, so other guests pay nothing. Time before that counts for
//! the thread that runs then, and time before a reset is dropped.

mod billing;

use crate::resource_numbers;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::resource_limits::ResourceLimits;

const SECOND: u64 = 1_000_000_000;

/// Nanoseconds in a tick, as `times` counts.
pub(in crate::sentry) const TICK: u64 = SECOND / 100;

/// The owner of a CPU-time clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CpuTimeOwner {
    Process(u32),
    Thread(u32),
}

/// Whether a clock counts CPU time.
pub(in crate::sentry) fn is_processor_clock(clock: u64) -> bool {
    let clock = clock as i32;
    clock < 0 || [libc::CLOCK_PROCESS_CPUTIME_ID, libc::CLOCK_THREAD_CPUTIME_ID].contains(&clock)
}

/// `struct rusage`.
pub(in crate::sentry) fn usage(spent: u64, most: u64) -> Vec<u8> {
    let (seconds, micros) = (spent / SECOND, spent % SECOND / 1000);
    StructBuilder::default().word(seconds).word(micros).zeros(16).word(most >> 10).zeros(104).0
}

impl ResourceLimits {
    /// Seconds of processor time that a process may spend, and at most, if either is bounded.
    pub(in crate::sentry) fn seconds(&self) -> Option<(u64, u64)> {
        self.get(resource_numbers::RLIMIT_CPU).filter(|(soft, hard)| soft.min(hard) != &u64::MAX)
    }

    fn set_seconds(&mut self, soft: u64, hard: u64) {
        self.set(resource_numbers::RLIMIT_CPU, (soft.min(hard), hard));
    }
}
