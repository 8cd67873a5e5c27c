//! Processes of a guest: plain data. One of them is the current one, whose calls are served.
//!
//! A switch to another process replaces [`ProcessTable::current`], and the memory and descriptors
//! that belong to it in [`Kernel`]. All processes share files, pipes and open descriptions. A guest
//! is frozen with all of them, the first being the current one.

mod children;
mod packed;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use rustix::io::Errno;

pub(crate) use packed::PackedProcessTable;

use crate::sentry::kernel::exited_process::ExitedProcess;
use crate::sentry::kernel::file_locks::FileLock;
use crate::sentry::kernel::identity::FIRST;
use crate::sentry::kernel::process::Process;
use crate::sentry::kernel::process_info::{Executable, INIT_PID, ProcessInfo};
use crate::sentry::kernel::resource_limits::MAX_TASKS;
use crate::sentry::kernel::signals::{PendingSignals, SignalInfo};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::streams::End;
use crate::sentry::kernel::threads::{
    MAX_WAITED, Thread, Threads, WAITED_UNCHECKED, Wait, WaitReason,
};
use crate::sentry::kernel::timers::Timers;
use crate::sentry::kernel::tracing::Tracing;
use crate::sentry::mm::layout::{Layout, MAX_ALL_MAPPINGS, MAX_RESERVED};

/// Processes a guest may have, those that ended and were not waited for included.
pub(crate) const PROCESSES: usize = 256;
/// All processes of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessTable {
    pub(crate) current: Process,
    pub(super) others: BTreeMap<u32, Process>,
    /// Memory that the current process does not use.
    layouts: BTreeMap<u32, Layout>,
    ended: BTreeMap<u32, ExitedProcess>,
    /// Whether a process has queried CPU times.
    pub(crate) timed: bool,
    /// Tracers and their tracees. Snapshots store them behind the rest.
    pub(crate) tracing: Tracing,
}

impl ProcessTable {
    /// The first process alone.
    pub(crate) fn new() -> Self {
        Self {
            current: Process::first(),
            others: BTreeMap::new(),
            layouts: BTreeMap::new(),
            ended: BTreeMap::new(),
            timed: false,
            tracing: Tracing::default(),
        }
    }

    /// The first error of a table from a snapshot, whose current process has this memory.
    pub(in crate::sentry) fn check(&self, layout: &Layout) -> Result<(), &'static str> {
        let next = self.current.threads.next();
        let later = |id: u32| (FIRST + 1..next).contains(&id);
        let own = &self.current.info;
        let first =
            own.id == FIRST && own.memory == FIRST && own.parent == INIT_PID && own.is_sound();
        let room = self.others.len() + self.ended.len() < PROCESSES;
        let sound = self.others.iter().all(|(&id, process)| {
            let info = &process.info;
            // Relatives are older: no process descends from itself, or lends borrowed memory.
            let parent = info.parent == INIT_PID || info.parent < id && self.lives(info.parent);
            let lent = |lender: u32| {
                lender < id && self.info(lender).is_some_and(|info| info.memory == info.id)
            };
            let memory = match info.memory == id {
                true => self.layouts.contains_key(&id),
                false => lent(info.memory),
            };
            info.id == id && later(id) && parent && memory && process.is_sound()
        });
        let ended = self.ended.iter().all(|(&id, ended)| {
            later(id) && !self.lives(id) && ended.parent < id && self.lives(ended.parent)
        });
        let owned = |memory: &u32| self.info(*memory).is_some_and(|info| info.memory == *memory);
        if !(first
            && room
            && sound
            && ended
            && self.layouts.keys().all(|m| *m != FIRST && owned(m)))
        {
            return Err("its processes do not fit together");
        }
        self.iter().try_for_each(|process| process.threads.check(next))?;
        let mut numbers: Vec<u32> = self.threads().map(|(id, _)| id).collect();
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        if numbers.len() < count {
            return Err("two of its threads have one number");
        }
        if count as u64 > MAX_TASKS {
            return Err("it has more threads than a program may have");
        }
        if self.waited() > MAX_WAITED + MAX_TASKS as usize * WAITED_UNCHECKED {
            return Err("its threads wait for more descriptors and operations than they may");
        }
        let mut left = MAX_RESERVED;
        let all = || self.layouts.values().chain([layout]);
        if all().map(Layout::len).sum::<usize>() > MAX_ALL_MAPPINGS {
            return Err("its mappings are more than it may have");
        }
        for memory in all() {
            memory.check()?;
            let fits = memory.limit() == layout.limit();
            left = left
                .checked_sub(memory.own_bytes())
                .filter(|_| fits)
                .ok_or("its mappings are more than it may have")?;
        }
        Ok(())
    }

    pub(crate) fn current_id(&self) -> u32 {
        self.current.info.id
    }

    /// The number of processes, live ones and zombies.
    pub(in crate::sentry) fn len(&self) -> usize {
        1 + self.others.len() + self.ended.len()
    }

    /// The processes that live; the current one is the last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Process> + '_ {
        self.others.values().chain([&self.current])
    }

    /// The process `id`, if it lives.
    pub(crate) fn get(&self, id: u32) -> Option<&Process> {
        match self.current.info.id == id {
            true => Some(&self.current),
            false => self.others.get(&id),
        }
    }

    /// As [`ProcessTable::get`], to be changed.
    pub(in crate::sentry) fn get_mut(&mut self, id: u32) -> Option<&mut Process> {
        match self.current.info.id == id {
            true => Some(&mut self.current),
            false => self.others.get_mut(&id),
        }
    }

    /// Whether `id` lives.
    pub(crate) fn lives(&self, id: u32) -> bool {
        self.get(id).is_some()
    }

    pub(crate) fn infos(&self) -> impl Iterator<Item = &ProcessInfo> + '_ {
        self.iter().map(|process| &process.info)
    }

    pub(crate) fn info(&self, id: u32) -> Option<&ProcessInfo> {
        self.get(id).map(|process| &process.info)
    }

    pub(crate) fn info_mut(&mut self, id: u32) -> Option<&mut ProcessInfo> {
        self.get_mut(id).map(|process| &mut process.info)
    }

    /// All PIDs, of live processes and zombies.
    pub(in crate::sentry) fn numbers(&self) -> Vec<u32> {
        self.infos().map(|info| info.id).chain(self.ended.keys().copied()).collect()
    }

    /// Whether it is the number of a thread, of a zombie, or of a group or session with members.
    pub(in crate::sentry) fn is_in_use(&self, number: u32) -> bool {
        self.threads().any(|(id, _)| id == number)
            || self.infos().any(|info| [info.id, info.group, info.session].contains(&number))
            || self.ended.iter().any(|(&id, ended)| [id, ended.group].contains(&number))
    }

    /// Whether the current process is the only one that lives, and it is the first.
    pub(crate) fn is_single(&self) -> bool {
        self.others.is_empty() && self.current.info.id == FIRST
    }

    /// The processes, from the one after the current on, which comes last.
    pub(crate) fn in_turn(&self) -> Vec<u32> {
        let own = self.current_id();
        let behind = self.others.range(own..).map(|(&id, _)| id);
        let before = self.others.range(..own).map(|(&id, _)| id);
        behind.chain(before).chain([own]).collect()
    }

    /// Members of a group, live ones and zombies.
    pub(crate) fn group(&self, group: u32) -> Vec<u32> {
        self.infos().filter(|info| info.group == group).map(|info| info.id).collect()
    }

    /// Those that live, but for one.
    pub(crate) fn all_but(&self, one: u32) -> Vec<u32> {
        self.infos().map(|info| info.id).filter(|id| *id != one).collect()
    }

    /// Others that use the memory of the current process.
    pub(crate) fn borrowers(&self) -> Vec<u32> {
        let own = self.current_id();
        self.infos()
            .filter(|info| info.memory == own && info.id != own)
            .map(|info| info.id)
            .collect()
    }

    /// Whether `id` has its own memory or has ended, so that the lender may continue.
    pub(crate) fn is_grown(&self, id: u32) -> bool {
        self.info(id).is_none_or(|info| info.memory == id)
    }

    /// Whether a further one fits.
    pub(crate) fn check_room(&self) -> Result<(), Errno> {
        let room = self.others.len() + self.ended.len() + 1 < PROCESSES;
        if room { Ok(()) } else { Err(Errno::AGAIN) }
    }

    /// Locks that threads of process `id`, which is not the current one, wait for.
    pub(in crate::sentry) fn wanted_locks(&self, id: u32) -> impl Iterator<Item = &FileLock> + '_ {
        let threads = self.others.get(&id).into_iter().flat_map(|process| process.threads.iter());
        threads.filter_map(|(_, thread)| match &thread.wait {
            Some(Wait { reason: WaitReason::Lock(lock), .. }) => Some(lock),
            _ => None,
        })
    }

    /// All memory that the current process does not use.
    pub(in crate::sentry) fn layouts(&self) -> impl Iterator<Item = &Layout> + '_ {
        self.layouts.values()
    }

    /// Threads of all processes; those of the current one are the first.
    pub(in crate::sentry) fn threads(&self) -> impl Iterator<Item = (u32, &Thread)> + '_ {
        let others = self.others.values().flat_map(|process| process.threads.iter());
        self.current.threads.iter().chain(others)
    }

    /// Descriptors and operations of semaphores that all threads wait for.
    fn waited(&self) -> usize {
        self.threads().filter_map(|(_, thread)| thread.wait.as_ref()).map(Wait::items).sum()
    }

    /// Refuses a wait for so many descriptors or operations if all threads would wait for too many.
    pub(in crate::sentry) fn check_wait(&self, items: usize) -> Result<(), Errno> {
        let fits = items <= WAITED_UNCHECKED || self.waited() + items <= MAX_WAITED;
        if fits { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// As [`Self::threads`], a list for each process.
    pub(in crate::sentry) fn threads_mut(&mut self) -> impl Iterator<Item = &mut Threads> + '_ {
        let others = self.others.values_mut().map(|process| &mut process.threads);
        std::iter::once(&mut self.current.threads).chain(others)
    }

    /// Threads of other processes that may wait at the same futex: of all, if it has a place in
    /// shared memory, and else of those with the memory of the current process.
    pub(in crate::sentry) fn other_threads_mut(
        &mut self,
        has_place: bool,
    ) -> impl Iterator<Item = &mut Threads> + '_ {
        let memory = self.current.info.memory;
        let others = self.others.values_mut();
        let reached = others.filter(move |other| has_place || other.info.memory == memory);
        reached.map(|process| &mut process.threads)
    }

    /// Whether [`Self::other_threads_mut`] has any.
    pub(in crate::sentry) fn has_other_threads(&self, has_place: bool) -> bool {
        let memory = self.current.info.memory;
        self.others.values().any(|other| has_place || other.info.memory == memory)
    }

    /// Replaces the current process by `id`, which lives and is another. Returns the memory of the
    /// process before.
    fn switch_to(&mut self, id: u32) -> Option<u32> {
        let mut next = self.others.remove(&id)?;
        // One row of numbers for all of them.
        next.threads.continue_from(&self.current.threads);
        let previous = std::mem::replace(&mut self.current, next);
        let memory = previous.info.memory;
        self.others.insert(previous.info.id, previous);
        Some(memory)
    }
}

/// The status of an end, as `wait4` returns it.
fn wait_status(end: End) -> i32 {
    match end {
        End::Exit(status) => (status & 0xff) << 8,
        End::Signal(signal) => signal,
        _ => libc::SIGKILL,
    }
}

impl Kernel {
    /// The process whose calls are served.
    pub(crate) fn current(&self) -> &Process {
        &self.processes.current
    }

    pub(crate) fn current_mut(&mut self) -> &mut Process {
        &mut self.processes.current
    }

    /// All memories, by their owners.
    pub(crate) fn memories(&self) -> BTreeMap<u32, &Layout> {
        let others = self.processes.layouts.iter().map(|(&id, layout)| (id, layout));
        others.chain([(self.processes.current.info.memory, &self.layout)]).collect()
    }

    /// The memory of `memory`, whether it is the current process's or another's.
    pub(in crate::sentry) fn layout_of(&self, memory: u32) -> Option<&Layout> {
        match self.processes.current.info.memory == memory {
            true => Some(&self.layout),
            false => self.processes.layouts.get(&memory),
        }
    }

    /// As [`Self::layout_of`], to be changed.
    pub(in crate::sentry) fn layout_of_mut(&mut self, memory: u32) -> Option<&mut Layout> {
        match self.processes.current.info.memory == memory {
            true => Some(&mut self.layout),
            false => self.processes.layouts.get_mut(&memory),
        }
    }

    /// Makes `id`, which lives, the current process.
    pub(crate) fn switch_to(&mut self, id: u32) {
        let previous = self.processes.current_id();
        let Some(from) = self.processes.switch_to(id) else { return };
        self.table.switch(previous, id);
        let to = self.processes.current.info.memory;
        if from != to
            && let Some(layout) = self.processes.layouts.remove(&to)
        {
            let put_aside = std::mem::replace(&mut self.layout, layout);
            self.processes.layouts.insert(from, put_aside);
        }
        self.heed_limits();
        self.count_memory();
    }

    /// Adds the mappings of other processes to the layout's limit.
    pub(in crate::sentry) fn count_memory(&mut self) {
        let own: u64 = self.processes.layouts.values().map(Layout::own_bytes).sum();
        // Files beyond the limit of storage, which were written through mappings. Those of live
        // files count as shared memory. The host has such a file twice once it is stored, and it
        // counts once: a guest takes at most its memory limit beyond memory and storage.
        let stored = self.tree.used().bytes.saturating_sub(self.stored_shares);
        let unpaid = stored.saturating_sub(self.tree.budget().bytes);
        let elsewhere = own.saturating_add(self.shared_bytes).saturating_add(unpaid);
        let mappings = self.processes.layouts.values().map(Layout::len).sum();
        self.layout.set_elsewhere(elsewhere, mappings);
    }

    /// Sets the memory limit of every process, and returns the bytes that they have mapped
    /// together.
    pub(crate) fn limit_memory(&mut self, limit: u64) -> u64 {
        self.processes.layouts.values_mut().for_each(|layout| layout.set_limit(limit));
        self.layout.set_limit(limit);
        self.layout.bytes_everywhere()
    }

    /// Bytes that all processes have mapped together.
    pub(crate) fn mapped_memory(&self) -> u64 {
        self.layout.bytes_everywhere()
    }

    /// The memory limit of every process.
    pub(crate) fn memory_limit(&self) -> u64 {
        self.layout.limit()
    }

    /// As another process, which lives.
    pub(crate) fn with<T>(&mut self, id: u32, work: impl FnOnce(&mut Self) -> T) -> T {
        let own = self.processes.current_id();
        self.switch_to(id);
        let result = work(self);
        self.switch_to(own);
        result
    }

    /// Adds a child of the current process, with one thread, which is like `thread`; its number. It
    /// has a copy of the memory, or uses that of its parent.
    pub(in crate::sentry) fn add_child(
        &mut self,
        thread: Thread,
        copies: bool,
    ) -> Result<u32, Errno> {
        self.processes.check_room()?;
        self.check_tasks()?;
        self.table.check_fork()?;
        if copies {
            self.layout.afford_copy()?;
        }
        let (directory, root) = (self.processes.current.directory, self.processes.current.root);
        self.tree.hold(directory)?;
        if let Some(root) = root {
            self.tree.hold(root).inspect_err(|_| self.tree.release(directory))?;
        }
        let id = self.processes.current.threads.take_number()?;
        let current = &self.processes.current;
        let own = &current.info;
        let memory = if copies { id } else { own.memory };
        let (stopped, news, spent, children) = (None, None, 0, 0);
        let (parent, traits) = (own.id, own.traits.inherited());
        let info = ProcessInfo {
            id,
            parent,
            memory,
            stopped,
            news,
            spent,
            children,
            traits,
            ..own.clone()
        };
        let child = Process {
            info,
            directory,
            root,
            umask: current.umask,
            handlers: current.handlers.clone(),
            pending: PendingSignals::default(),
            timers: Timers::default(),
            threads: Threads::single(id, thread, &current.threads),
        };
        self.processes.others.insert(id, child);
        if copies {
            self.processes.layouts.insert(id, self.layout.unlocked());
        }
        self.table.fork(id);
        self.namespaces.fork(parent, id);
        self.tunables.fork(parent, id);
        self.slacks.fork(traits.slack, id);
        self.keys.fork(parent, id);
        self.count_memory();
        Ok(id)
    }

    /// The current process starts another program: state that does not outlast `exec` is dropped.
    pub(crate) fn reset_for_exec(&mut self, known: Executable) {
        let state = &mut *self;
        state.give_up_all(Some(state.processes.current.threads.current_id()));
        let own = state.processes.current_id();
        state.table.unshare(own);
        state.shared_parts.end(own);
        state.processes.current.timers.drop_timers();
        let closed = state.table.closing();
        let files = state.locked_files(&closed);
        state.close_all(&closed);
        state.locks.close(state.processes.current_id(), &files);
        state.drop_unowned();
        // Ignored signals stay ignored.
        let handlers = &mut state.processes.current.handlers;
        handlers.retain(|_, action| action[..8] == 1u64.to_le_bytes());
        handlers.values_mut().for_each(|action| action[8..].fill(0));
        let id = state.processes.current_id();
        state.keep_own_trace(id);
        let threads = state.processes.current.threads.iter().map(|(thread, _)| thread);
        state.keys.exec(id, threads);
        state.processes.current.threads.become_single(id);
        state.set_program(known);
        state.reset_capabilities();
        let lender = std::mem::replace(&mut state.processes.current.info.memory, id);
        if lender != id {
            let new = Layout::new(state.layout.limit());
            let lent = std::mem::replace(&mut state.layout, new);
            state.processes.layouts.insert(lender, lent);
        }
        state.count_memory();
    }

    /// Drops the keyrings of threads and processes that have ended.
    pub(in crate::sentry) fn drop_keyrings(&mut self) {
        let Self { processes, keys, .. } = self;
        let is_thread = |thread| processes.threads().any(|(id, _)| id == thread);
        keys.keep(|process| processes.lives(process), is_thread);
    }

    /// The current process ends: its tracers learn of it, and what it traces continues.
    fn end_traces(&mut self, id: u32, end: End) {
        if self.processes.tracing.is_empty() {
            return;
        }
        for thread in self.processes.tracing.threads_of(id) {
            self.drop_tracee(thread, wait_status(end));
        }
        self.drop_tracer(id);
    }

    /// The current process, which is not the first, ends: its parent is notified, and becomes the
    /// current one. Processes that use its memory must have ended before. Only the part that its
    /// parent may wait for is kept.
    pub(crate) fn end_process(&mut self, end: End) {
        self.give_up_all(None);
        self.leave_terminal();
        self.semaphores.leave(self.processes.current_id());
        self.named_queues.drop_requests(self.processes.current_id());
        self.drop_queue_notices();
        self.table.abandon_shared(self.processes.current_id());
        self.close_all(&self.table.numbers(0, u64::from(u32::MAX)));
        let ProcessInfo { id, parent, group, memory, .. } = self.processes.current.info.clone();
        let (spent, groups) = (self.processes.spent_by(id), self.kept_groups());
        self.end_traces(id, end);
        self.tree.release(self.processes.current.directory);
        self.processes.current.root.into_iter().for_each(|root| self.tree.release(root));
        self.leave_children(id, parent);
        let child = self.sender(id);
        let heir = if self.processes.lives(parent) { parent } else { FIRST };
        self.switch_to(heir);
        self.processes.others.remove(&id);
        self.table.drop_process(id);
        self.namespaces.leave(id);
        self.tunables.leave(id);
        self.slacks.leave(id);
        self.shared_parts.end(id);
        self.drop_keyrings();
        self.drop_unowned();
        self.wake_orphans(groups);
        if memory == id {
            self.processes.layouts.remove(&id);
            self.count_memory();
            self.drop_unshared();
        }
        if heir != parent {
            self.drop_ids();
            return;
        }
        let (code, reason) = match end {
            End::Exit(status) => (libc::CLD_EXITED, status),
            End::Signal(signal) => (libc::CLD_KILLED, signal),
            _ => (libc::CLD_KILLED, libc::SIGKILL),
        };
        let status = wait_status(end);
        // A parent that ignores SIGCHLD does not wait.
        if !self.disowns() {
            self.processes.ended.insert(id, ExitedProcess { parent, group, status, spent });
        } else {
            self.keep_status(id, status);
        }
        self.drop_ids();
        self.send(None, SignalInfo::new(libc::SIGCHLD as u8, code, child, reason as u64));
    }
}
