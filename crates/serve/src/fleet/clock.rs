//! The clock that leases are measured by.
//!
//! Promises: it runs while this process is stopped and while the machine sleeps, and cannot be set.

use rustix::time::{ClockId, clock_gettime};

use super::policy::MonotonicTime;

/// Now.
pub(crate) fn now() -> MonotonicTime {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    MonotonicTime::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The same in milliseconds, as messages between hosts carry it.
pub(super) fn clock_milliseconds() -> u64 {
    u64::try_from(now().as_millis()).unwrap_or(u64::MAX)
}
