//! Children of the current process: their ends, their events, and waits for them.

use super::ProcessTable;
use crate::sentry::kernel::exited_process::ExitedProcess;
use crate::sentry::kernel::process_info::ChildEvent;
use crate::sentry::kernel::signals::bit;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::streams::End;
use crate::sentry::kernel::wait_options::{WaitOptions, WaitTarget};

impl ProcessTable {
    /// The first child of the current process that has ended, of those that are meant.
    pub(crate) fn child_ended(&self, target: WaitTarget) -> Option<(u32, &ExitedProcess)> {
        let own = self.current_id();
        let mut ended = self.ended.iter().map(|(&id, ended)| (id, ended));
        let meant = |(id, ended): &(u32, &ExitedProcess)| {
            ended.parent == own && target.means(*id, ended.group)
        };
        let traced = self.tracing.ended.iter().map(|(&id, ended)| (id, ended));
        ended.find(meant).or_else(|| traced.into_iter().find(meant))
    }

    /// A child of the current process with an event that a wait asks for.
    pub(crate) fn child_changed(&self, asked: WaitOptions) -> Option<(u32, ChildEvent)> {
        let own = self.current_id();
        // Stops of tracees are reported whatever the options are.
        for (thread, trace) in self.tracing.tracees_of(own) {
            let group = self.info(trace.process).map_or(0, |info| info.group);
            if let (Some(stop), false) = (&trace.stop, trace.reported)
                && asked.target.means(thread, group)
            {
                return Some((thread, ChildEvent::Traced(trace.code(stop))));
            }
        }
        let children = self.infos().filter(|info| info.parent == own);
        let mut meant = children.filter(|info| asked.target.means(info.id, info.group));
        meant.find_map(|info| match info.news? {
            news @ ChildEvent::Stopped(_) if asked.stopped => Some((info.id, news)),
            news @ ChildEvent::Continued if asked.continued => Some((info.id, news)),
            _ => None,
        })
    }

    /// Whether a wait for children is over: there is an event, or none can come.
    pub(crate) fn answers(&self, asked: WaitOptions) -> bool {
        asked.ended && self.child_ended(asked.target).is_some()
            || self.child_changed(asked).is_some()
            || !self.may_change(asked)
    }

    /// Whether a wait for children can have an event. One that has ended changes no more.
    pub(crate) fn may_change(&self, asked: WaitOptions) -> bool {
        let own = self.current_id();
        self.infos().any(|info| info.parent == own && asked.target.means(info.id, info.group))
            || self.traces_meant(asked.target)
            || asked.ended && self.child_ended(asked.target).is_some()
    }

    /// Whether the current process traces one of those that are meant.
    fn traces_meant(&self, target: WaitTarget) -> bool {
        self.tracing.tracees_of(self.current_id()).any(|(thread, trace)| {
            target.means(thread, self.info(trace.process).map_or(0, |info| info.group))
        })
    }

    /// Whether the current process has a child, of those that are meant.
    pub(crate) fn has_child(&self, target: WaitTarget) -> bool {
        let own = self.current_id();
        self.infos().any(|info| info.parent == own && target.means(info.id, info.group))
            || self.traces_meant(target)
            || self.child_ended(target).is_some()
    }

    pub(crate) fn is_ended(&self, id: u32) -> bool {
        self.ended.contains_key(&id)
    }

    /// Whether a process lives, or has ended and was not reaped.
    pub(crate) fn exists(&self, id: u32) -> bool {
        self.lives(id) || self.is_ended(id)
    }

    /// The CPU time of a process and its reaped children.
    pub(in crate::sentry) fn spent_by(&self, id: u32) -> u64 {
        let lives = self.info(id).map(|info| info.spent.saturating_add(info.children));
        lives.or(self.ended.get(&id).map(|ended| ended.spent)).unwrap_or_default()
    }

    /// Ended children of `from` become those of `to`, or are removed if that has ended too.
    pub(in crate::sentry) fn reparent_ended(&mut self, from: u32, to: u32) {
        let lives = self.lives(to);
        self.ended.retain(|_, ended| lives || ended.parent != from);
        let ended = self.ended.values_mut().filter(|ended| ended.parent == from);
        ended.for_each(|ended| ended.parent = to);
    }
}

impl Kernel {
    /// The current process reaps a child.
    pub(in crate::sentry) fn reap_child(&mut self, id: u32) {
        let own = self.processes.current_id();
        let is_child = self.processes.ended.get(&id).is_some_and(|ended| ended.parent == own);
        if !is_child {
            // The end of a tracee, which its parent waits for as well.
            self.processes.tracing.ended.remove(&id);
            return;
        }
        let spent = self.processes.spent_by(id);
        let info = &mut self.processes.current.info;
        info.children = info.children.saturating_add(spent);
        self.system_times.reap(self.processes.current_id(), id);
        self.reap(id);
    }

    /// The current process could not make the process `child` after all, which has not run:
    /// neither a parent nor a tracer learns of it.
    pub(crate) fn undo_child(&mut self, child: u32) {
        let own = self.processes.current_id();
        let parent = self.processes.info(child).map_or(own, |info| info.parent);
        let is_told = |state: &Self| {
            let parent = state.processes.get(parent);
            parent.is_some_and(|parent| parent.pending.set() & bit(libc::SIGCHLD as u8) != 0)
        };
        let was_told = is_told(self);
        self.forget_traced_child(child);
        self.switch_to(child);
        self.end_process(End::Signal(libc::SIGKILL));
        self.switch_to(own);
        self.reap(child);
        if !was_told && let Some(parent) = self.processes.get_mut(parent) {
            parent.pending.drop_all(libc::SIGCHLD as u8);
        }
    }

    /// Removes a process that has ended.
    pub(crate) fn reap(&mut self, id: u32) {
        if let Some(ended) = self.processes.ended.remove(&id) {
            self.keep_status(id, ended.status);
        }
        self.drop_ids();
    }
}
