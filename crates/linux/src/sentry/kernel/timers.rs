//! Timers that send signals: the alarm (`alarm`, `setitimer`), and POSIX timers (`timer_create`).
//!
//! Promises: their number is limited, and each has at most one pending signal; further expirations
//! in that time are counted. They belong to the process: a child has none, and another program
//! neither. A frozen one is checked before it counts.

mod setting;

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::cpu_time::is_processor_clock;
use crate::sentry::kernel::time::MonotonicTime;

/// Timers that a process may have.
pub(in crate::sentry) const TIMERS: u32 = 256;

/// The highest count of how often a timer has run out (`DELAYTIMER_MAX`).
const MAX_OVERRUN: u64 = i32::MAX as u64;

/// A timer of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PosixTimer {
    pub(in crate::sentry) clock: u64,
    /// When it rings, and how long after that again.
    pub(in crate::sentry) at: Option<MonotonicTime>,
    pub(in crate::sentry) every: u64,
    /// The signal at expiration, and its thread, if it is for one.
    pub(in crate::sentry) signal: Option<u8>,
    pub(in crate::sentry) thread: Option<u32>,
    pub(in crate::sentry) value: u64,
    /// Further expirations that the last signal which was taken stands for.
    pub(in crate::sentry) overrun: u64,
}

impl PosixTimer {
    /// Nanoseconds until it expires, by its own clock; 0 if it does not.
    pub(in crate::sentry) fn left(&self, now: u64) -> u64 {
        match self.at {
            None => 0,
            Some(at) if at > now => at - now,
            // It was not reported, and has continued.
            Some(at) if self.every > 0 => self.every - (now - at) % self.every,
            Some(_) if self.signal.is_none() => 0,
            Some(_) => 1,
        }
    }

    /// Expirations by `now`; it continues from there.
    fn run(&mut self, now: MonotonicTime) -> u64 {
        let Some(at) = self.at.filter(|at| *at <= now) else { return 0 };
        let times = (now - at).checked_div(self.every).map_or(1, |whole| whole + 1);
        let next = at.saturating_add(times.saturating_mul(self.every));
        self.at = (self.every > 0).then_some(next);
        times
    }

    /// Whether it counts CPU time, so that its expiration is not a moment.
    fn counts_processor(&self) -> bool {
        is_processor_clock(self.clock)
    }

    fn rings_at(&self) -> Option<MonotonicTime> {
        self.at.filter(|_| self.signal.is_some() && !self.counts_processor())
    }
}

/// All that rings for a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Timers {
    /// When the alarm rings, and how long after that again; never, if it does not.
    pub(in crate::sentry) alarm: Option<(MonotonicTime, u64)>,
    bells: BTreeMap<u32, PosixTimer>,
    /// The same by processor time, as it is seen by the program, and altogether.
    pub(in crate::sentry) by_processor: [Option<(u64, u64)>; 2],
}

impl Timers {
    /// When something rings next.
    pub(in crate::sentry) fn next(&self) -> Option<MonotonicTime> {
        let bells = self.bells.values().filter_map(PosixTimer::rings_at);
        bells.chain(self.alarm.map(|(at, _)| at)).min()
    }

    /// Whether a guest could have made it.
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        self.bells.iter().all(|(id, bell)| {
            let signal = bell.signal.is_none_or(|signal| (1..=64).contains(&signal));
            *id < TIMERS && signal && bell.overrun <= MAX_OVERRUN
        })
    }

    /// Whether anything rings by processor time.
    pub(in crate::sentry) fn count_processor(&self) -> bool {
        self.processor_next().next().is_some() || self.processor_bells().next().is_some()
    }

    /// When alarms ring by the processor time of the process.
    pub(in crate::sentry) fn processor_next(&self) -> impl Iterator<Item = u64> + '_ {
        self.by_processor.iter().flatten().map(|(at, _)| *at)
    }

    /// Timers by processor time: clocks, and when they ring by those.
    pub(in crate::sentry) fn processor_bells(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let bells = self.bells.values().filter(|bell| bell.counts_processor());
        bells.filter_map(|bell| Some((bell.clock, bell.at.filter(|_| bell.signal.is_some())?)))
    }

    /// The signals of alarms that have rung by processor time.
    pub(in crate::sentry) fn run_processor(&mut self, spent: u64) -> Vec<u8> {
        let mut rung = Vec::new();
        for (alarm, signal) in self.by_processor.iter_mut().zip([libc::SIGVTALRM, libc::SIGPROF]) {
            if let Some((at, every)) = alarm.filter(|(at, _)| *at <= spent) {
                let missed = (spent - at).checked_div(every).map_or(0, |whole| whole + 1);
                let next = at.saturating_add(missed.saturating_mul(every));
                *alarm = (every > 0).then_some((next, every));
                rung.push(signal as u8);
            }
        }
        rung
    }

    /// A thread takes the signal of a timer, which stands for `overrun` further expirations.
    pub(in crate::sentry) fn note_overrun(&mut self, timer: u32, overrun: u32) {
        if let Some(bell) = self.bells.get_mut(&timer) {
            bell.overrun = u64::from(overrun).min(MAX_OVERRUN);
        }
    }

    /// Another program starts: only the alarm continues.
    pub(in crate::sentry) fn drop_timers(&mut self) {
        self.bells.clear();
    }

    /// A further timer; its number.
    pub(in crate::sentry) fn add(&mut self, bell: PosixTimer) -> Result<u32, Errno> {
        let free = (0..TIMERS).find(|id| !self.bells.contains_key(id)).ok_or(Errno::AGAIN)?;
        self.bells.insert(free, bell);
        Ok(free)
    }

    pub(in crate::sentry) fn get(&self, id: u64) -> Result<&PosixTimer, Errno> {
        let id = u32::try_from(id).map_err(|_| Errno::INVAL)?;
        self.bells.get(&id).ok_or(Errno::INVAL)
    }

    pub(in crate::sentry) fn get_mut(&mut self, id: u64) -> Result<&mut PosixTimer, Errno> {
        let id = u32::try_from(id).map_err(|_| Errno::INVAL)?;
        self.bells.get_mut(&id).ok_or(Errno::INVAL)
    }

    pub(in crate::sentry) fn remove(&mut self, id: u64) -> Result<(), Errno> {
        self.get(id)?;
        self.bells.remove(&(id as u32));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bell(every: u64) -> PosixTimer {
        let (signal, thread) = (Some(10), None);
        PosixTimer { clock: 1, at: Some(100), every, signal, thread, value: 7, overrun: 0 }
    }

    #[test]
    fn a_timer_counts_how_often_it_has_run_out() {
        let mut once = bell(0);
        assert_eq!((once.run(99), once.run(100), once.run(101)), (0, 1, 0));
        let mut often = bell(10);
        assert_eq!((often.run(100), often.run(105), often.run(135)), (1, 0, 3));
        assert_eq!(often.at, Some(140));
        // After any time without a look.
        let mut far = PosixTimer { every: 1, ..bell(1) };
        assert_eq!(far.run(u64::MAX), u64::MAX - 99);
    }

    #[test]
    fn timers_are_so_many_and_sound() {
        let mut alarms = Timers::default();
        for id in 0..TIMERS {
            assert_eq!(alarms.add(bell(0)), Ok(id));
        }
        assert_eq!(alarms.add(bell(0)), Err(Errno::AGAIN));
        assert!(alarms.remove(3).is_ok() && alarms.get(3).is_err() && alarms.get(1 << 32).is_err());
        assert_eq!((alarms.add(bell(0)), alarms.next()), (Ok(3), Some(100)));
        assert!(alarms.is_sound());
        for odd in
            [PosixTimer { signal: Some(65), ..bell(0) }, PosixTimer { overrun: 1 << 31, ..bell(0) }]
        {
            let mut alarms = Timers::default();
            alarms.add(odd).unwrap();
            assert!(!alarms.is_sound());
        }
    }
}
