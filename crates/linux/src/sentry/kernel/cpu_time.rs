//! CPU time of guest processes and threads, and timers that count it.
//!
//! User time is the CPU time of the host processes that run them, and system time that of the
//! sentry while it serves their calls. Limits and timers count user time. Both are measured from
//! the first call that needs them, user time at each switch of processes or threads, so other
//! guests pay nothing. Time before that counts for the thread that runs then, and time before a
//! reset is dropped.

mod billing;
pub(in crate::sentry) mod system;

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

/// `struct rusage` of user and system time.
pub(in crate::sentry) fn usage(user: u64, system: u64, most: u64) -> Vec<u8> {
    let times = [user, system].into_iter().fold(StructBuilder::default(), |bytes, time| {
        bytes.word(time / SECOND).word(time % SECOND / 1000)
    });
    times.word(most >> 10).zeros(104).0
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
