//! System calls on clocks and sleeps. The clocks are the host's: they run between calls and never
//! go back.

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::cpu_time::is_processor_clock;
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::kernel::time::MonotonicTime;
use crate::sentry::kernel::time::{nanoseconds, now};
use crate::sentry::mm::user_memory::{copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

use std::time::Duration;

use rustix::io::Errno;
use rustix::time::ClockId;

fn clock_of(number: u64) -> Result<ClockId, Errno> {
    match number as i32 {
        libc::CLOCK_REALTIME => Ok(ClockId::Realtime),
        libc::CLOCK_MONOTONIC => Ok(ClockId::Monotonic),
        // As the vDSO returns them, so that calls and the vDSO agree.
        libc::CLOCK_REALTIME_COARSE => Ok(ClockId::RealtimeCoarse),
        libc::CLOCK_MONOTONIC_COARSE => Ok(ClockId::MonotonicCoarse),
        libc::CLOCK_MONOTONIC_RAW => Ok(ClockId::MonotonicRaw),
        libc::CLOCK_BOOTTIME => Ok(ClockId::Boottime),
        _ => Err(Errno::INVAL),
    }
}

/// Seconds and nanoseconds at `address`, as a length.
pub(in crate::sentry) fn length_in(process: &Process, address: u64) -> SyscallResult<Duration> {
    let seconds = word_in(process, address)? as i64;
    let nanoseconds = word_in(process, address.wrapping_add(8))? as i64;
    if seconds < 0 || !(0..1_000_000_000).contains(&nanoseconds) {
        return Err(Errno::INVAL.into());
    }
    Ok(Duration::new(seconds as u64, nanoseconds as u32))
}

/// Seconds and microseconds at `address`, as nanoseconds.
pub(in crate::sentry) fn micro_in(process: &Process, address: u64) -> SyscallResult<u64> {
    let seconds = word_in(process, address)?;
    let micros = word_in(process, address.wrapping_add(8))?;
    if seconds > i64::MAX as u64 || micros >= 1_000_000 {
        return Err(Errno::INVAL.into());
    }
    Ok(nanoseconds(Duration::new(seconds, micros as u32 * 1000)))
}

impl Sentry {
    /// The moment `wait` from now, or, if it is `absolute`, when `clock` says so.
    pub(in crate::sentry) fn moment_after(
        &self,
        clock: u64,
        wait: Duration,
        absolute: bool,
    ) -> SyscallResult<MonotonicTime> {
        let clock = clock_of(clock)?;
        let mut wait = nanoseconds(wait);
        if absolute {
            wait = wait.saturating_sub(self.streams.clock.read(clock));
        }
        Ok(self.now().saturating_add(wait))
    }

    /// Nanoseconds since `clock` has shown this time; 0 if it has not yet.
    pub(in crate::sentry) fn late_by(&self, clock: u64, time: Duration) -> SyscallResult<u64> {
        let now = self.streams.clock.read(clock_of(clock)?);
        Ok(now.saturating_sub(nanoseconds(time)))
    }

    /// `clock_gettime(2)`: the monotonic clocks stand still while the guest is frozen. `CLOCK_TAI`
    /// and the alarm clocks are `EINVAL`.
    pub(in crate::sentry) fn sys_clock_gettime(
        &mut self,
        process: &mut Process,
        clock: u64,
        to: u64,
    ) -> SyscallResult {
        if is_processor_clock(clock) {
            self.account(process);
            let spent = self.state.processor_time(clock)?;
            let bytes =
                StructBuilder::default().word(spent / 1_000_000_000).word(spent % 1_000_000_000);
            copy_out(process, to, &bytes.0)?;
            return Ok(ZERO);
        }
        let now = self.streams.clock.read(clock_of(clock)?);
        let bytes = StructBuilder::default().word(now / 1_000_000_000).word(now % 1_000_000_000);
        copy_out(process, to, &bytes.0)?;
        Ok(ZERO)
    }

    /// `clock_getres(2)`: every clock has a resolution of 1 ns.
    pub(in crate::sentry) fn sys_clock_getres(
        &mut self,
        process: &mut Process,
        clock: u64,
        to: u64,
    ) -> SyscallResult {
        if is_processor_clock(clock) {
            self.state.processor_time(clock)?;
        } else {
            clock_of(clock)?;
        }
        if to != 0 {
            copy_out(process, to, &StructBuilder::default().word(0).word(1).0)?;
        }
        Ok(ZERO)
    }

    /// `gettimeofday(2)`: the time zone is UTC.
    pub(in crate::sentry) fn sys_gettimeofday(
        &mut self,
        process: &mut Process,
        to: u64,
        zone: u64,
    ) -> SyscallResult {
        if to != 0 {
            let now = now();
            let bytes =
                StructBuilder::default().word(now.seconds as u64).word(u64::from(now.nanos) / 1000);
            copy_out(process, to, &bytes.0)?;
        }
        if zone != 0 {
            copy_out(process, zone, &[0; 8])?;
        }
        Ok(ZERO)
    }

    /// `time(2)`, as on Linux.
    pub(in crate::sentry) fn sys_time(&mut self, process: &mut Process, to: u64) -> SyscallResult {
        let seconds = now().seconds as u64;
        if to != 0 {
            copy_out(process, to, &seconds.to_le_bytes())?;
        }
        Ok(SyscallControl::Value(seconds))
    }

    /// `clock_nanosleep(2)`: clocks of CPU time are `EOPNOTSUPP`, the coarse clocks are accepted,
    /// and unknown flags are ignored.
    pub(in crate::sentry) fn sys_clock_nanosleep(
        &mut self,
        process: &Process,
        clock: u64,
        flags: u64,
        address: u64,
    ) -> SyscallResult {
        if is_processor_clock(clock) {
            return Err(Errno::OPNOTSUPP.into());
        }
        let absolute = flags & libc::TIMER_ABSTIME as u64 != 0;
        let until = match &self.resumed {
            Some(wait) => wait.until,
            None => {
                let length = length_in(process, address)?;
                let until = self.moment_after(clock, length, absolute)?;
                Some(until)
            }
        };
        if self.passed(until) {
            Ok(ZERO)
        } else {
            Ok(SyscallControl::Wait(Wait::new(WaitReason::Nothing, until)))
        }
    }

    /// `nanosleep(2)`: as `clock_nanosleep` with `CLOCK_MONOTONIC`.
    pub(in crate::sentry) fn sys_nanosleep(
        &mut self,
        process: &Process,
        request: u64,
    ) -> SyscallResult {
        self.sys_clock_nanosleep(process, libc::CLOCK_MONOTONIC as u64, 0, request)
    }
}
