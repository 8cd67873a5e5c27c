//! Processes of a guest: plain data. One of them is the current one.
//!
//! The state of the current process is in [`Kernel`](crate::sentry::Kernel) itself, so that every
//! call finds it there; that of all others is here. All processes share files, pipes and open
//! descriptions. A guest is frozen with all of them, the first being the current one.

mod children;

use std::collections::BTreeMap;

use afresh_files::Node;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub(crate) use children::{ExitedProcess, WaitOptions, WaitTarget};

use crate::sentry::kernel::file_locks::FileLock;
use crate::sentry::kernel::identity::PID;
use crate::sentry::kernel::process_info::{ChildEvent, Executable, NOBODY, ProcessInfo};
use crate::sentry::kernel::signals::{PendingSignals, SignalInfo};
use crate::sentry::kernel::threads::{MonotonicTime, Thread, Threads, Wait, WaitReason};
use crate::sentry::kernel::timers::Timers;
use crate::sentry::mm::layout::Layout;
use crate::sentry::{End, Kernel};

/// Processes a guest may have, those that ended and were not waited for included.
pub(crate) const PROCESSES: usize = 256;
/// The guest's first process.
pub(crate) const FIRST: u32 = PID as u32;
/// A process that is not the current one: all of it but memory and registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ProcessState {
    kin: ProcessInfo,
    directory: Node,
    umask: u32,
    handlers: BTreeMap<u64, [u8; 32]>,
    pending: PendingSignals,
    alarms: Timers,
    threads: Threads,
}

/// All processes of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessTable {
    pub(crate) own: ProcessInfo,
    others: BTreeMap<u32, ProcessState>,
    /// Memory that the current process does not use.
    layouts: BTreeMap<u32, Layout>,
    ended: BTreeMap<u32, ExitedProcess>,
    /// Whether a process has queried CPU times.
    pub(crate) timed: bool,
}

impl ProcessTable {
    /// The first process alone.
    pub(crate) fn new() -> Self {
        Self {
            own: ProcessInfo::first(),
            others: BTreeMap::new(),
            layouts: BTreeMap::new(),
            ended: BTreeMap::new(),
            timed: false,
        }
    }

    /// The first error of a table from a snapshot, whose current process has these threads and this
    /// memory.
    pub(in crate::sentry) fn check(
        &self,
        threads: &Threads,
        layout: &Layout,
    ) -> Result<(), &'static str> {
        let next = threads.next();
        let later = |id: u32| (FIRST + 1..next).contains(&id);
        let own = &self.own;
        let first =
            own.id == FIRST && own.memory == FIRST && own.parent == NOBODY && own.is_sound();
        let room = self.others.len() + self.ended.len() < PROCESSES;
        let sound = self.others.iter().all(|(&id, member)| {
            let kin = &member.kin;
            // Relatives are older: no process descends from itself, or lends borrowed memory.
            let parent = kin.parent == NOBODY || kin.parent < id && self.lives(kin.parent);
            let lent = |lender: u32| {
                lender < id && self.kin(lender).is_some_and(|kin| kin.memory == kin.id)
            };
            let memory = match kin.memory == id {
                true => self.layouts.contains_key(&id),
                false => lent(kin.memory),
            };
            let handlers = member.handlers.keys().all(|number| (1..=64).contains(number));
            kin.id == id
                && later(id)
                && parent
                && memory
                && kin.is_sound()
                && handlers
                && member.pending.is_sound()
                && member.alarms.is_sound()
                && member.umask & !0o777 == 0
        });
        let ended = self.ended.iter().all(|(&id, ended)| {
            later(id) && !self.lives(id) && ended.parent < id && self.lives(ended.parent)
        });
        let owned = |memory: &u32| self.kin(*memory).is_some_and(|kin| kin.memory == *memory);
        if !(first
            && room
            && sound
            && ended
            && self.layouts.keys().all(|m| *m != FIRST && owned(m)))
        {
            return Err("its processes do not fit together");
        }
        let all = || self.others.values().map(|member| &member.threads).chain([threads]);
        all().try_for_each(|threads| threads.check(next))?;
        let mut numbers: Vec<u32> = all().flat_map(Threads::iter).map(|(id, _)| id).collect();
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        if numbers.len() < count {
            return Err("two of its threads have one number");
        }
        let mut left = layout.limit();
        for memory in self.layouts.values().chain([layout]) {
            memory.check()?;
            let fits = memory.limit() == layout.limit();
            left = left
                .checked_sub(memory.bytes())
                .filter(|_| fits)
                .ok_or("its mappings are more than it may have")?;
        }
        Ok(())
    }

    /// Directories that processes are in which are not the current one.
    pub(in crate::sentry) fn directories(&self) -> impl Iterator<Item = Node> + '_ {
        self.others.values().map(|member| member.directory)
    }

    /// All PIDs, of live processes and zombies.
    pub(in crate::sentry) fn numbers(&self) -> Vec<u32> {
        self.kins().map(|kin| kin.id).chain(self.ended.keys().copied()).collect()
    }

    /// Whether the current process is the only one that lives, and it is the first.
    pub(crate) fn is_single(&self) -> bool {
        self.others.is_empty() && self.own.id == FIRST
    }

    /// The processes, from the one after the current on, which comes last.
    pub(crate) fn in_turn(&self) -> Vec<u32> {
        let own = self.own.id;
        let behind = self.others.range(own..).map(|(&id, _)| id);
        let before = self.others.range(..own).map(|(&id, _)| id);
        behind.chain(before).chain([own]).collect()
    }

    pub(crate) fn kins(&self) -> impl Iterator<Item = &ProcessInfo> + '_ {
        self.others.values().map(|member| &member.kin).chain([&self.own])
    }

    /// Whether `id` lives.
    pub(crate) fn lives(&self, id: u32) -> bool {
        self.kin(id).is_some()
    }

    pub(crate) fn kin(&self, id: u32) -> Option<&ProcessInfo> {
        self.kins().find(|kin| kin.id == id)
    }

    pub(crate) fn kin_mut(&mut self, id: u32) -> Option<&mut ProcessInfo> {
        match self.own.id == id {
            true => Some(&mut self.own),
            false => self.others.get_mut(&id).map(|member| &mut member.kin),
        }
    }

    /// Members of a group, live ones and zombies.
    pub(crate) fn group(&self, group: u32) -> Vec<u32> {
        self.kins().filter(|kin| kin.group == group).map(|kin| kin.id).collect()
    }

    /// Those that live, but for one.
    pub(crate) fn all_but(&self, one: u32) -> Vec<u32> {
        self.kins().map(|kin| kin.id).filter(|id| *id != one).collect()
    }

    /// Others that use the memory of the current process.
    pub(crate) fn borrowers(&self) -> Vec<u32> {
        let own = self.own.id;
        self.kins().filter(|kin| kin.memory == own && kin.id != own).map(|kin| kin.id).collect()
    }

    /// Whether `id` has its own memory or has ended, so that the lender may continue.
    pub(crate) fn is_grown(&self, id: u32) -> bool {
        self.kin(id).is_none_or(|kin| kin.memory == id)
    }

    /// Whether a further one fits.
    pub(crate) fn check_room(&self) -> Result<(), Errno> {
        let room = self.others.len() + self.ended.len() + 1 < PROCESSES;
        if room { Ok(()) } else { Err(Errno::AGAIN) }
    }

    /// Locks that threads of process `id`, which is not the current one, wait for.
    pub(in crate::sentry) fn wanted_locks(&self, id: u32) -> impl Iterator<Item = &FileLock> + '_ {
        let threads = self.others.get(&id).into_iter().flat_map(|member| member.threads.iter());
        threads.filter_map(|(_, thread)| match &thread.wait {
            Some(Wait { on: WaitReason::Lock(lock), .. }) => Some(lock),
            _ => None,
        })
    }

    /// All memory that the current process does not use.
    pub(in crate::sentry) fn layouts(&self) -> impl Iterator<Item = &Layout> + '_ {
        self.layouts.values()
    }

    /// Threads of processes that are not the current one.
    pub(in crate::sentry) fn other_threads(&self) -> impl Iterator<Item = (u32, &Thread)> + '_ {
        self.others.values().flat_map(|member| member.threads.iter())
    }

    /// Threads of the process `id`, which is not the current one.
    pub(in crate::sentry) fn threads_mut(&mut self) -> impl Iterator<Item = &mut Threads> + '_ {
        self.others.values_mut().map(|member| &mut member.threads)
    }

    /// When alarms ring of processes that are not the current one.
    pub(in crate::sentry) fn other_alarms(
        &self,
    ) -> impl Iterator<Item = (u32, MonotonicTime)> + '_ {
        self.others.iter().filter_map(|(id, member)| Some((*id, member.alarms.next()?)))
    }
}

impl Kernel {
    /// All memories, by their owners.
    pub(crate) fn memories(&self) -> BTreeMap<u32, &Layout> {
        let others = self.family.layouts.iter().map(|(&id, layout)| (id, layout));
        others.chain([(self.family.own.memory, &self.layout)]).collect()
    }

    /// The memory of `memory`, whether it is the current process's or another's.
    pub(in crate::sentry) fn layout_of(&self, memory: u32) -> Option<&Layout> {
        match self.family.own.memory == memory {
            true => Some(&self.layout),
            false => self.family.layouts.get(&memory),
        }
    }

    /// The directory that a process which lives is in.
    pub(in crate::sentry) fn directory_of(&self, id: u32) -> Option<Node> {
        match self.family.own.id == id {
            true => Some(self.directory),
            false => self.family.others.get(&id).map(|member| member.directory),
        }
    }

    /// Signals that are pending for all threads of a process, and those that it ignores and
    /// handles, as sets.
    pub(in crate::sentry) fn signals_of(&self, id: u32) -> (u64, [u64; 2]) {
        let (pending, handlers) = match self.family.others.get(&id) {
            _ if self.family.own.id == id => (&self.pending, &self.handlers),
            Some(member) => (&member.pending, &member.handlers),
            None => return (0, [0; 2]),
        };
        let mut sets = [0, 0];
        for (number, action) in handlers {
            let ignored = action[..8] == 1u64.to_le_bytes();
            if action[..8] != [0; 8] {
                sets[usize::from(!ignored)] |= 1 << (number - 1);
            }
        }
        (pending.set(), sets)
    }

    /// The threads of a process that lives.
    pub(crate) fn threads_of(&self, id: u32) -> Option<&Threads> {
        match self.family.own.id == id {
            true => Some(&self.threads),
            false => self.family.others.get(&id).map(|member| &member.threads),
        }
    }

    /// Makes `id`, which lives, the current process.
    pub(crate) fn seat(&mut self, id: u32) {
        let Some(mut other) = self.family.others.remove(&id) else { return };
        // One row of numbers for all of them.
        other.threads.continue_from(&self.threads);
        let left = self.family.own.id;
        std::mem::swap(&mut self.family.own, &mut other.kin);
        std::mem::swap(&mut self.directory, &mut other.directory);
        std::mem::swap(&mut self.umask, &mut other.umask);
        std::mem::swap(&mut self.handlers, &mut other.handlers);
        std::mem::swap(&mut self.pending, &mut other.pending);
        std::mem::swap(&mut self.alarms, &mut other.alarms);
        std::mem::swap(&mut self.threads, &mut other.threads);
        self.table.seat(left, id);
        let (from, to) = (other.kin.memory, self.family.own.memory);
        if from != to
            && let Some(layout) = self.family.layouts.remove(&to)
        {
            let put_aside = std::mem::replace(&mut self.layout, layout);
            self.family.layouts.insert(from, put_aside);
        }
        self.family.others.insert(left, other);
        self.heed_limits();
        self.count_memory();
    }

    /// Adds the mappings of other processes to the layout's limit.
    pub(in crate::sentry) fn count_memory(&mut self) {
        let own: u64 = self.family.layouts.values().map(Layout::own_bytes).sum();
        // Files beyond the limit of storage, which were written through mappings.
        let unpaid = self.tree.used().bytes.saturating_sub(self.tree.budget().bytes);
        let elsewhere = own.saturating_add(self.shared_bytes).saturating_add(unpaid);
        let mappings = self.family.layouts.values().map(Layout::len).sum();
        self.layout.set_elsewhere(elsewhere, mappings);
    }

    /// Sets the memory limit of every process, and returns the bytes that they have mapped
    /// together.
    pub(crate) fn limit_memory(&mut self, limit: u64) -> u64 {
        self.family.layouts.values_mut().for_each(|layout| layout.set_limit(limit));
        self.layout.set_limit(limit);
        self.layout.bytes_everywhere()
    }

    /// The memory limit of every process.
    pub(crate) fn memory_limit(&self) -> u64 {
        self.layout.limit()
    }

    /// The current process stops by a signal or continues; its parent is notified.
    pub(in crate::sentry) fn halt(&mut self, by: Option<u8>) {
        let own = &mut self.family.own;
        own.stopped = by;
        own.news = Some(by.map_or(ChildEvent::Continued, ChildEvent::Stopped));
        let (id, parent) = (u64::from(own.id), own.parent);
        if !self.family.lives(parent) {
            return;
        }
        let (code, status) = match by {
            Some(signal) => (libc::CLD_STOPPED, signal),
            None => (libc::CLD_CONTINUED, libc::SIGCONT as u8),
        };
        self.with(parent, |state| {
            if !state.ignores_stops() {
                state.send(None, SignalInfo::new(libc::SIGCHLD as u8, code, id, status.into()));
            }
        });
    }

    /// As another process, which lives.
    pub(crate) fn with<T>(&mut self, id: u32, work: impl FnOnce(&mut Self) -> T) -> T {
        let own = self.family.own.id;
        self.seat(id);
        let result = work(self);
        self.seat(own);
        result
    }

    /// Adds a child of the current process, with one thread, which is like `thread`; its number. It
    /// has a copy of the memory, or uses that of its parent.
    pub(in crate::sentry) fn add_child(
        &mut self,
        thread: Thread,
        copies: bool,
    ) -> Result<u32, Errno> {
        self.family.check_room()?;
        self.check_tasks()?;
        self.table.check_fork()?;
        if copies {
            self.layout.afford_copy()?;
        }
        self.tree.hold(self.directory)?;
        let id = self.threads.take_number()?;
        let own = &self.family.own;
        let memory = if copies { id } else { own.memory };
        let (stopped, news, spent, children) = (None, None, 0, 0);
        let traits = own.traits.inherited();
        let (parent, family) = (own.id, own.clone());
        let kin =
            ProcessInfo { id, parent, memory, stopped, news, spent, children, traits, ..family };
        if copies {
            self.family.layouts.insert(id, self.layout.clone());
        }
        let member = ProcessState {
            kin,
            directory: self.directory,
            umask: self.umask,
            handlers: self.handlers.clone(),
            pending: PendingSignals::default(),
            alarms: Timers::default(),
            threads: Threads::single(id, thread, &self.threads),
        };
        self.family.others.insert(id, member);
        self.table.fork(id);
        self.count_memory();
        Ok(id)
    }

    /// The current process starts another program: state that does not outlast `exec` is dropped.
    pub(crate) fn shed(&mut self, known: Executable) {
        let state = &mut *self;
        state.give_up_all(Some(state.threads.current_id()));
        state.alarms.drop_timers();
        state.close_all(&state.table.closing());
        state.drop_unowned();
        // Ignored signals stay ignored.
        state.handlers.retain(|_, action| action[..8] == 1u64.to_le_bytes());
        state.handlers.values_mut().for_each(|action| action[8..].fill(0));
        let id = state.family.own.id;
        state.threads.become_single(id);
        state.be_known(known);
        let lender = std::mem::replace(&mut state.family.own.memory, id);
        if lender != id {
            let new = Layout::new(state.layout.limit());
            let lent = std::mem::replace(&mut state.layout, new);
            state.family.layouts.insert(lender, lent);
        }
        state.count_memory();
    }

    /// The current process, which is not the first, ends: its parent is notified, and becomes the
    /// current one. Processes that use its memory must have ended before. Only the part that its
    /// parent may wait for is kept.
    pub(crate) fn bury(&mut self, end: End) {
        self.give_up_all(None);
        self.leave_terminal();
        self.semaphores.leave(self.family.own.id);
        self.named_queues.drop_requests(self.family.own.id);
        self.close_all(&self.table.numbers(0, u64::from(u32::MAX)));
        let ProcessInfo { id, parent, group, memory, .. } = self.family.own.clone();
        let (spent, groups) = (self.family.spent_by(id), self.kept_groups());
        self.tree.release(self.directory);
        self.leave_children(id, parent);
        let heir = if self.family.lives(parent) { parent } else { FIRST };
        self.seat(heir);
        self.family.others.remove(&id);
        self.table.drop_process(id);
        self.drop_unowned();
        self.wake_orphans(groups);
        if memory == id {
            self.family.layouts.remove(&id);
            self.count_memory();
            self.drop_unshared();
        }
        if heir != parent {
            return;
        }
        let (code, told, status) = match end {
            End::Exit(status) => (libc::CLD_EXITED, status, (status & 0xff) << 8),
            End::Signal(signal) => (libc::CLD_KILLED, signal, signal),
            _ => (libc::CLD_KILLED, libc::SIGKILL, libc::SIGKILL),
        };
        // A parent that ignores SIGCHLD does not wait.
        if !self.disowns() {
            self.family.ended.insert(id, ExitedProcess { parent, group, status, spent });
        }
        let (signal, child) = (libc::SIGCHLD as u8, u64::from(id));
        self.send(None, SignalInfo::new(signal, code, child, told as u64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_that_do_not_fit_together_are_refused() {
        let (layout, mut threads) = (Layout::new(1 << 20), Threads::new());
        let (child, thread) = (FIRST + 1, threads.current().clone());
        assert_eq!(threads.take_number(), Ok(child));
        let check = |change: &dyn Fn(&mut ProcessTable)| {
            let mut family = ProcessTable::new();
            let kin =
                ProcessInfo { id: child, parent: FIRST, memory: child, ..ProcessInfo::first() };
            let member = ProcessState {
                kin,
                directory: afresh_files::Tree::ROOT,
                umask: 0,
                handlers: BTreeMap::new(),
                pending: PendingSignals::default(),
                alarms: Timers::default(),
                threads: Threads::single(child, thread.clone(), &threads),
            };
            family.others.insert(child, member);
            family.layouts.insert(child, Layout::new(1 << 20));
            change(&mut family);
            family.check(&threads, &layout)
        };
        fn own(family: &mut ProcessTable) -> &mut ProcessState {
            family.others.get_mut(&(FIRST + 1)).unwrap()
        }
        assert_eq!(check(&|_| ()), Ok(()));
        assert_eq!(check(&|family| *family = ProcessTable::new()), Ok(()));
        let odd: [&dyn Fn(&mut ProcessTable); 15] = [
            &|family| family.own.id = 9,
            &|family| family.own.memory = child,
            &|family| family.own.parent = child,
            &|family| family.own.stopped = Some(65),
            &|family| own(family).kin.id = FIRST,
            &|family| own(family).kin.parent = child,
            &|family| own(family).kin.memory = child + 1,
            // Its memory would have no owner.
            &|family| own(family).kin.memory = FIRST,
            &|family| family.layouts.clear(),
            &|family| drop(family.layouts.insert(FIRST, Layout::new(1 << 20))),
            &|family| drop(family.layouts.insert(child, Layout::new(1 << 21))),
            &|family| own(family).threads = Threads::new(),
            &|family| {
                own(family).handlers.insert(65, [0; 32]);
            },
            &|family| {
                let member = own(family).clone();
                family.others.insert(child + 1, member);
            },
            &|family| {
                family.ended.insert(
                    child,
                    ExitedProcess { parent: FIRST, group: FIRST, status: 0, spent: 0 },
                );
            },
        ];
        for (index, change) in odd.iter().enumerate() {
            assert!(check(change).is_err(), "{index}");
        }
        let borrows = |family: &mut ProcessTable| {
            family.layouts.clear();
            own(family).kin.memory = FIRST;
        };
        assert_eq!(check(&borrows), Ok(()));
    }
}
