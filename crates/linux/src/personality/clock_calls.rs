//! Calls that tell the time or wait. Time is the host's: it goes on between calls and never back.

use std::time::Duration;

use afresh_files::Time;
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::encode::Bytes;
use super::processor::is_processor_clock;
use super::threads::{Moment, On, Wait};
use super::{DONE, Outcome, Person, Served, copy_out, word_in};
use crate::platform::Process;

fn clock_of(number: u64) -> Result<ClockId, Errno> {
    match number as i32 {
        libc::CLOCK_REALTIME => Ok(ClockId::Realtime),
        libc::CLOCK_MONOTONIC => Ok(ClockId::Monotonic),
        // As the vDSO tells them, which no call can be seen beside otherwise.
        libc::CLOCK_REALTIME_COARSE => Ok(ClockId::RealtimeCoarse),
        libc::CLOCK_MONOTONIC_COARSE => Ok(ClockId::MonotonicCoarse),
        libc::CLOCK_MONOTONIC_RAW => Ok(ClockId::MonotonicRaw),
        libc::CLOCK_BOOTTIME => Ok(ClockId::Boottime),
        _ => Err(Errno::INVAL),
    }
}

/// Now, as files are stamped with it.
pub(super) fn now() -> Time {
    let now = clock_gettime(ClockId::Realtime);
    Time { seconds: now.tv_sec, nanos: now.tv_nsec as u32 }
}

/// Seconds and nanoseconds at `address`, as a length.
pub(super) fn length_in(process: &Process, address: u64) -> Served<Duration> {
    let seconds = word_in(process, address)? as i64;
    let nanoseconds = word_in(process, address.wrapping_add(8))? as i64;
    if seconds < 0 || !(0..1_000_000_000).contains(&nanoseconds) {
        return Err(Errno::INVAL.into());
    }
    Ok(Duration::new(seconds as u64, nanoseconds as u32))
}

fn length(time: Timespec) -> Duration {
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
}

/// This moment.
pub(crate) fn now_moment() -> Moment {
    nanoseconds(length(clock_gettime(ClockId::Monotonic)))
}

/// Whether a moment is there or gone; never, if there is none.
pub(crate) fn passed(until: Option<Moment>) -> bool {
    until.is_some_and(|until| until <= now_moment())
}

pub(super) fn nanoseconds(length: Duration) -> u64 {
    u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)
}

/// The moment `length` from now, or, if it is `absolute`, when `clock` says so.
pub(super) fn moment_after(clock: u64, mut wait: Duration, absolute: bool) -> Served<Moment> {
    let clock = clock_of(clock)?;
    if absolute {
        wait = wait.saturating_sub(length(clock_gettime(clock)));
    }
    Ok(now_moment().saturating_add(nanoseconds(wait)))
}

/// Seconds and microseconds at `address`, as nanoseconds.
pub(super) fn micro_in(process: &Process, address: u64) -> Served<u64> {
    let seconds = word_in(process, address)?;
    let micros = word_in(process, address.wrapping_add(8))?;
    if seconds > i64::MAX as u64 || micros >= 1_000_000 {
        return Err(Errno::INVAL.into());
    }
    Ok(nanoseconds(Duration::new(seconds, micros as u32 * 1000)))
}

impl Person {
    pub(super) fn clock(&mut self, process: &mut Process, clock: u64, to: u64) -> Served {
        if is_processor_clock(clock) {
            self.account(process);
            let spent = self.state.processor_time(clock)?;
            let bytes = Bytes::default().word(spent / 1_000_000_000).word(spent % 1_000_000_000);
            copy_out(process, to, &bytes.0)?;
            return Ok(DONE);
        }
        let now = clock_gettime(clock_of(clock)?);
        let bytes = Bytes::default().word(now.tv_sec as u64).word(now.tv_nsec as u64);
        copy_out(process, to, &bytes.0)?;
        Ok(DONE)
    }

    pub(super) fn clock_step(&mut self, process: &mut Process, clock: u64, to: u64) -> Served {
        if is_processor_clock(clock) {
            self.state.processor_time(clock)?;
        } else {
            clock_of(clock)?;
        }
        if to != 0 {
            copy_out(process, to, &Bytes::default().word(0).word(1).0)?;
        }
        Ok(DONE)
    }

    pub(super) fn time_of_day(&mut self, process: &mut Process, to: u64, zone: u64) -> Served {
        if to != 0 {
            let now = now();
            let bytes = Bytes::default().word(now.seconds as u64).word(u64::from(now.nanos) / 1000);
            copy_out(process, to, &bytes.0)?;
        }
        if zone != 0 {
            copy_out(process, zone, &[0; 8])?;
        }
        Ok(DONE)
    }

    pub(super) fn seconds(&mut self, process: &mut Process, to: u64) -> Served {
        let seconds = now().seconds as u64;
        if to != 0 {
            copy_out(process, to, &seconds.to_le_bytes())?;
        }
        Ok(Outcome::Value(seconds))
    }

    /// Sleeps; a signal ends it before its time.
    pub(super) fn sleep(
        &mut self,
        process: &Process,
        clock: u64,
        flags: u64,
        address: u64,
    ) -> Served {
        if is_processor_clock(clock) {
            return Err(Errno::OPNOTSUPP.into());
        }
        let absolute = flags & libc::TIMER_ABSTIME as u64 != 0;
        let until = match &self.resumed {
            Some(wait) => wait.until,
            None => {
                let length = length_in(process, address)?;
                let until = moment_after(clock, length, absolute)?;
                Some(until)
            }
        };
        if passed(until) { Ok(DONE) } else { Ok(Outcome::Wait(Wait::new(On::Nothing, until))) }
    }
}
