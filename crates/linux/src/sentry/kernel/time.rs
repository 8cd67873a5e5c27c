//! Clocks of a guest. While it is frozen its monotonic time stands still, as that of a suspended
//! machine does.
//!
//! Promises: after a reset, a rollback, a fork or a thaw the monotonic clock continues from the
//! time of the freeze. The clock of the boot also counts the time in between, and the date is the
//! host's. No clock goes backwards in a running guest.

use std::time::Duration;

use afresh_files::Time;
use rustix::time::{ClockId, Timespec, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::platform::ClockOffsets;

/// A moment: nanoseconds of `CLOCK_MONOTONIC` in the guest.
pub(crate) type MonotonicTime = u64;

/// Latest time of a frozen clock: 146 years.
const LATEST: u64 = u64::MAX >> 2;

/// Clocks of a guest that runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GuestClock(ClockOffsets);

/// The clocks of a frozen guest, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoppedClock {
    monotonic: MonotonicTime,
    boot: u64,
    /// The date at that time.
    real: u64,
}

fn host(clock: ClockId) -> u64 {
    nanoseconds(length(clock_gettime(clock)))
}

impl GuestClock {
    /// The offsets that the guest's vDSO adds.
    pub(crate) fn offsets(self) -> ClockOffsets {
        self.0
    }

    /// This moment.
    pub(crate) fn now(self) -> MonotonicTime {
        self.read(ClockId::Monotonic)
    }

    /// Nanoseconds that a clock shows.
    pub(crate) fn read(self, clock: ClockId) -> u64 {
        let offset = match clock {
            ClockId::Monotonic | ClockId::MonotonicCoarse | ClockId::MonotonicRaw => {
                self.0.monotonic
            }
            ClockId::Boottime => self.0.boot,
            _ => 0,
        };
        host(clock).wrapping_add_signed(offset)
    }

    /// Whether a moment has passed; `None` never does.
    pub(crate) fn passed(self, until: Option<MonotonicTime>) -> bool {
        until.is_some_and(|until| until <= self.now())
    }

    /// The clocks as they stand now.
    pub(crate) fn stop(self) -> StoppedClock {
        let boot = self.read(ClockId::Boottime);
        StoppedClock { monotonic: self.now(), boot, real: host(ClockId::Realtime) }
    }
}

impl StoppedClock {
    /// The clocks of a guest that continues now.
    pub(crate) fn resume(self) -> GuestClock {
        let frozen = host(ClockId::Realtime).saturating_sub(self.real);
        let offset = |shown: u64, clock| shown.wrapping_sub(host(clock)) as i64;
        GuestClock(ClockOffsets {
            monotonic: offset(self.monotonic, ClockId::Monotonic),
            boot: offset(self.boot.saturating_add(frozen).min(LATEST), ClockId::Boottime),
        })
    }

    /// The moment at which it stands.
    pub(crate) fn now(self) -> MonotonicTime {
        self.monotonic
    }

    /// The error of clocks that cannot continue from there.
    pub(crate) fn check(self) -> Result<(), &'static str> {
        let continues = self.monotonic <= LATEST && self.boot <= LATEST;
        if continues { Ok(()) } else { Err("its clocks are beyond all times") }
    }
}

/// Now, as files are stamped with it.
pub(in crate::sentry) fn now() -> Time {
    let now = clock_gettime(ClockId::Realtime);
    Time { seconds: now.tv_sec, nanos: now.tv_nsec as u32 }
}

fn length(time: Timespec) -> Duration {
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
}

pub(in crate::sentry) fn nanoseconds(length: Duration) -> u64 {
    u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_continues_from_where_it_stopped() {
        let there = StoppedClock { monotonic: 5_000_000_000, boot: 7_000_000_000, real: 0 };
        assert!(there.check().is_ok());
        assert!(StoppedClock { boot: u64::MAX, ..there }.check().is_err());
        let clock = there.resume();
        let stop = clock.stop();
        assert!((5_000_000_000..6_000_000_000_000).contains(&stop.monotonic), "{stop:?}");
        // It was frozen since 1970.
        assert!(stop.boot > 50 * 365 * 86400 * 1_000_000_000, "{stop:?}");
        assert!(clock.passed(Some(5_000_000_000)) && !clock.passed(None));
        assert!(!clock.passed(Some(LATEST)));
        // The latest clock can be stopped and started again.
        let late = StoppedClock { monotonic: LATEST, boot: LATEST, real: 0 };
        assert!(late.resume().now() >= LATEST && late.resume().read(ClockId::Boottime) >= LATEST);
    }
}
