//! Limits on sets of `epoll` and on sets within sets, and answers of sets.
//!
//! Promises: a question about readiness looks at each interest once, however sets contain each
//! other. May break it: a set that becomes part of another and is not in the inner sets of that.

use crate::sentry::kernel::epoll_set::EpollSet;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::state::Kernel;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};

/// Answers of sets to one question about readiness, for one thread or for all in turn. So each set
/// is looked at once, however many threads wait for it and however many sets contain it.
#[derive(Debug, Default)]
pub(crate) struct ReadySets {
    answers: BTreeMap<u64, bool>,
    /// The edges of sets that others watch for edges.
    edges: BTreeMap<u64, u64>,
    /// Sets whose answer depends on the thread: those with a descriptor of signals.
    personal: BTreeSet<u64>,
    /// Whether the answer that is being found depends on the thread.
    is_personal: bool,
    /// Descriptors, interests and connections to accept that were looked at.
    looks: usize,
}

impl ReadySets {
    /// Forgets answers that do not hold for other threads.
    pub(in crate::sentry) fn begin_thread(&mut self) {
        for id in std::mem::take(&mut self.personal) {
            self.answers.remove(&id);
            self.edges.remove(&id);
        }
    }

    /// The answer of a set, if it was asked.
    pub(in crate::sentry) fn answer(&mut self, id: u64) -> Option<bool> {
        let answer = self.answers.get(&id).copied()?;
        self.is_personal |= self.personal.contains(&id);
        Some(answer)
    }

    /// Begins to ask a set, which does not contain itself. Its answer is given with the value.
    pub(in crate::sentry) fn begin_set(&mut self, id: u64) -> bool {
        self.answers.insert(id, false);
        std::mem::take(&mut self.is_personal)
    }

    /// Notes the answer of a set.
    pub(in crate::sentry) fn end_set(&mut self, id: u64, begun: bool, ready: bool) {
        self.answers.insert(id, ready);
        self.end(id, begun);
    }

    /// The edges of a set, if they were asked.
    pub(in crate::sentry) fn edges(&mut self, id: u64) -> Option<u64> {
        let edges = self.edges.get(&id).copied()?;
        self.is_personal |= self.personal.contains(&id);
        Some(edges)
    }

    /// Begins to ask a set for its edges, as [`Self::begin_set`].
    pub(in crate::sentry) fn begin_edges(&mut self, id: u64) -> bool {
        self.edges.insert(id, 0);
        std::mem::take(&mut self.is_personal)
    }

    /// Notes the edges of a set.
    pub(in crate::sentry) fn end_edges(&mut self, id: u64, begun: bool, edges: u64) {
        self.edges.insert(id, edges);
        self.end(id, begun);
    }

    /// Notes whether the answer of a set depends on the thread. The set that contains it depends on
    /// the thread then as well.
    fn end(&mut self, id: u64, begun: bool) {
        if self.is_personal {
            self.personal.insert(id);
        }
        self.is_personal |= begun;
    }

    /// Notes that an answer depends on the signals of the thread.
    pub(in crate::sentry) fn note_signals(&mut self) {
        self.is_personal = true;
    }

    /// Adds to the number of looks.
    pub(in crate::sentry) fn count(&mut self, looks: usize) {
        self.looks += looks;
    }

    /// The number of looks so far.
    pub(crate) fn looks(&self) -> usize {
        self.looks
    }
}

/// Maximum sets of a guest.
pub(in crate::sentry) const MAX_SETS: usize = 1024;

/// Interests of all sets beyond which no set grows by more than [`INTERESTS_UNCHECKED`].
pub(in crate::sentry) const MAX_INTERESTS: usize = 1 << 17;

/// A set is compared with [`MAX_INTERESTS`] each time that it has so many more interests.
pub(in crate::sentry) const INTERESTS_UNCHECKED: usize = 64;

/// Sets that may contain each other, one in the next (`EP_MAX_NESTS`).
pub(in crate::sentry) const MAX_NESTING: usize = 4;

impl Kernel {
    /// The sets of all processes.
    pub(in crate::sentry) fn sets(&self) -> impl Iterator<Item = &EpollSet> + '_ {
        self.set_ids().filter_map(|id| self.set(id))
    }

    /// Their descriptions.
    fn set_ids(&self) -> impl Iterator<Item = u64> + '_ {
        let sets = |open: &FileObject| matches!(open, FileObject::Epoll(_));
        self.table.descriptions().filter(move |(_, d)| sets(&d.open)).map(|(id, _)| id)
    }

    /// The set of a description, if it is one.
    fn set(&self, id: u64) -> Option<&EpollSet> {
        match &self.table.description(id)?.open {
            FileObject::Epoll(set) => Some(set),
            _ => None,
        }
    }

    pub(in crate::sentry) fn all_interests(&self) -> usize {
        self.sets().map(EpollSet::len).sum()
    }

    /// Whether there are no more sets and interests than a guest may have.
    pub(in crate::sentry) fn are_interests_bounded(&self) -> bool {
        let most = MAX_INTERESTS + MAX_SETS * INTERESTS_UNCHECKED;
        self.sets().count() <= MAX_SETS && self.all_interests() <= most
    }

    /// Finds the sets in each set, of a state from a snapshot.
    pub(in crate::sentry) fn find_inner_sets(&mut self) {
        let sets: BTreeSet<u64> = self.set_ids().collect();
        for id in &sets {
            let found = self.table.description_mut(*id).map(|found| &mut found.open);
            let Some(FileObject::Epoll(set)) = found else { continue };
            set.find_inner_sets(&sets);
        }
    }

    /// Refuses sets in sets as Linux does.
    ///
    /// # Errors
    /// `ELOOP` for a set that contains itself, or too many levels.
    pub(in crate::sentry) fn check_nesting(&self) -> Result<(), Errno> {
        let mut heights = BTreeMap::new();
        self.set_ids().try_for_each(|id| self.height(id, 0, &mut heights).map(drop))
    }

    /// Levels of sets in a set that is in `depth` levels of others; those that were found before
    /// are in `heights`.
    fn height(
        &self,
        id: u64,
        depth: usize,
        heights: &mut BTreeMap<u64, usize>,
    ) -> Result<usize, Errno> {
        let height = match (heights.get(&id), self.set(id)) {
            (Some(height), _) => *height,
            (None, Some(set)) if depth <= MAX_NESTING => {
                let mut height = 0;
                for inner in set.inner_sets() {
                    // It may be closed.
                    if self.set(inner).is_some() {
                        height = height.max(1 + self.height(inner, depth + 1, heights)?);
                    }
                }
                heights.insert(id, height);
                height
            }
            _ => MAX_NESTING + 1,
        };
        if depth + height > MAX_NESTING { Err(Errno::LOOP) } else { Ok(height) }
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Tree};

    use super::*;
    use crate::sentry::kernel::epoll_set::EpollInterest;
    use crate::sentry::kernel::fd_table::Description;
    use crate::sentry::kernel::poll_events::IN;
    use crate::sentry::kernel::semaphores::SemaphoreOperation;
    use crate::sentry::kernel::streams::Streams;
    use crate::sentry::kernel::threads::{MAX_WAITED, WAITED_UNCHECKED, Wait, WaitReason};
    use crate::sentry::mm::layout::Layout;
    use crate::sentry::net::sockets::{Address, IncomingConnection, Socket, SocketState};

    const THREADS: usize = 50;
    const INTERESTS: u32 = 10_000;

    /// The looks of a round in which each thread waits for a set with so many interests, and with
    /// one in a descriptor of signals if it `differs` for each thread.
    fn looks_of_round(differs: bool) -> usize {
        let layout = Layout::new(1 << 20);
        let mut state = Kernel::new(layout, Tree::new(Budget::default()), None, Vec::new());
        let mut open = |open: FileObject| {
            let descriptor = state.table.add(Description::new(open, 0), false).unwrap();
            state.table.id(descriptor.into()).unwrap()
        };
        let counter = FileObject::Event { count: 0, semaphore: false, edges: 0 };
        let (event, signals) = (open(counter), open(FileObject::Signals(1 << 11)));
        let first = if differs { signals } else { event };
        let interest = |description| {
            let (wanted, data, reported, off) = (IN.into(), 0, None, false);
            EpollInterest { description, wanted, data, reported, off }
        };
        let interests = (0..INTERESTS).map(|n| (n, interest(if n == 0 { first } else { event })));
        let inner = open(FileObject::Epoll(interests.collect()));
        let outer = open(FileObject::Epoll([(0, interest(inner))].into_iter().collect()));
        let wait = Wait::new(WaitReason::Files(vec![(outer, IN); 9]), None);
        let (streams, mut sets) = (Streams::default(), ReadySets::default());
        for _ in 0..THREADS {
            let thread = state.current().threads.current_id();
            assert!(!state.is_over(&streams, thread, &wait, 0, &mut sets));
        }
        let FileObject::Event { count, .. } = &mut state.table.description_mut(event).unwrap().open
        else {
            unreachable!()
        };
        *count = 1;
        let thread = state.current().threads.current_id();
        assert!(state.is_over(&streams, thread, &wait, 0, &mut ReadySets::default()));
        sets.looks()
    }

    #[test]
    fn a_listener_is_as_many_looks_as_it_has_connections() {
        const CONNECTIONS: usize = 100;
        let layout = Layout::new(1 << 20);
        let mut state = Kernel::new(layout, Tree::new(Budget::default()), None, Vec::new());
        let mut listener = Socket::new(libc::AF_INET as u16);
        let connection = IncomingConnection {
            incoming: 0,
            outgoing: 0,
            peer: Address::default(),
            own: Address::default(),
            process: Default::default(),
            until: None,
        };
        listener.stage = SocketState::Listening(vec![connection; CONNECTIONS]);
        let description = Description::new(FileObject::Socket(listener), 0);
        let descriptor = state.table.add(description, false).unwrap();
        let id = state.table.id(descriptor.into()).unwrap();
        let wait = Wait::new(WaitReason::Files(vec![(id, 0); 3]), None);
        let (streams, mut sets) = (Streams::default(), ReadySets::default());
        let thread = state.current().threads.current_id();
        assert!(!state.is_over(&streams, thread, &wait, 0, &mut sets));
        assert_eq!(sets.looks(), 3 * (1 + CONNECTIONS));
    }

    #[test]
    fn waits_for_semaphores_count_as_those_for_descriptors() {
        let layout = Layout::new(1 << 20);
        let mut state = Kernel::new(layout, Tree::new(Budget::default()), None, Vec::new());
        let most = SemaphoreOperation { number: 0, change: -1, flags: 0 };
        assert_eq!(state.processes.check_wait(MAX_WAITED), Ok(()));
        let thread = state.current().threads.current_id();
        let own = state.processes.current.threads.get_mut(thread).unwrap();
        own.wait = Some(Wait::new(WaitReason::Semaphores(0, vec![most; MAX_WAITED]), None));
        assert_eq!(state.processes.check_wait(WAITED_UNCHECKED), Ok(()));
        assert_eq!(state.processes.check_wait(WAITED_UNCHECKED + 1), Err(Errno::NOMEM));
    }

    #[test]
    fn a_round_over_threads_looks_at_each_interest_once_and_at_signals_for_each_thread() {
        let once = INTERESTS as usize + 1;
        assert_eq!(looks_of_round(false), once + 9 * THREADS);
        assert_eq!(looks_of_round(true), (once + 9) * THREADS);
    }
}
