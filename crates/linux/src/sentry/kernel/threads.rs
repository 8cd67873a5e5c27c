//! Threads of a guest: plain data. One of them is in the process.
//!
//! The process has one kernel thread. The *current* thread's registers are in the stub or running;
//! every other's are kept here, with the reason for its wait. So all of them stand still whenever
//! the sentry looks, and a snapshot is complete by itself.

use std::collections::BTreeMap;

use afresh_files::Node;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::platform::Context;
use crate::sentry::kernel::file_locks::FileLock;
use crate::sentry::kernel::held_file::HeldFiles;
use crate::sentry::kernel::identity::FIRST;
use crate::sentry::kernel::message_queues::WantedMessage;
use crate::sentry::kernel::open_fifo::PendingOpen;
use crate::sentry::kernel::poll_events::MAX_EVENTS;
use crate::sentry::kernel::resource_limits::DESCRIPTORS;
use crate::sentry::kernel::semaphores::{MAX_OPERATIONS, SemaphoreOperation};
use crate::sentry::kernel::signals::PendingSignals;
use crate::sentry::kernel::time::MonotonicTime;
use crate::sentry::kernel::wait_options::WaitOptions;

/// Threads that a process may have.
pub(crate) const THREADS: usize = 4096;
/// Descriptors and operations of semaphores that all threads may wait for together, beyond which no
/// thread waits for more than [`WAITED_UNCHECKED`].
pub(in crate::sentry) const MAX_WAITED: usize = 1 << 18;
/// A wait is compared with [`MAX_WAITED`] if it is for more of them.
pub(in crate::sentry) const WAITED_UNCHECKED: usize = 64;
/// The signal stack of a thread that has none (`SS_DISABLE`).
pub(crate) const NO_STACK: [u64; 3] = [0, 2, 0];

/// The event that a thread waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WaitReason {
    /// A wait to be woken at this place of a shared file, or, without one, at this address;
    /// `order` is the order of the waits.
    Futex { address: u64, bits: u32, order: u64, place: Option<(Node, u64)> },
    /// That nothing stands against this lock, or a signal that interrupts.
    Lock(FileLock),
    /// The other end of a named pipe, or a signal that interrupts.
    Fifo(PendingOpen),
    /// A stop of the process by its terminal, until it continues.
    Stop,
    /// Any of these events (as `poll` names them) of descriptions.
    Files(Vec<(u64, u16)>),
    /// A signal of this set, or one that interrupts.
    Signals(u64),
    /// News of a child, of these, or a signal that interrupts.
    Children(WaitOptions),
    /// A child that uses this process's memory, until it runs another program or ends.
    Borrower(u32),
    /// That operations on a set of semaphores can be done.
    Semaphores(u32, Vec<SemaphoreOperation>),
    /// Room for a message of so many bytes in a queue.
    MessageRoom(u32, u64),
    /// A message in a queue.
    Message(u32, WantedMessage),
    /// Time alone, or a signal that interrupts.
    Nothing,
    /// A wake at any of these words (`futex_waitv`); `order` is the order of the waits.
    Futexes { words: Vec<FutexKey>, order: u64 },
}

/// Words that one call may wait at (`FUTEX_WAITV_MAX`).
pub(in crate::sentry) const MAX_FUTEXES: usize = 128;

/// The word that waiters of a futex wait at, and their wakers name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FutexKey {
    /// Its address in the memory of the waiter or waker.
    address: u64,
    /// Its file and offset in shared memory, unless the process declares the futex private. Any
    /// mapping of them is the same futex.
    pub(in crate::sentry) place: Option<(Node, u64)>,
}

impl FutexKey {
    /// A word of private memory, or of a futex that the process declares private.
    pub(in crate::sentry) fn private(address: u64) -> Self {
        Self { address, place: None }
    }

    /// A word of shared memory.
    pub(in crate::sentry) fn shared(address: u64, node: Node, offset: u64) -> Self {
        Self { address, place: Some((node, offset)) }
    }

    /// For a word of shared memory: waits of the own process at its address whose place is not
    /// known. Earlier versions noted none while a guest had one process. A private wait at the word
    /// looks the same, and may be woken without need, as any wait at a futex.
    pub(in crate::sentry) fn unplaced(self) -> Option<Self> {
        self.place.map(|_| Self::private(self.address))
    }

    /// Whether a wait is at this word. An address counts in one memory only.
    fn is_of(self, address: u64, place: Option<(Node, u64)>) -> bool {
        self.place == place && (place.is_some() || self.address == address)
    }
}

impl WaitReason {
    /// Items that an answer looks at in addition to sets, messages and processes, whether the wait
    /// is over: at most about so many.
    pub(in crate::sentry) fn looks(&self) -> usize {
        match self {
            Self::Files(list) => list.len(),
            Self::Semaphores(_, operations) => operations.len(),
            // All locks.
            Self::Lock(_) => MAX_OPERATIONS,
            _ => 1,
        }
    }

    /// Whether a call can wait for so much.
    fn is_bounded(&self) -> bool {
        match self {
            // Of `select`, for reading and for writing.
            Self::Files(list) => list.len() <= 2 * DESCRIPTORS as usize,
            Self::Semaphores(_, operations) => operations.len() <= MAX_OPERATIONS,
            Self::Futexes { words, .. } => words.len() <= MAX_FUTEXES,
            _ => true,
        }
    }
}

/// A wait, and the call that waits is repeated when it is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Wait {
    pub(crate) reason: WaitReason,
    pub(crate) until: Option<MonotonicTime>,
    /// Bytes of the call that are done.
    pub(crate) done: u64,
    /// Whether it was woken.
    pub(crate) woken: bool,
    /// Closed descriptors that the call still uses. Snapshots store them behind the roots.
    #[serde(skip)]
    pub(crate) held: HeldFiles,
}

impl Wait {
    pub(crate) fn new(reason: WaitReason, until: Option<MonotonicTime>) -> Self {
        Self { reason, until, done: 0, woken: false, held: HeldFiles::new() }
    }

    /// Ends the wait at a futex. Of several futexes the number of this one is the result.
    pub(in crate::sentry) fn wake(&mut self, futex: FutexKey) {
        self.woken = true;
        if let WaitReason::Futexes { words, .. } = &self.reason {
            let at = words.iter().position(|word| futex.is_of(word.address, word.place));
            self.done = at.unwrap_or_default() as u64;
        }
    }

    /// The number of descriptors, futexes, or operations of semaphores that it waits for.
    pub(in crate::sentry) fn items(&self) -> usize {
        match &self.reason {
            WaitReason::Files(list) => list.len(),
            WaitReason::Semaphores(_, operations) => operations.len(),
            WaitReason::Futexes { words, .. } => words.len(),
            _ => 0,
        }
    }

    /// Its place in the order of waits, if it is one for this futex.
    fn order_at(&self, futex: FutexKey, bits: u32) -> Option<u64> {
        match &self.reason {
            _ if self.woken => None,
            WaitReason::Futex { address, bits: of, order, place } => {
                (futex.is_of(*address, *place) && of & bits != 0).then_some(*order)
            }
            WaitReason::Futexes { words, order } => {
                let mut words = words.iter();
                words.any(|word| futex.is_of(word.address, word.place)).then_some(*order)
            }
            _ => None,
        }
    }
}

/// A thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Thread {
    /// Its registers; none of the current one.
    pub(crate) context: Option<Context>,
    pub(crate) wait: Option<Wait>,
    pub(crate) blocked: u64,
    /// The mask that is restored when the waiting call is over.
    pub(crate) masked: Option<u64>,
    pub(crate) pending: PendingSignals,
    pub(crate) signal_stack: [u64; 3],
    pub(crate) name: [u8; 16],
    /// Where a zero goes when it ends.
    pub(crate) cleared: u64,
    /// The list of the robust mutexes that it holds; 0 without one.
    pub(crate) robust: u64,
    /// Nanoseconds of processor time that it has spent.
    pub(crate) spent: u64,
}

/// All threads of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Threads {
    list: BTreeMap<u32, Thread>,
    current: u32,
    next: u32,
    order: u64,
}

impl Threads {
    /// The first thread.
    pub(crate) fn new() -> Self {
        let first = Thread {
            context: None,
            wait: None,
            blocked: 0,
            masked: None,
            pending: PendingSignals::default(),
            signal_stack: NO_STACK,
            name: *b"guest\0\0\0\0\0\0\0\0\0\0\0",
            cleared: 0,
            robust: 0,
            spent: 0,
        };
        let list = BTreeMap::from([(FIRST, first)]);
        Self { list, current: FIRST, next: FIRST + 1, order: 0 }
    }

    /// The threads of a process that begins with one, numbered as the process; the row of numbers
    /// is that of `others`.
    pub(in crate::sentry) fn single(id: u32, thread: Thread, others: &Self) -> Self {
        let list = BTreeMap::from([(id, thread)]);
        Self { list, current: id, next: others.next, order: others.order }
    }

    /// Continues the sequence of numbers of `other`.
    pub(in crate::sentry) fn continue_from(&mut self, other: &Self) {
        (self.next, self.order) = (other.next, other.order);
    }

    /// Only the current thread is left, numbered as the process.
    pub(in crate::sentry) fn become_single(&mut self, id: u32) {
        let thread = self.current().clone();
        let (context, wait, masked, signal_stack) = (None, None, None, NO_STACK);
        let thread =
            Thread { context, wait, masked, signal_stack, cleared: 0, robust: 0, ..thread };
        self.list = BTreeMap::from([(id, thread)]);
        self.current = id;
    }

    /// The next number, which is never used again.
    pub(in crate::sentry) fn take_number(&mut self) -> Result<u32, Errno> {
        self.check_room()?;
        self.next += 1;
        Ok(self.next - 1)
    }

    /// The number that comes next.
    pub(in crate::sentry) fn next(&self) -> u32 {
        self.next
    }

    /// The first error of threads from a snapshot, if any.
    pub(crate) fn check(&self, next: u32) -> Result<(), &'static str> {
        let numbered = self.list.keys().all(|id| (FIRST..next).contains(id));
        let others = self.list.iter().filter(|(id, _)| **id != self.current);
        let placed = others.into_iter().all(|(_, thread)| thread.context.is_some());
        let known = self.list.contains_key(&self.current) && self.list.len() <= THREADS;
        let pending = self.list.values().all(|thread| thread.pending.is_sound());
        let waits = self.list.values().filter_map(|thread| thread.wait.as_ref());
        let waits = waits.into_iter().all(|wait| wait.reason.is_bounded());
        let counted = self.order < MAX_EVENTS;
        if numbered && placed && known && pending && waits && counted {
            Ok(())
        } else {
            Err("its threads do not fit together")
        }
    }

    pub(crate) fn current_id(&self) -> u32 {
        self.current
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn current(&self) -> &Thread {
        self.list.get(&self.current).expect("the current thread is one")
    }

    pub(crate) fn current_mut(&mut self) -> &mut Thread {
        self.list.get_mut(&self.current).expect("the current thread is one")
    }

    pub(crate) fn get(&self, id: u32) -> Option<&Thread> {
        self.list.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> Option<&mut Thread> {
        self.list.get_mut(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Thread)> + '_ {
        self.list.iter().map(|(&id, thread)| (id, thread))
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut Thread> + '_ {
        self.list.values_mut()
    }

    /// The threads, from the one after the current on, which comes last.
    pub(crate) fn in_turn(&self) -> impl Iterator<Item = (u32, &Thread)> + '_ {
        let behind = self.list.range(self.current + 1..);
        behind.chain(self.list.range(..=self.current)).map(|(&id, thread)| (id, thread))
    }

    /// Whether a further one fits.
    pub(crate) fn check_room(&self) -> Result<(), Errno> {
        let room = self.list.len() < THREADS && self.next < i32::MAX as u32;
        if room { Ok(()) } else { Err(Errno::AGAIN) }
    }

    /// Adds a thread that is not the current one; its number.
    pub(crate) fn add(&mut self, thread: Thread) -> u32 {
        let id = self.next;
        self.next += 1;
        self.list.insert(id, thread);
        id
    }

    /// Makes `id` the current thread, and returns its registers. `context` has those of the one
    /// that was current.
    pub(crate) fn switch(&mut self, id: u32, context: Context) -> Option<Context> {
        self.current_mut().context = Some(context);
        self.current = id;
        self.list.get_mut(&id).and_then(|thread| thread.context.take())
    }

    /// Removes the current thread, which is not the only one. The one before it in turn becomes
    /// current, so that the turns keep their order; returns the registers of that one.
    pub(crate) fn remove_current(&mut self) -> Option<Context> {
        self.list.remove(&self.current);
        let before = self.list.range(..self.current).next_back();
        let (heir, _) = before.or(self.list.last_key_value()).expect("another thread is left");
        self.current = *heir;
        self.current_mut().context.take()
    }

    /// Numbers for the order of waiters.
    pub(crate) fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    /// Waiters of a futex for any of `bits`, the longest first.
    pub(in crate::sentry) fn waiting(&self, futex: FutexKey, bits: u32) -> Vec<u32> {
        let order = |thread: &Thread| thread.wait.as_ref()?.order_at(futex, bits);
        let all = self.list.iter().filter_map(|(&id, thread)| Some((order(thread)?, id)));
        let mut waiting: Vec<(u64, u32)> = all.collect();
        waiting.sort_unstable();
        waiting.into_iter().map(|(_, id)| id).collect()
    }

    /// Whether a thread waits for one futex, which can become another one.
    pub(in crate::sentry) fn waits_for_one(&self, id: u32) -> bool {
        let wait = self.list.get(&id).and_then(|thread| thread.wait.as_ref());
        wait.is_some_and(|wait| matches!(wait.reason, WaitReason::Futex { .. }))
    }

    /// As [`Self::waiting`], and then those whose place is not known.
    pub(in crate::sentry) fn waiting_here(&self, futex: FutexKey, bits: u32) -> Vec<u32> {
        let mut waiting = self.waiting(futex, bits);
        waiting.extend(futex.unplaced().into_iter().flat_map(|own| self.waiting(own, bits)));
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_do_not_fit_together_are_refused() {
        let threads = Threads::new();
        let next = FIRST + 1;
        assert_eq!(threads.check(next), Ok(()));
        assert!(Threads { current: 9, ..threads.clone() }.check(next).is_err());
        assert!(threads.check(FIRST).is_err());
        let mut two = threads.clone();
        // The second would also be a current one.
        let second = two.current().clone();
        two.add(second);
        assert!(two.check(next + 1).is_err());
        let mut signalled = threads;
        let info = crate::sentry::kernel::signals::SignalInfo::new(70, 0, [0; 2], 0);
        assert!(signalled.current_mut().pending.add(info) && signalled.check(next).is_err());
    }

    #[test]
    fn the_end_of_a_thread_leaves_another_current_and_the_turns_in_order() {
        let order = |threads: &Threads| threads.in_turn().map(|(id, _)| id).collect::<Vec<_>>();
        for gone in 0..3 {
            let mut threads = Threads::new();
            // One byte, and two bases.
            let context: Context = postcard::from_bytes(&[1, 7, 0, 0]).unwrap();
            let thread = Thread { context: Some(context.clone()), ..threads.current().clone() };
            let ids = [FIRST, threads.add(thread.clone()), threads.add(thread)];
            if ids[gone] != FIRST {
                threads.switch(ids[gone], context.clone());
            }
            let mut expected = order(&threads);
            expected.retain(|id| *id != ids[gone]);
            assert_eq!(threads.remove_current(), Some(context), "its registers go to the stub");
            assert_eq!((order(&threads), threads.check(FIRST + 3)), (expected, Ok(())));
        }
    }

    #[test]
    fn the_longest_waiter_is_woken_first() {
        let mut threads = Threads::new();
        let mut wait = |bits: u32| {
            let order = threads.next_order();
            let reason = WaitReason::Futex { address: 64, bits, order, place: None };
            let thread =
                Thread { wait: Some(Wait::new(reason, None)), ..threads.current().clone() };
            threads.add(thread)
        };
        let (first, second) = (wait(1), wait(3));
        let futex = FutexKey::private(64);
        assert_eq!(threads.waiting(futex, 1), [first, second]);
        assert_eq!(threads.waiting(futex, 2), [second]);
        for other in [FutexKey::private(60), FutexKey::shared(64, Node(1), 64)] {
            assert!(threads.waiting(other, u32::MAX).is_empty());
        }
        if let Some(wait) = threads.get_mut(first).and_then(|thread| thread.wait.as_mut()) {
            wait.woken = true;
        }
        assert_eq!(threads.waiting(futex, 1), [second]);
    }

    #[test]
    fn a_wait_without_its_place_is_woken_after_those_at_the_place() {
        let mut threads = Threads::new();
        let mut wait = |address, place| {
            let order = threads.next_order();
            let reason = WaitReason::Futex { address, bits: 1, order, place };
            let thread =
                Thread { wait: Some(Wait::new(reason, None)), ..threads.current().clone() };
            threads.add(thread)
        };
        let old = wait(64, None);
        let placed = wait(4096, Some((Node(1), 8)));
        let (other_place, other_address) = (wait(64, Some((Node(1), 12))), wait(68, None));
        // The bytes of an earlier version.
        let before: Wait = postcard::from_bytes(&[0, 64, 1, 1, 0, 0, 0, 0]).unwrap();
        assert_eq!(threads.get(old).unwrap().wait.as_ref(), Some(&before));
        let futex = FutexKey::shared(64, Node(1), 8);
        assert_eq!(threads.waiting(futex, 1), [placed], "an address counts in its own process");
        assert_eq!(threads.waiting_here(futex, 1), [placed, old]);
        assert_eq!(threads.waiting_here(FutexKey::private(64), 1), [old]);
        assert_eq!(threads.waiting_here(FutexKey::private(68), 1), [other_address]);
        let further = FutexKey::shared(64, Node(1), 12);
        assert_eq!(threads.waiting_here(further, 1), [other_place, old]);
    }
}
