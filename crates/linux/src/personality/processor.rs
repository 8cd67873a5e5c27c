//! Processor time of the guest's processes and threads, and what rings when so much of it is spent.
//!
//! It is what the processes of the host's have used that play them; what the sentry does for them counts for nobody. All of it is told as
//! a program's own (`utime`). It is looked at when somebody asks, and from then on wherever another process or thread has its
//! turn: who never asks pays nothing. So what was spent before a guest first asks counts for the thread that runs then, or, behind a reset, for
//! nobody.
//!
//! Promises: it goes up within a state, and goes back with the state like everything else. A timer never rings early, and as soon as its
//! process has the next turn to take.

use rustix::io::Errno;

use super::encode::Bytes;
use super::limits::Limits;
use super::signals::Info;
use super::{DONE, Outcome, Person, Served, State, copy_out};
use crate::platform::Process;

const SECOND: u64 = 1_000_000_000;
/// Nanoseconds in a tick, as `times` counts.
const TICK: u64 = SECOND / 100;
/// The signal of a timer is the kernel's.
const FROM_KERNEL: i32 = 0x80;

/// Whose time a clock tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    Process(u32),
    Thread(u32),
}

/// Whether a clock tells processor time.
pub(super) fn is_processor_clock(clock: u64) -> bool {
    let clock = clock as i32;
    clock < 0 || [libc::CLOCK_PROCESS_CPUTIME_ID, libc::CLOCK_THREAD_CPUTIME_ID].contains(&clock)
}

/// `struct rusage`.
pub(super) fn usage(spent: u64, most: u64) -> Vec<u8> {
    let (seconds, micros) = (spent / SECOND, spent % SECOND / 1000);
    Bytes::default().word(seconds).word(micros).zeros(16).word(most >> 10).zeros(104).0
}

impl State {
    /// Whose time a clock of the guest's is.
    fn whose(&self, clock: u64) -> Result<Whose, Errno> {
        let (own, thread) = (self.family.own.id, self.threads.current_id());
        match clock as i32 {
            libc::CLOCK_PROCESS_CPUTIME_ID => Ok(Whose::Process(own)),
            libc::CLOCK_THREAD_CPUTIME_ID => Ok(Whose::Thread(thread)),
            clock => {
                // Of which of them, and below that what kind of clock (`CPUCLOCK_…`).
                let (id, kind) = (!(clock >> 3) as u32, clock & 7);
                match kind {
                    0..=2 if id == 0 => Ok(Whose::Process(own)),
                    0..=2 if self.family.lives(id) => Ok(Whose::Process(id)),
                    4..=6 if id == 0 => Ok(Whose::Thread(thread)),
                    4..=6 if self.threads.get(id).is_some() => Ok(Whose::Thread(id)),
                    _ => Err(Errno::INVAL),
                }
            }
        }
    }

    /// A clock of the current process's, or of a thread of its, which means the same whoever asks.
    pub(super) fn lasting_clock(&self, clock: u64) -> Result<u64, Errno> {
        match self.whose(clock)? {
            Whose::Process(id) if id == self.family.own.id => {
                Ok(libc::CLOCK_PROCESS_CPUTIME_ID as u64)
            }
            Whose::Process(_) => Err(Errno::INVAL),
            Whose::Thread(id) => Ok(i64::from(!(id as i32) << 3 | 6) as u64),
        }
    }

    /// What a clock tells, as it was looked at last.
    pub(super) fn processor_time(&self, clock: u64) -> Result<u64, Errno> {
        match self.whose(clock)? {
            Whose::Process(id) => self.family.kin(id).map(|kin| kin.spent).ok_or(Errno::INVAL),
            Whose::Thread(id) => self.threads.get(id).map(|t| t.spent).ok_or(Errno::INVAL),
        }
    }

    /// The current process, and its current thread, have spent so much more.
    pub(crate) fn spend(&mut self, spent: u64) {
        let own = &mut self.family.own;
        own.spent = own.spent.saturating_add(spent);
        let current = self.threads.current_id();
        if let Some(thread) = self.threads.get_mut(current) {
            thread.spent = thread.spent.saturating_add(spent);
        }
    }

    /// Whether something rings by the processor time of the current process.
    pub(crate) fn is_measured(&self) -> bool {
        self.alarms.count_processor() || self.family.own.limits.seconds().is_some()
    }

    /// Nanoseconds of its processor time until something rings, at least.
    pub(crate) fn processor_left(&self) -> Option<u64> {
        let spent = self.family.own.spent;
        let limit = self.family.own.limits.seconds().map(|(soft, _)| soft.saturating_mul(SECOND));
        let whole = self.alarms.processor_next().chain(limit).map(|at| at.saturating_sub(spent));
        let bells = self.alarms.processor_bells();
        let bells = bells
            .filter_map(|(clock, at)| Some(at.saturating_sub(self.processor_time(clock).ok()?)));
        whole.chain(bells).min()
    }

    /// Sends the signals of what has rung.
    fn ring_processor(&mut self) {
        let spent = self.family.own.spent;
        for signal in self.alarms.run_processor(spent) {
            self.send(None, Info::new(signal, FROM_KERNEL, 0, 0));
        }
        let clocks: Vec<u64> = self.alarms.processor_bells().map(|(clock, _)| clock).collect();
        for clock in clocks {
            if let Ok(now) = self.processor_time(clock) {
                self.ring_bells(now, Some(clock));
            }
        }
        let Some((soft, hard)) = self.family.own.limits.seconds() else { return };
        if spent >= hard.saturating_mul(SECOND) {
            self.send(None, Info::new(libc::SIGKILL as u8, FROM_KERNEL, 0, 0));
        } else if spent >= soft.saturating_mul(SECOND) {
            // Once more with every second, as in Linux.
            self.family.own.limits.set_seconds(spent / SECOND + 1, hard);
            self.send(None, Info::new(libc::SIGXCPU as u8, FROM_KERNEL, 0, 0));
        }
    }
}

impl Limits {
    /// Seconds of processor time that a process may spend, and at most, if either is bounded.
    pub(super) fn seconds(&self) -> Option<(u64, u64)> {
        self.get(libc::RLIMIT_CPU).filter(|(soft, hard)| soft.min(hard) != &u64::MAX)
    }

    fn set_seconds(&mut self, soft: u64, hard: u64) {
        self.set(libc::RLIMIT_CPU, (soft.min(hard), hard));
    }
}

impl Person {
    /// Looks at what the current process has spent, for whoever asks or is to be told by a signal.
    pub(crate) fn account(&mut self, process: &mut Process) {
        let spent = process.take_spent();
        let state = self.change();
        state.family.timed = true;
        state.spend(spent);
    }

    /// As [`Person::account`], and sends what rings then.
    pub(crate) fn measure(&mut self, process: &mut Process) {
        if self.state.is_measured() {
            self.account(process);
            self.change().ring_processor();
        }
    }

    pub(super) fn usage(&mut self, process: &mut Process, who: u64, to: u64) -> Served {
        self.account(process);
        let spent = match who as i32 {
            libc::RUSAGE_SELF => self.state.family.own.spent,
            libc::RUSAGE_CHILDREN => self.state.family.own.children,
            libc::RUSAGE_THREAD => self.state.threads.current().spent,
            _ => return Err(Errno::INVAL.into()),
        };
        copy_out(process, to, &usage(spent, self.state.layout.bytes()))?;
        Ok(DONE)
    }

    pub(super) fn times(&mut self, process: &mut Process, to: u64) -> Served {
        self.account(process);
        let own = &self.state.family.own;
        let (spent, children) = (own.spent / TICK, own.children / TICK);
        if to != 0 {
            let bytes = Bytes::default().word(spent).word(0).word(children).word(0);
            copy_out(process, to, &bytes.0)?;
        }
        Ok(Outcome::Value(super::now_moment() / TICK))
    }
}
