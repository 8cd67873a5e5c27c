//! The CPU time that a call may use: that of the guest processes, and of the thread that serves
//! their system calls.
//!
//! Promises: a call ends within two milliseconds of CPU time after it has used its limit, never
//! before, and its waits do not count. A call without a limit makes no measurement. May break it: a
//! receiver of output on the same thread, whose time counts as well.

use std::time::{Duration, Instant};

use afresh_sys::host::thread_cpu_time;

use crate::platform::guest_cpu_time;

/// Minimum time between two measurements.
const MIN_INTERVAL: Duration = Duration::from_millis(1);

/// Maximum time between two measurements.
const MAX_INTERVAL: Duration = Duration::from_secs(1 << 20);

/// CPU time of a call; unlimited by default.
#[derive(Debug, Default)]
pub(crate) struct CpuBudget(Option<LimitedTime>);

#[derive(Debug)]
struct LimitedTime {
    limit: Duration,
    /// The CPU time at the beginning.
    began: Duration,
    /// The limit is not reached before.
    next: Instant,
}

/// CPU time of this thread, and of guest processes as far as it was counted.
fn counted() -> Duration {
    thread_cpu_time().saturating_add(guest_cpu_time())
}

impl CpuBudget {
    /// For a call that begins now on this thread.
    pub(crate) fn new(limit: Option<Duration>) -> Self {
        let begin = |limit| LimitedTime { limit, began: counted(), next: Instant::now() };
        Self(limit.map(begin))
    }

    /// The earlier of `moment` and the next measurement.
    pub(super) fn bound(&self, moment: Instant) -> Instant {
        self.0.as_ref().map_or(moment, |limited| moment.min(limited.next))
    }

    pub(super) fn is_due(&self) -> bool {
        self.0.as_ref().is_some_and(|limited| Instant::now() >= limited.next)
    }

    /// Whether the limit is reached, by the time that is counted.
    pub(super) fn is_over(&mut self) -> bool {
        let Some(limited) = &mut self.0 else { return false };
        let used = counted().saturating_sub(limited.began);
        let left = limited.limit.saturating_sub(used);
        // The process and the thread can run at the same time.
        let (now, wait) = (Instant::now(), (left / 2).max(MIN_INTERVAL));
        limited.next = now.checked_add(wait).unwrap_or(now + MAX_INTERVAL);
        left.is_zero()
    }
}
