//! Calls about the alarm and about timers that send signals.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::cpu_time::is_processor_clock;
use crate::sentry::kernel::time::MonotonicTime;
use crate::sentry::kernel::time::nanoseconds;
use crate::sentry::kernel::timers::PosixTimer;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::clock::{length_in, micro_in};

// Notification of an expired timer (`sigev_notify`).
const BY_SIGNAL: u32 = 0;
const NOT_AT_ALL: u32 = 1;
/// By a thread, which the C library makes of a signal.
const BY_THREAD: u32 = 2;
const TO_THREAD: u32 = 4;

/// `struct itimerspec`: how long between, and until first.
fn times(every: u64, left: u64) -> Vec<u8> {
    let time = |bytes: StructBuilder, nanos: u64| {
        bytes.word(nanos / 1_000_000_000).word(nanos % 1_000_000_000)
    };
    time(time(StructBuilder::default(), every), left).0
}

impl Sentry {
    /// `alarm(2)`, as on Linux.
    pub(in crate::sentry) fn sys_alarm(&mut self, seconds: u64) -> SyscallResult {
        let left = self.alarm_left().0.div_ceil(1_000_000_000);
        self.set_alarm(seconds.min(u64::from(u32::MAX)) * 1_000_000_000, 0);
        Ok(SyscallControl::Value(left))
    }

    /// Nanoseconds until the alarm, and between alarms.
    fn alarm_left(&self) -> (u64, u64) {
        let (at, interval) = self.state.current().timers.alarm.unwrap_or_default();
        if at == 0 { (0, 0) } else { (at.saturating_sub(self.now()).max(1), interval) }
    }

    fn set_alarm(&mut self, after: u64, interval: u64) {
        let alarm = (after > 0).then(|| (self.now().saturating_add(after), interval));
        if self.state.current().timers.alarm != alarm {
            self.change().current_mut().timers.alarm = alarm;
        }
    }

    pub(in crate::sentry) fn interval_timer(
        &mut self,
        process: &mut Process,
        which: u64,
        new: Option<u64>,
        old: u64,
    ) -> SyscallResult {
        if which > libc::ITIMER_PROF as u64 {
            return Err(Errno::INVAL.into());
        }
        let by_processor = (which as usize).checked_sub(1);
        if by_processor.is_some() {
            self.account(process);
        }
        let spent = self.state.current().info.spent;
        let (left, every) =
            match by_processor.map(|which| self.state.current().timers.by_processor[which]) {
                None => self.alarm_left(),
                Some(None) => (0, 0),
                Some(Some((at, every))) => (at.saturating_sub(spent).max(1000), every),
            };
        if let Some(new) = new {
            let (every, first) = match new {
                0 => (0, 0),
                at => (micro_in(process, at)?, micro_in(process, at.wrapping_add(16))?),
            };
            match by_processor {
                None => self.set_alarm(first, every),
                Some(which) => {
                    let alarm = (first > 0).then(|| (spent.saturating_add(first), every));
                    self.change().current_mut().timers.by_processor[which] = alarm;
                }
            }
        }
        if old != 0 {
            let time = |bytes: StructBuilder, nanos: u64| {
                bytes.word(nanos / 1_000_000_000).word(nanos % 1_000_000_000 / 1000)
            };
            copy_out(process, old, &time(time(StructBuilder::default(), every), left).0)?;
        }
        Ok(ZERO)
    }

    /// `setitimer(2)`: all CPU time is user time, so that `ITIMER_VIRTUAL` counts the same as
    /// `ITIMER_PROF`.
    pub(in crate::sentry) fn sys_setitimer(
        &mut self,
        process: &mut Process,
        which: u64,
        new: u64,
        old: u64,
    ) -> SyscallResult {
        self.interval_timer(process, which, Some(new), old)
    }

    /// `getitimer(2)`: as `setitimer`.
    pub(in crate::sentry) fn sys_getitimer(
        &mut self,
        process: &mut Process,
        which: u64,
        to: u64,
    ) -> SyscallResult {
        self.interval_timer(process, which, None, to)
    }

    /// `timer_create(2)`: timers of every clock count the time that the guest runs. The coarse
    /// clocks are accepted, and the alarm clocks are `EINVAL`.
    pub(in crate::sentry) fn sys_timer_create(
        &mut self,
        process: &mut Process,
        clock: u64,
        event: u64,
        to: u64,
    ) -> SyscallResult {
        let clock = self.timer_clock(process, clock)?;
        let bell = |signal: Option<u8>, thread: Option<u32>, value: u64| PosixTimer {
            clock,
            at: None,
            every: 0,
            signal,
            thread,
            value,
            overrun: 0,
        };
        let bell = match event {
            0 => bell(Some(libc::SIGALRM as u8), None, u64::MAX),
            at => {
                let bytes = copy_in(process, at, 20)?;
                let int = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| bytes[at + n]));
                let value = u64::from(int(0)) | u64::from(int(4)) << 32;
                let signal = u8::try_from(int(8)).ok().filter(|signal| (1..=64).contains(signal));
                match int(12) {
                    NOT_AT_ALL => bell(None, None, value),
                    BY_SIGNAL | BY_THREAD => bell(Some(signal.ok_or(Errno::INVAL)?), None, value),
                    TO_THREAD => {
                        let thread = int(16);
                        self.state.current().threads.get(thread).ok_or(Errno::INVAL)?;
                        bell(Some(signal.ok_or(Errno::INVAL)?), Some(thread), value)
                    }
                    _ => return Err(Errno::INVAL.into()),
                }
            }
        };
        let id = self.change().current_mut().timers.add(bell)?;
        if event == 0 {
            // It is identified by its number.
            self.change().current_mut().timers.get_mut(id.into())?.value = id.into();
        }
        if let Err(stop) = copy_out(process, to, &id.to_le_bytes()) {
            self.change().current_mut().timers.remove(id.into())?;
            return Err(stop);
        }
        Ok(ZERO)
    }

    /// `timer_settime(2)`, as on Linux.
    pub(in crate::sentry) fn sys_timer_settime(
        &mut self,
        process: &mut Process,
        id: u64,
        flags: u64,
        new: u64,
        old: u64,
    ) -> SyscallResult {
        let bell = self.state.current().timers.get(id & u64::from(u32::MAX))?.clone();
        let every = nanoseconds(length_in(process, new)?);
        let first = length_in(process, new.wrapping_add(16))?;
        let absolute = flags & libc::TIMER_ABSTIME as u64 != 0;
        let at = match first.is_zero() {
            true => None,
            false if is_processor_clock(bell.clock) => {
                let from = if absolute { 0 } else { self.timer_now(process, bell.clock)? };
                Some(from.saturating_add(nanoseconds(first)))
            }
            false => Some(self.moment_after(bell.clock, first, absolute)?),
        };
        if old != 0 {
            let now = self.timer_now(process, bell.clock)?;
            copy_out(process, old, &times(bell.every, bell.left(now)))?;
        }
        let (mut at, mut times) = (at, 0);
        if absolute && every > 0 && !first.is_zero() && !is_processor_clock(bell.clock) {
            // It counts from the moment that is past.
            let late = self.late_by(bell.clock, first)?;
            times = if late > 0 { late / every + 1 } else { 0 };
            at = at.map(|at| if late > 0 { at.saturating_add(every - late % every) } else { at });
        }
        let id = id & u64::from(u32::MAX);
        let state = self.change();
        *state.current_mut().timers.get_mut(id)? = PosixTimer { at, every, overrun: 0, ..bell };
        state.ring_late(id as u32, times);
        Ok(ZERO)
    }

    /// `timer_gettime(2)`, as on Linux.
    pub(in crate::sentry) fn sys_timer_gettime(
        &mut self,
        process: &mut Process,
        id: u64,
        to: u64,
    ) -> SyscallResult {
        let bell = self.state.current().timers.get(id & u64::from(u32::MAX))?.clone();
        let now = self.timer_now(process, bell.clock)?;
        copy_out(process, to, &times(bell.every, bell.left(now)))?;
        Ok(ZERO)
    }

    /// The clock of a new timer. CPU-time clocks get their global number.
    fn timer_clock(&mut self, process: &mut Process, clock: u64) -> SyscallResult<u64> {
        if !is_processor_clock(clock) {
            self.moment_after(clock, std::time::Duration::ZERO, false)?;
            return Ok(clock);
        }
        self.account(process);
        Ok(self.state.lasting_clock(clock)?)
    }

    /// The time of the clock of a timer.
    fn timer_now(&mut self, process: &mut Process, clock: u64) -> SyscallResult<u64> {
        if !is_processor_clock(clock) {
            return Ok(self.now());
        }
        self.account(process);
        // Of a thread that has ended.
        Ok(self.state.processor_time(clock).unwrap_or_default())
    }

    /// `timer_getoverrun(2)`, as on Linux.
    pub(in crate::sentry) fn sys_timer_getoverrun(&mut self, id: u64) -> SyscallResult {
        let bell = self.state.current().timers.get(id & u64::from(u32::MAX))?;
        Ok(SyscallControl::Value(bell.overrun))
    }

    /// `timer_delete(2)`, as on Linux.
    pub(in crate::sentry) fn sys_timer_delete(&mut self, id: u64) -> SyscallResult {
        let id = id & u64::from(u32::MAX);
        self.state.current().timers.get(id)?;
        self.change().current_mut().timers.remove(id)?;
        Ok(ZERO)
    }
}

impl Sentry {
    /// Sends the signals of timers of the current process that have expired by `now`.
    pub(crate) fn ring(&mut self, now: MonotonicTime) {
        if self.state.current().timers.next().is_some_and(|at| at <= now) {
            self.change().ring(now);
        }
    }
}
