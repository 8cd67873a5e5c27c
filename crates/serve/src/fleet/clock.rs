//! The clock that leases are measured by.
//!
//! What it promises: it goes on while this process is stopped and while the machine sleeps, and nobody sets it.

use rustix::time::{ClockId, clock_gettime};

use super::policy::Moment;

/// Now.
pub(crate) fn now() -> Moment {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Moment::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}
