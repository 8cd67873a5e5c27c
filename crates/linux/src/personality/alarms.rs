//! What rings for a process by itself: the alarm (`alarm`, `setitimer`), and timers of its own (`timer_create`).
//!
//! Promises: so many at most, and each has at most one signal on its way; how often it has run out meanwhile is counted. They belong to
//! the process: a child has none, and another program neither. A frozen one is checked before it counts.

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::processor::is_processor_clock;
use super::signals::Info;
use super::threads::Moment;
use super::{Person, State};

/// Timers that a process may have.
const TIMERS: u32 = 256;
/// The highest count of how often a timer has run out (`DELAYTIMER_MAX`).
const COUNTED: u64 = i32::MAX as u64;

/// A timer of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bell {
    pub(super) clock: u64,
    /// When it rings, and how long after that again.
    pub(super) at: Option<Moment>,
    pub(super) every: u64,
    /// What is sent then, if anything is, and to which thread, if to one.
    pub(super) signal: Option<u8>,
    pub(super) thread: Option<u32>,
    pub(super) value: u64,
    /// How often it has run out beside the signal that was sent last.
    pub(super) overrun: u64,
}

impl Bell {
    /// Nanoseconds until it rings, by its own clock; nought if it does not.
    pub(super) fn left(&self, now: u64) -> u64 {
        match self.at {
            None => 0,
            Some(at) if at > now => at - now,
            // Nobody was told, and nobody is to be: it has gone on.
            Some(at) if self.every > 0 => self.every - (now - at) % self.every,
            Some(_) if self.signal.is_none() => 0,
            Some(_) => 1,
        }
    }

    /// How often it has run out by `now`; it goes on from there.
    fn run(&mut self, now: Moment) -> u64 {
        let Some(at) = self.at.filter(|at| *at <= now) else { return 0 };
        let times = (now - at).checked_div(self.every).map_or(1, |whole| whole + 1);
        let next = at.saturating_add(times.saturating_mul(self.every));
        self.at = (self.every > 0).then_some(next);
        times
    }

    /// Whether it counts processor time: what says when it rings is no moment then.
    fn counts_processor(&self) -> bool {
        is_processor_clock(self.clock)
    }

    fn rings_at(&self) -> Option<Moment> {
        self.at.filter(|_| self.signal.is_some() && !self.counts_processor())
    }
}

/// All that rings for a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Alarms {
    /// When the alarm rings, and how long after that again; never, if it does not.
    pub(super) alarm: Option<(Moment, u64)>,
    bells: BTreeMap<u32, Bell>,
    /// The same by processor time, as it is seen by the program, and altogether.
    pub(super) by_processor: [Option<(u64, u64)>; 2],
}

impl Alarms {
    /// When something rings next.
    pub(super) fn next(&self) -> Option<Moment> {
        let bells = self.bells.values().filter_map(Bell::rings_at);
        bells.chain(self.alarm.map(|(at, _)| at)).min()
    }

    /// Has all moments at another place of the clock.
    pub(super) fn shift(&mut self, by: impl Fn(Moment) -> Moment) {
        let bells = self.bells.values_mut().filter(|bell| !bell.counts_processor());
        let bells = bells.filter_map(|bell| bell.at.as_mut());
        bells.chain(self.alarm.as_mut().map(|(at, _)| at)).for_each(|at| *at = by(*at));
    }

    /// Whether it is what a guest could have.
    pub(super) fn is_sound(&self) -> bool {
        self.bells.iter().all(|(id, bell)| {
            let signal = bell.signal.is_none_or(|signal| (1..=64).contains(&signal));
            *id < TIMERS && signal && bell.overrun <= COUNTED
        })
    }

    /// Whether anything rings by processor time.
    pub(super) fn count_processor(&self) -> bool {
        self.processor_next().next().is_some() || self.processor_bells().next().is_some()
    }

    /// When alarms ring by the processor time of the process.
    pub(super) fn processor_next(&self) -> impl Iterator<Item = u64> + '_ {
        self.by_processor.iter().flatten().map(|(at, _)| *at)
    }

    /// Timers by processor time: clocks, and when they ring by those.
    pub(super) fn processor_bells(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let bells = self.bells.values().filter(|bell| bell.counts_processor());
        bells.filter_map(|bell| Some((bell.clock, bell.at.filter(|_| bell.signal.is_some())?)))
    }

    /// The signals of alarms that have rung by processor time.
    pub(super) fn run_processor(&mut self, spent: u64) -> Vec<u8> {
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

    /// Another program runs: the alarm alone goes on.
    pub(super) fn drop_timers(&mut self) {
        self.bells.clear();
    }

    /// A further timer; its number.
    pub(super) fn add(&mut self, bell: Bell) -> Result<u32, Errno> {
        let free = (0..TIMERS).find(|id| !self.bells.contains_key(id)).ok_or(Errno::AGAIN)?;
        self.bells.insert(free, bell);
        Ok(free)
    }

    pub(super) fn get(&self, id: u64) -> Result<&Bell, Errno> {
        let id = u32::try_from(id).map_err(|_| Errno::INVAL)?;
        self.bells.get(&id).ok_or(Errno::INVAL)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Result<&mut Bell, Errno> {
        let id = u32::try_from(id).map_err(|_| Errno::INVAL)?;
        self.bells.get_mut(&id).ok_or(Errno::INVAL)
    }

    pub(super) fn remove(&mut self, id: u64) -> Result<(), Errno> {
        self.get(id)?;
        self.bells.remove(&(id as u32));
        Ok(())
    }
}

impl State {
    /// Sends the signals of what has rung by `now`.
    fn ring(&mut self, now: Moment) {
        if let Some((at, interval)) = self.alarms.alarm.filter(|(at, _)| *at <= now) {
            let missed = (now - at).checked_div(interval).map_or(0, |whole| whole + 1);
            let next = at.saturating_add(missed.saturating_mul(interval));
            self.alarms.alarm = (interval > 0).then_some((next, interval));
            self.send(None, Info::new(libc::SIGALRM as u8, 0x80, 0, 0));
        }
        self.ring_bells(now, None);
    }

    /// Sends the signals of timers that have run out by `now`: of those of a clock of processor time, or of all others.
    pub(super) fn ring_bells(&mut self, now: u64, processor: Option<u64>) {
        let mut sent = Vec::new();
        for (&id, bell) in &mut self.alarms.bells {
            let meant = match processor {
                Some(clock) => bell.clock == clock,
                None => !bell.counts_processor(),
            };
            if let Some(signal) = bell.signal.filter(|_| meant) {
                let times = bell.run(now);
                if times > 0 {
                    sent.push((id, signal, bell.thread, bell.value, times));
                }
            }
        }
        for (id, signal, thread, value, times) in sent {
            if thread.is_some_and(|thread| self.threads.get(thread).is_none()) {
                continue;
            }
            let threads = self.threads.values_mut().map(|thread| &mut thread.pending);
            let mut all = threads.chain([&mut self.pending]);
            // One that is on its way counts the others.
            let on_its_way = all.find_map(|pending| pending.overran(id, times));
            drop(all);
            let overrun = match on_its_way {
                Some(overrun) => overrun,
                None => {
                    let overrun = (times - 1).min(COUNTED);
                    self.send(thread, Info::of_timer(signal, id, overrun as u32, value));
                    overrun
                }
            };
            if let Some(bell) = self.alarms.bells.get_mut(&id) {
                bell.overrun = overrun.min(COUNTED);
            }
        }
    }
}

impl Person {
    /// Sends the signals of what of the current process has rung by `now`.
    pub(crate) fn ring(&mut self, now: Moment) {
        if self.state.alarms.next().is_some_and(|at| at <= now) {
            self.change().ring(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bell(every: u64) -> Bell {
        let (signal, thread) = (Some(10), None);
        Bell { clock: 1, at: Some(100), every, signal, thread, value: 7, overrun: 0 }
    }

    #[test]
    fn a_timer_counts_how_often_it_has_run_out() {
        let mut once = bell(0);
        assert_eq!((once.run(99), once.run(100), once.run(101)), (0, 1, 0));
        let mut often = bell(10);
        assert_eq!((often.run(100), often.run(105), often.run(135)), (1, 0, 3));
        assert_eq!(often.at, Some(140));
        // However long nobody looked.
        let mut far = Bell { every: 1, ..bell(1) };
        assert_eq!(far.run(u64::MAX), u64::MAX - 99);
    }

    #[test]
    fn timers_are_so_many_and_sound() {
        let mut alarms = Alarms::default();
        for id in 0..TIMERS {
            assert_eq!(alarms.add(bell(0)), Ok(id));
        }
        assert_eq!(alarms.add(bell(0)), Err(Errno::AGAIN));
        assert!(alarms.remove(3).is_ok() && alarms.get(3).is_err() && alarms.get(1 << 32).is_err());
        assert_eq!((alarms.add(bell(0)), alarms.next()), (Ok(3), Some(100)));
        assert!(alarms.is_sound());
        for odd in [Bell { signal: Some(65), ..bell(0) }, Bell { overrun: 1 << 31, ..bell(0) }] {
            let mut alarms = Alarms::default();
            alarms.add(odd).unwrap();
            assert!(!alarms.is_sound());
        }
    }
}
