//! Clocks of the host, as moments: they run on between calls and never go back.

use crate::sentry::kernel::threads::MonotonicTime;
use afresh_files::Time;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::time::Duration;

/// Now, as files are stamped with it.
pub(in crate::sentry) fn now() -> Time {
    let now = clock_gettime(ClockId::Realtime);
    Time { seconds: now.tv_sec, nanos: now.tv_nsec as u32 }
}

pub(in crate::sentry) fn length(time: Timespec) -> Duration {
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
}

/// This moment.
pub(crate) fn now_moment() -> MonotonicTime {
    nanoseconds(length(clock_gettime(ClockId::Monotonic)))
}

/// Whether a moment has passed; `None` never does.
pub(crate) fn passed(until: Option<MonotonicTime>) -> bool {
    until.is_some_and(|until| until <= now_moment())
}

pub(in crate::sentry) fn nanoseconds(length: Duration) -> u64 {
    u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)
}
