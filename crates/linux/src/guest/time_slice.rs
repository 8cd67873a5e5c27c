//! The time slice of a thread, in CPU time.
//!
//! Promises: a slice ends after [`SLICE`] of CPU time of the guest and its sentry together, or
//! after [`MAX_SLICE`], but not before the guest has run. By wall time alone, a thread of a busy
//! host would be interrupted before it got a processor, and each of its calls would cost an
//! interrupt. May break it: a host where the CPU time of another process cannot be read; wall time
//! decides there.

use std::time::{Duration, Instant};

/// CPU time of a thread while others can run.
const SLICE: Duration = Duration::from_millis(4);
/// Wall time after which others run, if the thread has run at all.
const MAX_SLICE: Duration = Duration::from_millis(40);
/// CPU time of a guest that has run: a few calls.
const MIN_CPU_TIME: Duration = Duration::from_micros(50);

/// CPU times of a guest process and of the thread that serves it.
#[derive(Clone, Copy, Debug)]
pub(super) struct CpuTimes {
    pub(super) guest: Duration,
    pub(super) sentry: Duration,
}

/// The slice of the running thread.
#[derive(Debug)]
pub(super) struct TimeSlice {
    began: Instant,
    /// CPU times at the beginning; `None` if they are not known, and wall time decides.
    before: Option<CpuTimes>,
    /// It is not over before this time.
    lasts_until: Instant,
}

impl TimeSlice {
    /// A slice that begins now.
    pub(super) fn new(before: Option<CpuTimes>) -> Self {
        let began = Instant::now();
        Self { began, before, lasts_until: began + SLICE }
    }

    /// The time at which it has to be checked.
    pub(super) fn lasts_until(&self) -> Instant {
        self.lasts_until
    }

    /// Whether the thread has used its slice; otherwise it lasts longer. `times` are read if it
    /// matters.
    pub(super) fn is_over(&mut self, times: impl FnOnce() -> Option<CpuTimes>) -> bool {
        self.is_over_at(Instant::now(), times)
    }

    fn is_over_at(&mut self, now: Instant, times: impl FnOnce() -> Option<CpuTimes>) -> bool {
        if now < self.lasts_until {
            return false;
        }
        let (Some(before), Some(times)) = (self.before, times()) else { return true };
        let guest = times.guest.saturating_sub(before.guest);
        let used = guest + times.sentry.saturating_sub(before.sentry);
        let left = SLICE.saturating_sub(used);
        let is_late = now.duration_since(self.began) >= MAX_SLICE && guest >= MIN_CPU_TIME;
        if left.is_zero() || is_late {
            return true;
        }
        // It cannot be used up earlier, because the two run in turns.
        self.lasts_until = now + left;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slice, and the time when it has lasted for `length`.
    fn aged(length: Duration) -> (TimeSlice, Instant) {
        let slice = TimeSlice::new(Some(CpuTimes { guest: length, sentry: length }));
        let now = slice.began + length;
        (slice, now)
    }

    fn after(by: Duration, guest: Duration, sentry: Duration) -> Option<CpuTimes> {
        Some(CpuTimes { guest: by + guest, sentry: by + sentry })
    }

    #[test]
    fn a_slice_is_not_used_up_while_the_guest_waits_for_a_processor() {
        let long = MAX_SLICE * 10;
        let (mut slice, now) = aged(long);
        assert!(!slice.is_over_at(now, || after(long, Duration::ZERO, Duration::ZERO)));
        assert!(slice.lasts_until() > now);
        let (mut slice, now) = aged(SLICE);
        assert!(!slice.is_over_at(now, || after(SLICE, SLICE / 4, SLICE / 4)));
        let later = now + SLICE / 4;
        assert!(!slice.is_over_at(later, || unreachable!("it lasts for two more milliseconds")));
    }

    #[test]
    fn a_slice_ends_by_cpu_time_of_guest_and_sentry_and_by_wall_time() {
        let is_over = |length: Duration, times: Option<CpuTimes>| {
            let (mut slice, now) = aged(length);
            slice.is_over_at(now, || times)
        };
        assert!(is_over(SLICE, after(SLICE, SLICE / 2, SLICE / 2)));
        assert!(is_over(SLICE, None), "wall time decides where CPU time is unknown");
        assert!(is_over(MAX_SLICE, after(MAX_SLICE, MIN_CPU_TIME, Duration::ZERO)));
        assert!(!is_over(MAX_SLICE / 2, after(MAX_SLICE / 2, MIN_CPU_TIME, SLICE / 2)));
    }
}
