//! Timers that are set, and those that are due.

use super::MAX_OVERRUN;
use crate::sentry::kernel::signals::{KERNEL, SignalInfo};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::time::MonotonicTime;

impl Kernel {
    /// Sends the signals of timers that have expired by `now`.
    pub(in crate::sentry) fn ring(&mut self, now: MonotonicTime) {
        if let Some((at, interval)) =
            self.processes.current.timers.alarm.filter(|(at, _)| *at <= now)
        {
            let missed = (now - at).checked_div(interval).map_or(0, |whole| whole + 1);
            let next = at.saturating_add(missed.saturating_mul(interval));
            self.processes.current.timers.alarm = (interval > 0).then_some((next, interval));
            self.send(None, SignalInfo::new(libc::SIGALRM as u8, 0x80, KERNEL, 0));
        }
        self.ring_bells(now, None);
    }

    /// Sends the signals of timers that have run out by `now`: of those of a clock of processor
    /// time, or of all others.
    pub(in crate::sentry) fn ring_bells(&mut self, now: u64, processor: Option<u64>) {
        let mut sent = Vec::new();
        for (&id, bell) in &mut self.processes.current.timers.bells {
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
            self.expire(id, signal, thread, value, times);
        }
    }

    /// The signal of a timer that has run out `times` times. One that is pending counts the others.
    fn expire(&mut self, id: u32, signal: u8, thread: Option<u32>, value: u64, times: u64) {
        if thread.is_some_and(|thread| self.processes.current.threads.get(thread).is_none()) {
            return;
        }
        let threads = self.processes.current.threads.values_mut().map(|thread| &mut thread.pending);
        let mut all = threads.chain([&mut self.processes.current.pending]);
        let is_pending = all.any(|pending| pending.overran(id, times).is_some());
        drop(all);
        if is_pending {
            return;
        }
        let overrun = (times - 1).min(MAX_OVERRUN);
        self.send(thread, SignalInfo::of_timer(signal, id, overrun as u32, value));
    }

    /// A timer was set that would have run out `times` times before now: it sends its signal at
    /// once.
    pub(in crate::sentry) fn ring_late(&mut self, id: u32, times: u64) {
        let Ok(bell) = self.processes.current.timers.get(id.into()) else { return };
        if let (Some(signal), 1..) = (bell.signal, times) {
            self.expire(id, signal, bell.thread, bell.value, times);
        }
    }
}
