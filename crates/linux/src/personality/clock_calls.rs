//! Calls that tell the time or wait. Time is the host's: it goes on between calls and never back.

use std::time::Duration;

use afresh_files::Time;
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::encode::Bytes;
use super::{DONE, End, Outcome, Person, Served, copy_in, copy_out, word_in};
use crate::platform::Process;

fn clock_of(number: u64) -> Result<ClockId, Errno> {
    match number as i32 {
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE => Ok(ClockId::Realtime),
        libc::CLOCK_MONOTONIC
        | libc::CLOCK_MONOTONIC_RAW
        | libc::CLOCK_MONOTONIC_COARSE
        | libc::CLOCK_BOOTTIME => Ok(ClockId::Monotonic),
        // The processor time of guest and sentry together.
        libc::CLOCK_PROCESS_CPUTIME_ID => Ok(ClockId::ProcessCPUTime),
        libc::CLOCK_THREAD_CPUTIME_ID => Ok(ClockId::ThreadCPUTime),
        _ => Err(Errno::INVAL),
    }
}

/// Now, as files are stamped with it.
pub(super) fn now() -> Time {
    let now = clock_gettime(ClockId::Realtime);
    Time { seconds: now.tv_sec, nanos: now.tv_nsec as u32 }
}

/// Seconds and nanoseconds at `address`, as a length.
fn length_in(process: &Process, address: u64) -> Served<Duration> {
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

impl Person {
    pub(super) fn clock(&mut self, process: &mut Process, clock: u64, to: u64) -> Served {
        let now = clock_gettime(clock_of(clock)?);
        let bytes = Bytes::default().word(now.tv_sec as u64).word(now.tv_nsec as u64);
        copy_out(process, to, &bytes.0)?;
        Ok(DONE)
    }

    pub(super) fn clock_step(&mut self, process: &mut Process, clock: u64, to: u64) -> Served {
        clock_of(clock)?;
        if to != 0 {
            copy_out(process, to, &Bytes::default().word(0).word(1).0)?;
        }
        Ok(DONE)
    }

    pub(super) fn time_of_day(&mut self, process: &mut Process, to: u64) -> Served {
        if to != 0 {
            let now = now();
            let bytes = Bytes::default().word(now.seconds as u64).word(u64::from(now.nanos) / 1000);
            copy_out(process, to, &bytes.0)?;
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

    pub(super) fn sleep(
        &mut self,
        process: &Process,
        clock: u64,
        flags: u64,
        address: u64,
    ) -> Served {
        let clock = clock_of(clock)?;
        let mut wait = length_in(process, address)?;
        if flags & libc::TIMER_ABSTIME as u64 != 0 {
            wait = wait.saturating_sub(length(clock_gettime(clock)));
        }
        Ok(Outcome::Later(0, wait))
    }

    /// One thread can wake nobody, and nobody wakes it.
    pub(super) fn futex(
        &mut self,
        process: &Process,
        word: u64,
        operation: u64,
        value: u64,
        timeout: u64,
    ) -> Served {
        const WAIT: i32 = 0;
        const WAKE: i32 = 1;
        const WAIT_BITSET: i32 = 9;
        const WAKE_BITSET: i32 = 10;
        const REALTIME: i32 = 256;
        let operation = operation as i32;
        match operation & 0x7f {
            WAKE | WAKE_BITSET => Ok(DONE),
            kind @ (WAIT | WAIT_BITSET) => {
                if !word.is_multiple_of(4) {
                    return Err(Errno::INVAL.into());
                }
                if copy_in(process, word, 4)? != (value as u32).to_le_bytes() {
                    return Err(Errno::AGAIN.into());
                }
                if timeout == 0 {
                    return Ok(Outcome::End(End::Deadlock));
                }
                let mut wait = length_in(process, timeout)?;
                if kind == WAIT_BITSET {
                    let clock = if operation & REALTIME != 0 {
                        ClockId::Realtime
                    } else {
                        ClockId::Monotonic
                    };
                    wait = wait.saturating_sub(length(clock_gettime(clock)));
                }
                Ok(Outcome::Later((-i64::from(libc::ETIMEDOUT)) as u64, wait))
            }
            _ => Err(Errno::NOSYS.into()),
        }
    }
}
