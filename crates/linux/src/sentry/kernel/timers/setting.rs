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
            if thread.is_some_and(|thread| self.processes.current.threads.get(thread).is_none()) {
                continue;
            }
            let threads =
                self.processes.current.threads.values_mut().map(|thread| &mut thread.pending);
            let mut all = threads.chain([&mut self.processes.current.pending]);
            // One that is on its way counts the others.
            let on_its_way = all.find_map(|pending| pending.overran(id, times));
            drop(all);
            let overrun = match on_its_way {
                Some(overrun) => overrun,
                None => {
                    let overrun = (times - 1).min(MAX_OVERRUN);
                    self.send(thread, SignalInfo::of_timer(signal, id, overrun as u32, value));
                    overrun
                }
            };
            if let Some(bell) = self.processes.current.timers.bells.get_mut(&id) {
                bell.overrun = overrun.min(MAX_OVERRUN);
            }
        }
    }
}
