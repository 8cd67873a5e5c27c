//! Signals that are sent, and their delivery to threads.

use super::{DefaultAction, REAL_TIME, SignalAction, SignalInfo, UNTOUCHABLE, bit};
use crate::resource_numbers::RLIMIT_SIGPENDING;
use crate::sentry::kernel::process::Process;
use crate::sentry::kernel::process_info::ChildEvent;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::{Thread, Wait, WaitReason};

/// Signals that stop a process, unless it has a handler.
const STOPS: [u8; 4] =
    [libc::SIGSTOP as u8, libc::SIGTSTP as u8, libc::SIGTTIN as u8, libc::SIGTTOU as u8];
/// The same as a set.
const STOPPING: u64 = bit(STOPS[0]) | bit(STOPS[1]) | bit(STOPS[2]) | bit(STOPS[3]);

impl Process {
    fn action(&self, signal: u8) -> SignalAction {
        self.handlers.get(&u64::from(signal)).map(SignalAction::of).unwrap_or_default()
    }

    fn fate(&self, signal: u8) -> DefaultAction {
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

    /// Whether it ignores the ends and stops of its children.
    pub(in crate::sentry) fn ignores_stops(&self) -> bool {
        self.action(libc::SIGCHLD as u8).has(libc::SA_NOCLDSTOP)
    }

    /// Whether a signal that it has, or one of `more`, ends it as soon as a thread takes it.
    fn is_dying(&self, more: u64) -> bool {
        let came =
            |thread: &Thread| (thread.pending.set() | self.pending.set() | more) & !thread.blocked;
        let came = self.threads.iter().fold(0, |set, (_, thread)| set | came(thread));
        (1..=64).any(|n| came & bit(n) != 0 && self.fate(n) == DefaultAction::Deadly)
    }

    /// Drops the signals of a set that its threads have not taken.
    fn drop_signals(&mut self, set: u64) {
        let threads = self.threads.values_mut().map(|thread| &mut thread.pending);
        for pending in threads.chain([&mut self.pending]) {
            (1..REAL_TIME).filter(|n| set & bit(*n) != 0).for_each(|n| pending.drop_all(n));
        }
    }

    /// Records a signal: for one thread, or for any that takes it. Returns whether it fitted.
    fn note_signal(&mut self, to: Option<u32>, info: SignalInfo, is_traced: bool) -> bool {
        // Ignored signals are dropped unless a thread may wait for them, or a tracer sees them.
        let blocked = match to.and_then(|id| self.threads.get(id)) {
            Some(thread) => thread.blocked,
            None => self.threads.iter().fold(u64::MAX, |all, (_, thread)| all & thread.blocked),
        };
        let open = blocked & bit(info.signal) == 0 && !is_traced;
        if self.fate(info.signal) == DefaultAction::Ignored && open {
            return true;
        }
        // As in Linux the first thread takes signals for the process, if it takes them at all.
        let first = self.info.id;
        let open = |thread: &&Thread| thread.blocked & bit(info.signal) == 0;
        let to = to.or_else(|| self.threads.get(first).filter(open).map(|_| first));
        match to.and_then(|id| self.threads.get_mut(id)) {
            Some(thread) => thread.pending.add(info),
            None => self.pending.add(info),
        }
    }
}

impl Kernel {
    /// Has the current thread take the lowest of its signals in `set`. That of a timer has the
    /// timer's count of expirations.
    pub(in crate::sentry) fn take_signal(&mut self, set: u64) -> Option<SignalInfo> {
        let Process { threads, pending, timers, .. } = &mut self.processes.current;
        let info = threads.current_mut().pending.take(set).or_else(|| pending.take(set))?;
        if let Some((timer, overrun)) = info.timer() {
            timers.note_overrun(timer, overrun);
        }
        Some(info)
    }

    /// Whether the pending signals of all processes leave room for one more of process `id`
    /// (`RLIMIT_SIGPENDING`).
    fn has_signal_room(&self, id: u32) -> bool {
        let limits = self.processes.info(id).map(|info| &info.limits);
        let limit = limits.and_then(|limits| limits.get(RLIMIT_SIGPENDING));
        limit.is_none_or(|(soft, _)| {
            let own = self.processes.iter().map(|process| process.pending.len());
            let threads = self.processes.threads().map(|(_, thread)| thread.pending.len());
            (own.chain(threads).sum::<usize>() as u64) < soft
        })
    }

    pub(in crate::sentry) fn fate(&self, signal: u8) -> DefaultAction {
        self.processes.current.fate(signal)
    }

    /// Whether a signal ends process `id`: one that it has, or one of `more`.
    pub(in crate::sentry) fn is_dying(&self, id: u32, more: u64) -> bool {
        self.processes.get(id).is_some_and(|process| process.is_dying(more))
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
        if !self.processes.tracing.is_empty()
            && self.processes.tracing.traces_process(self.processes.current_id())
        {
            // Its tracer takes them first.
            return false;
        }
        let open = |(id, thread): (u32, &Thread)| {
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
            self.set_stopped(self.processes.current_id(), Some(info.signal));
        }
    }

    /// Whether children of the current process are reaped without a wait.
    pub(in crate::sentry) fn disowns(&self) -> bool {
        let action = self.processes.current.action(libc::SIGCHLD as u8);
        action.handler == 1 || action.has(libc::SA_NOCLDWAIT)
    }

    /// The next signal that the thread would take, except ignored ones.
    pub(crate) fn deliverable(&self, id: u32) -> bool {
        let Some(thread) = self.processes.current.threads.get(id) else { return false };
        if matches!(&thread.wait, Some(Wait { reason: WaitReason::Borrower(_), .. })) {
            // Its stack is the child's.
            return false;
        }
        let trace = self.processes.tracing.get(id);
        if trace.is_some_and(|trace| trace.injected.is_some()) {
            return true;
        }
        if thread.pending.is_empty() && self.processes.current.pending.is_empty() {
            return false;
        }
        // Stop signals are for the process, when none of its threads runs.
        let came = (thread.pending.set() | self.processes.current.pending.set()) & !thread.blocked;
        came != 0 && (trace.is_some() || came & STOPPING == 0 || came & !self.stopping() != 0)
    }

    /// Sends the current process a signal: for one thread, or for any that takes it. Returns
    /// whether it fitted.
    pub(crate) fn send(&mut self, to: Option<u32>, info: SignalInfo) -> bool {
        self.send_to(self.processes.current_id(), to, info)
    }

    /// As [`Kernel::send`], to process `id`, if that lives. Costs no switch to it.
    pub(in crate::sentry) fn send_to(
        &mut self,
        id: u32,
        to: Option<u32>,
        info: SignalInfo,
    ) -> bool {
        if info.counts_in_queue() && !self.has_signal_room(id) {
            return false;
        }
        let Some(process) = self.processes.get_mut(id) else { return true };
        match i32::from(info.signal) {
            libc::SIGCONT => {
                process.drop_signals(STOPPING);
                if process.info.stopped.is_some() {
                    self.set_stopped(id, None);
                }
            }
            // It ends in every state.
            libc::SIGKILL => {
                process.info.stopped = None;
                self.processes.tracing.end_stops(id);
            }
            _ if STOPPING & bit(info.signal) != 0 => {
                process.drop_signals(bit(libc::SIGCONT as u8));
            }
            _ => {}
        }
        let is_traced =
            !self.processes.tracing.is_empty() && self.processes.tracing.traces_process(id);
        self.processes.get_mut(id).is_none_or(|process| process.note_signal(to, info, is_traced))
    }

    /// Process `id` stops by a signal or continues; its parent is notified.
    pub(in crate::sentry) fn set_stopped(&mut self, id: u32, by: Option<u8>) {
        let Some(own) = self.processes.info_mut(id) else { return };
        own.stopped = by;
        own.news = Some(by.map_or(ChildEvent::Continued, ChildEvent::Stopped));
        let parent = own.parent;
        if by.is_none() {
            self.note_continued(id);
        }
        let (code, status) = match by {
            Some(signal) => (libc::CLD_STOPPED, signal),
            None => (libc::CLD_CONTINUED, libc::SIGCONT as u8),
        };
        if self.processes.get(parent).is_some_and(|parent| !parent.ignores_stops()) {
            let sender = self.sender(id);
            let info = SignalInfo::new(libc::SIGCHLD as u8, code, sender, status.into());
            self.send_to(parent, None, info);
        }
    }
}
