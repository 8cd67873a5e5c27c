//! Processor time of the current process.

use rustix::io::Errno;

use super::{CpuTimeOwner, SECOND};
use crate::sentry::kernel::signals::{KERNEL, SignalInfo};
use crate::sentry::kernel::state::Kernel;

/// The signal of a timer is the kernel's.
const FROM_KERNEL: i32 = 0x80;

impl Kernel {
    /// The owner of a clock of the guest.
    fn whose(&self, clock: u64) -> Result<CpuTimeOwner, Errno> {
        let (own, thread) =
            (self.processes.current_id(), self.processes.current.threads.current_id());
        match clock as i32 {
            libc::CLOCK_PROCESS_CPUTIME_ID => Ok(CpuTimeOwner::Process(own)),
            libc::CLOCK_THREAD_CPUTIME_ID => Ok(CpuTimeOwner::Thread(thread)),
            clock => {
                // The owner, and in the low bits the kind of clock (`CPUCLOCK_…`).
                let (id, kind) = (!(clock >> 3) as u32, clock & 7);
                match kind {
                    0..=2 if id == 0 => Ok(CpuTimeOwner::Process(own)),
                    0..=2 if self.processes.lives(id) => Ok(CpuTimeOwner::Process(id)),
                    4..=6 if id == 0 => Ok(CpuTimeOwner::Thread(thread)),
                    4..=6 if self.processes.current.threads.get(id).is_some() => {
                        Ok(CpuTimeOwner::Thread(id))
                    }
                    _ => Err(Errno::INVAL),
                }
            }
        }
    }

    /// The global number of a CPU-time clock of the current process or of one of its threads.
    pub(in crate::sentry) fn lasting_clock(&self, clock: u64) -> Result<u64, Errno> {
        match self.whose(clock)? {
            CpuTimeOwner::Process(id) if id == self.processes.current_id() => {
                Ok(libc::CLOCK_PROCESS_CPUTIME_ID as u64)
            }
            CpuTimeOwner::Process(_) => Err(Errno::INVAL),
            CpuTimeOwner::Thread(id) => Ok(i64::from(!(id as i32) << 3 | 6) as u64),
        }
    }

    /// The time of a clock at its last measurement.
    pub(in crate::sentry) fn processor_time(&self, clock: u64) -> Result<u64, Errno> {
        match self.whose(clock)? {
            CpuTimeOwner::Process(id) => {
                self.processes.info(id).map(|info| info.spent).ok_or(Errno::INVAL)
            }
            CpuTimeOwner::Thread(id) => {
                self.processes.current.threads.get(id).map(|t| t.spent).ok_or(Errno::INVAL)
            }
        }
    }

    /// Adds system time to the current process.
    pub(crate) fn spend_system(&mut self, time: u64) {
        self.system_times.spend(self.processes.current_id(), time);
    }

    /// Adds CPU time to the current process and its current thread.
    pub(crate) fn spend(&mut self, spent: u64) {
        let own = &mut self.processes.current.info;
        own.spent = own.spent.saturating_add(spent);
        let current = self.processes.current.threads.current_id();
        if let Some(thread) = self.processes.current.threads.get_mut(current) {
            thread.spent = thread.spent.saturating_add(spent);
        }
    }

    /// Whether something rings by the processor time of the current process.
    pub(crate) fn is_measured(&self) -> bool {
        self.processes.current.timers.count_processor()
            || self.processes.current.info.limits.seconds().is_some()
    }

    /// Nanoseconds of its processor time until something rings, at least.
    pub(crate) fn processor_left(&self) -> Option<u64> {
        let spent = self.processes.current.info.spent;
        let limit = self
            .processes
            .current
            .info
            .limits
            .seconds()
            .map(|(soft, _)| soft.saturating_mul(SECOND));
        let whole = self
            .processes
            .current
            .timers
            .processor_next()
            .chain(limit)
            .map(|at| at.saturating_sub(spent));
        let bells = self.processes.current.timers.processor_bells();
        let bells = bells
            .filter_map(|(clock, at)| Some(at.saturating_sub(self.processor_time(clock).ok()?)));
        whole.chain(bells).min()
    }

    /// Sends the signals of expired timers.
    pub(in crate::sentry) fn ring_processor(&mut self) {
        let spent = self.processes.current.info.spent;
        for signal in self.processes.current.timers.run_processor(spent) {
            self.send(None, SignalInfo::new(signal, FROM_KERNEL, KERNEL, 0));
        }
        let clocks: Vec<u64> =
            self.processes.current.timers.processor_bells().map(|(clock, _)| clock).collect();
        for clock in clocks {
            if let Ok(now) = self.processor_time(clock) {
                self.ring_bells(now, Some(clock));
            }
        }
        let Some((soft, hard)) = self.processes.current.info.limits.seconds() else { return };
        if spent >= hard.saturating_mul(SECOND) {
            self.send(None, SignalInfo::new(libc::SIGKILL as u8, FROM_KERNEL, KERNEL, 0));
        } else if spent >= soft.saturating_mul(SECOND) {
            // Once more with every second, as in Linux.
            self.processes.current.info.limits.set_seconds(spent / SECOND + 1, hard);
            self.send(None, SignalInfo::new(libc::SIGXCPU as u8, FROM_KERNEL, KERNEL, 0));
        }
    }
}
