//! Calls about signals: handlers, masks, stacks, sending, and the alarm.

use rustix::io::Errno;

use super::clock_calls::{micro_in, now_moment};
use super::encode::Bytes;
use super::signals::{Info, UNTOUCHABLE};
use super::threads::{Moment, NO_STACK};
use super::{DONE, Outcome, Person, Served, copy_in, copy_out, word_in};
use crate::platform::{Process, Register};

/// Least bytes of a signal stack.
const SMALLEST_STACK: u64 = 2048;
/// `SI_TKILL`.
const TO_THREAD: i32 = -6;

impl Person {
    /// Sends to processes: which of them `target` means is as for `kill`.
    pub(super) fn kill(&mut self, target: u64, number: u64) -> Served {
        let family = &self.state.family;
        let own = family.own.id;
        let targets = match target as i32 {
            -1 => family.all_but(own),
            0 => family.group(family.own.group),
            group @ ..0 => family.group(group.unsigned_abs()),
            one => vec![one as u32],
        };
        // Who has ended is there until somebody asks for it, and hears nothing.
        let known = targets.iter().any(|id| family.lives(*id) || family.is_ended(*id));
        if !known {
            return Err(Errno::SRCH.into());
        }
        if number > 64 {
            return Err(Errno::INVAL.into());
        }
        let info = |signal| Info::new(signal, 0, own.into(), 0);
        for target in targets.into_iter().filter(|_| number != 0) {
            if self.state.family.lives(target) {
                self.change().with(target, |state| state.send(None, info(number as u8)));
            }
        }
        Ok(DONE)
    }

    /// `tgkill`, or `tkill` when the first is no process: to one thread.
    pub(super) fn kill_thread(&mut self, process: Option<u64>, id: u64, number: u64) -> Served {
        if id as i32 <= 0 || process.is_some_and(|process| process as i32 <= 0) {
            return Err(Errno::INVAL.into());
        }
        let own = u64::from(self.state.family.own.id);
        if process.is_some_and(|process| process != own)
            || self.state.threads.get(id as u32).is_none()
        {
            return Err(Errno::SRCH.into());
        }
        self.post(Some(id as u32), number, |signal| Info::new(signal, TO_THREAD, own, 0))
    }

    /// With what it says itself: to all of the process, or to one thread.
    pub(super) fn queue(
        &mut self,
        process: &Process,
        to: (u64, Option<u64>),
        number: u64,
        info: u64,
    ) -> Served {
        let known = to.1.is_none_or(|id| self.state.threads.get(id as u32).is_some());
        if to.0 != u64::from(self.state.family.own.id) || !known {
            return Err(Errno::SRCH.into());
        }
        let given = copy_in(process, info, 32)?;
        self.post(to.1.map(|id| id as u32), number, |signal| Info::given(signal, &given))
    }

    fn post(&mut self, to: Option<u32>, number: u64, info: impl FnOnce(u8) -> Info) -> Served {
        match number {
            0 => Ok(DONE),
            1..=64 if self.change().send(to, info(number as u8)) => Ok(DONE),
            1..=64 => Err(Errno::AGAIN.into()),
            _ => Err(Errno::INVAL.into()),
        }
    }

    pub(super) fn handler(
        &mut self,
        process: &mut Process,
        signal: u64,
        new: u64,
        old: u64,
        size: u64,
    ) -> Served {
        if !(1..=64).contains(&signal) || size != 8 {
            return Err(Errno::INVAL.into());
        }
        let known = self.state.handlers.get(&signal).copied().unwrap_or_default();
        if new != 0 {
            if UNTOUCHABLE & 1 << (signal - 1) != 0 {
                return Err(Errno::INVAL.into());
            }
            let bytes = copy_in(process, new, 32)?;
            let bytes: [u8; 32] = bytes.try_into().map_err(|_| Errno::FAULT)?;
            let state = self.change();
            state.handlers.insert(signal, bytes);
            if bytes[..8] == [1, 0, 0, 0, 0, 0, 0, 0] {
                state.pending.drop_all(signal as u8);
                state.threads.values_mut().for_each(|t| t.pending.drop_all(signal as u8));
            }
        }
        if old != 0 {
            copy_out(process, old, &known)?;
        }
        Ok(DONE)
    }

    pub(super) fn block(
        &mut self,
        process: &mut Process,
        how: u64,
        set: u64,
        old: u64,
        size: u64,
    ) -> Served {
        if size != 8 {
            return Err(Errno::INVAL.into());
        }
        let blocked = self.state.threads.current().blocked;
        if set != 0 {
            let set = word_in(process, set)?;
            let new = match how as i32 {
                libc::SIG_BLOCK => blocked | set,
                libc::SIG_UNBLOCK => blocked & !set,
                libc::SIG_SETMASK => set,
                _ => return Err(Errno::INVAL.into()),
            };
            let new = new & !UNTOUCHABLE;
            if new != blocked {
                self.change().threads.current_mut().blocked = new;
            }
        }
        if old != 0 {
            copy_out(process, old, &blocked.to_le_bytes())?;
        }
        Ok(DONE)
    }

    pub(super) fn pending_signals(&mut self, process: &mut Process, to: u64, size: u64) -> Served {
        if size > 8 {
            return Err(Errno::INVAL.into());
        }
        let thread = self.state.threads.current();
        let set = (thread.pending.set() | self.state.pending.set()) & thread.blocked;
        copy_out(process, to, &set.to_le_bytes()[..size as usize])?;
        Ok(DONE)
    }

    pub(super) fn alternate(&mut self, process: &mut Process, new: u64, old: u64) -> Served {
        let known = self.state.threads.current().signal_stack;
        let on_it = process.register(Register::Rsp).wrapping_sub(known[0]) < known[2];
        if new != 0 {
            let mut stack = [0; 3];
            for (index, word) in stack.iter_mut().enumerate() {
                *word = word_in(process, new.wrapping_add(8 * index as u64))?;
            }
            stack[1] &= u64::from(u32::MAX);
            if on_it {
                return Err(Errno::PERM.into());
            }
            let stack = match stack[1] {
                2 => NO_STACK,
                0 | 1 if stack[2] < SMALLEST_STACK => return Err(Errno::NOMEM.into()),
                0 | 1 => [stack[0], 0, stack[2]],
                _ => return Err(Errno::INVAL.into()),
            };
            if stack != known {
                self.change().threads.current_mut().signal_stack = stack;
            }
        }
        if old != 0 {
            let flags = if on_it { 1 } else { known[1] };
            let bytes = Bytes::default().word(known[0]).word(flags).word(known[2]);
            copy_out(process, old, &bytes.0)?;
        }
        Ok(DONE)
    }

    /// The alarm by the clock, in seconds: what was left of the last.
    pub(super) fn alarm(&mut self, seconds: u64) -> Served {
        let left = self.alarm_left().0.div_ceil(1_000_000_000);
        self.set_alarm(seconds.min(u64::from(u32::MAX)) * 1_000_000_000, 0);
        Ok(Outcome::Value(left))
    }

    /// Nanoseconds until the alarm, and between alarms.
    fn alarm_left(&self) -> (u64, u64) {
        let (at, interval) = self.state.alarm.unwrap_or_default();
        if at == 0 { (0, 0) } else { (at.saturating_sub(now_moment()).max(1), interval) }
    }

    fn set_alarm(&mut self, after: u64, interval: u64) {
        let alarm = (after > 0).then(|| (now_moment().saturating_add(after), interval));
        if self.state.alarm != alarm {
            self.change().alarm = alarm;
        }
    }

    pub(super) fn interval(
        &mut self,
        process: &mut Process,
        which: u64,
        new: Option<u64>,
        old: u64,
    ) -> Served {
        // Others count processor time, which a guest is not told of by signals.
        if which != libc::ITIMER_REAL as u64 {
            return Err(Errno::INVAL.into());
        }
        let (left, every) = self.alarm_left();
        if let Some(new) = new {
            let (every, first) = match new {
                0 => (0, 0),
                at => (micro_in(process, at)?, micro_in(process, at.wrapping_add(16))?),
            };
            self.set_alarm(first, every);
        }
        if old != 0 {
            let time = |bytes: Bytes, nanos: u64| {
                bytes.word(nanos / 1_000_000_000).word(nanos % 1_000_000_000 / 1000)
            };
            copy_out(process, old, &time(time(Bytes::default(), every), left).0)?;
        }
        Ok(DONE)
    }

    /// Sends the alarm's signal if its time has come.
    pub(crate) fn ring(&mut self, now: Moment) {
        if let Some((at, interval)) = self.state.alarm.filter(|(at, _)| *at <= now) {
            let state = self.change();
            let missed = (now - at).checked_div(interval).map_or(0, |whole| whole + 1);
            let next = at.saturating_add(missed.saturating_mul(interval));
            state.alarm = (interval > 0).then_some((next, interval));
            state.send(None, Info::new(libc::SIGALRM as u8, 0x80, 0, 0));
        }
    }
}
