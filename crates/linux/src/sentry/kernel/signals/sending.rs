//! Signals that are sent, and their delivery to threads.

use super::{DefaultAction, REAL_TIME, SignalAction, SignalInfo, UNTOUCHABLE, bit};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::{Wait, WaitReason};

/// Signals that stop a process, unless it has a handler.
const STOPS: [u8; 4] =
    [libc::SIGSTOP as u8, libc::SIGTSTP as u8, libc::SIGTTIN as u8, libc::SIGTTOU as u8];
/// The same as a set.
const STOPPING: u64 = bit(STOPS[0]) | bit(STOPS[1]) | bit(STOPS[2]) | bit(STOPS[3]);

impl Kernel {
    fn action(&self, signal: u8) -> SignalAction {
        self.processes
            .current
            .handlers
            .get(&u64::from(signal))
            .map(SignalAction::of)
            .unwrap_or_default()
    }

    pub(in crate::sentry) fn fate(&self, signal: u8) -> DefaultAction {
        let action = self.action(signal);
        match action.handler {
            _ if i32::from(signal) == libc::SIGSTOP => DefaultAction::Stops,
            _ if UNTOUCHABLE & bit(signal) != 0 => DefaultAction::Deadly,
            0 => match i32::from(signal) {
                libc::SIGCHLD | libc::SIGCONT | libc::SIGURG | libc::SIGWINCH => {
                    DefaultAction::Ignored
                }
                libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => DefaultAction::Stops,
                _ => DefaultAction::Deadly,
            },
            1 => DefaultAction::Ignored,
            _ => DefaultAction::Handled(action),
        }
    }

    /// Whether the current thread ignores or blocks a signal.
    pub(in crate::sentry) fn shuns(&self, signal: u8) -> bool {
        self.fate(signal) == DefaultAction::Ignored
            || self.processes.current.threads.current().blocked & bit(signal) != 0
    }

    /// Whether a signal of its terminal's that stops the current process is still on its way.
    pub(in crate::sentry) fn is_about_to_stop(&self) -> bool {
        let own = self
            .processes
            .current
            .threads
            .iter()
            .map(|(_, thread)| &thread.pending)
            .chain([&self.processes.current.pending]);
        let came = own.fold(0, |set, pending| set | pending.set());
        came & (bit(libc::SIGTTIN as u8) | bit(libc::SIGTTOU as u8)) != 0
    }

    /// Signals that stop the current process. As in Linux, those of a terminal stop no group that
    /// is orphaned there: nothing would continue it.
    pub(in crate::sentry) fn stopping(&self) -> u64 {
        let stops = STOPS.iter().filter(|signal| self.fate(**signal) == DefaultAction::Stops);
        let stops = stops.fold(0, |set, signal| set | bit(*signal));
        let always = bit(libc::SIGSTOP as u8);
        match stops & !always != 0 && self.is_orphaned_at_terminal() {
            true => stops & always,
            false => stops,
        }
    }

    /// Whether a signal that stops the current process has come to a thread that may take it.
    pub(crate) fn is_to_stop(&self) -> bool {
        let open = |(id, thread): (u32, &crate::sentry::kernel::threads::Thread)| {
            let own = if id == self.processes.current.threads.current_id() {
                self.processes.current.pending.set()
            } else {
                0
            };
            (thread.pending.set() | own) & !thread.blocked
        };
        let came = self.processes.current.threads.iter().fold(0, |set, thread| set | open(thread));
        // Stopped, it would not come to its end.
        let ends = (came | self.processes.current.pending.set()) & bit(libc::SIGKILL as u8) != 0;
        came & STOPPING != 0 && !ends && came & self.stopping() != 0
    }

    /// Stops the current process if a stop is due. For when none of its threads runs.
    pub(crate) fn heed_stops(&mut self) {
        if !self.is_to_stop() {
            return;
        }
        let stopping = self.stopping();
        let mut by = self.processes.current.pending.take(stopping);
        for id in self.processes.current.threads.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            let Some(thread) = self.processes.current.threads.get_mut(id) else { continue };
            let open = stopping & !thread.blocked;
            by = by.or_else(|| thread.pending.take(open));
        }
        if let Some(info) = by {
            self.set_stopped(Some(info.signal));
        }
    }

    /// Whether the current process gets no signal for children that stop.
    pub(in crate::sentry) fn ignores_stops(&self) -> bool {
        self.action(libc::SIGCHLD as u8).has(libc::SA_NOCLDSTOP)
    }

    /// Whether children of the current process are reaped without a wait.
    pub(in crate::sentry) fn disowns(&self) -> bool {
        let action = self.action(libc::SIGCHLD as u8);
        action.handler == 1 || action.has(libc::SA_NOCLDWAIT)
    }

    /// The next signal that the thread would take, except ignored ones.
    pub(crate) fn deliverable(&self, id: u32) -> bool {
        let Some(thread) = self.processes.current.threads.get(id) else { return false };
        if matches!(&thread.wait, Some(Wait { reason: WaitReason::Borrower(_), .. })) {
            // Its stack is the child's.
            return false;
        }
        if thread.pending.is_empty() && self.processes.current.pending.is_empty() {
            return false;
        }
        // Stop signals are for the process, when none of its threads runs.
        let came = (thread.pending.set() | self.processes.current.pending.set()) & !thread.blocked;
        came != 0 && (came & STOPPING == 0 || came & !self.stopping() != 0)
    }

    /// Records a signal: for one thread, or for any that takes it. Returns whether it fitted.
    pub(crate) fn send(&mut self, to: Option<u32>, info: SignalInfo) -> bool {
        let all = |state: &mut Self, gone: u64| {
            let ids: Vec<_> = state.processes.current.threads.iter().map(|(id, _)| id).collect();
            for signal in (1..REAL_TIME).filter(|signal| gone & bit(*signal) != 0) {
                state.processes.current.pending.drop_all(signal);
                let threads = &mut state.processes.current.threads;
                ids.iter().for_each(|id| {
                    if let Some(thread) = threads.get_mut(*id) {
                        thread.pending.drop_all(signal);
                    }
                });
            }
        };
        match i32::from(info.signal) {
            libc::SIGCONT => {
                all(self, STOPPING);
                if self.processes.current.info.stopped.is_some() {
                    self.set_stopped(None);
                }
            }
            // It ends in every state.
            libc::SIGKILL => self.processes.current.info.stopped = None,
            _ if STOPPING & bit(info.signal) != 0 => all(self, bit(libc::SIGCONT as u8)),
            _ => {}
        }
        // Ignored signals are dropped unless a thread may wait for them.
        let blocked = match to.and_then(|id| self.processes.current.threads.get(id)) {
            Some(thread) => thread.blocked,
            None => self
                .processes
                .current
                .threads
                .iter()
                .fold(u64::MAX, |all, (_, thread)| all & thread.blocked),
        };
        if self.fate(info.signal) == DefaultAction::Ignored && blocked & bit(info.signal) == 0 {
            return true;
        }
        // As in Linux the first thread takes signals for the process, if it takes them at all.
        let first = self.processes.current_id();
        let open = |thread: &crate::sentry::kernel::threads::Thread| {
            thread.blocked & bit(info.signal) == 0
        };
        let to = to.or_else(|| {
            self.processes.current.threads.get(first).filter(|t| open(t)).map(|_| first)
        });
        match to.and_then(|id| self.processes.current.threads.get_mut(id)) {
            Some(thread) => thread.pending.add(info),
            None => self.processes.current.pending.add(info),
        }
    }
}
