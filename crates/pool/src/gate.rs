//! Threads and tasks that wait for an item to come back.
//!
//! A return looks for waiting threads only after the item is where they look, and a waiting thread
//! counts itself before it looks. A task does the same: it counts while its waker is in the queue.
//! Each side thus stores one word and then loads the other's, and one of the two loads must see the
//! store. Acquire and release do not promise that: a processor may do its load before its store is
//! visible, and arm64 does. [`Gate::wait`] and [`Gate::poll`] have a fence, and returns store the
//! item and load the count with `SeqCst`.

use std::collections::VecDeque;
use std::task::Waker;
use std::time::Instant;

use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering, between_return_and_look, fence, locked};

pub(crate) struct Gate {
    /// Threads and tasks that wait, so that a return signals only when there is one.
    waiting: AtomicUsize,
    tasks: Mutex<TaskQueue>,
    came_back: Condvar,
}

/// Tasks that wait.
struct TaskQueue {
    /// By their numbers, which ascend: the one that has waited longest is first.
    tasks: VecDeque<WaitingTask>,
    next: u64,
}

struct WaitingTask {
    number: u64,
    waker: Waker,
}

/// The place of a task in the queue, over all of its attempts.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    /// Its place, from its first wait on.
    number: Option<u64>,
    /// Whether it is in the queue, unless a signal took it out.
    waits: bool,
    /// Whether a signal ended its last wait: if it leaves, the next task is woken in its place.
    woken: bool,
}

impl Gate {
    pub(crate) fn new() -> Self {
        let tasks = TaskQueue { tasks: VecDeque::new(), next: 0 };
        Self { waiting: AtomicUsize::new(0), tasks: Mutex::new(tasks), came_back: Condvar::new() }
    }

    /// Waits for a [`Gate::signal`] unless `there` finds an item; `false` at the deadline, if one
    /// is set.
    ///
    /// The values that `there` loads must be stored with `SeqCst`, or under a lock that it takes,
    /// before the signal.
    pub(crate) fn wait(&self, deadline: Option<Instant>, there: impl FnOnce() -> bool) -> bool {
        let guard = locked(&self.tasks);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // Between the count and the look: an item that came back before the count sent no signal.
        fence(Ordering::SeqCst);
        let there = there();
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let over = left.is_some_and(|left| left.is_zero());
        match left {
            _ if there || over => drop(guard),
            Some(left) => drop(self.came_back.wait_timeout(guard, left)),
            None => drop(self.came_back.wait(guard)),
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        !over
    }

    /// Whether a task may look for an item: `there` finds one, or a signal came since its last
    /// poll. If not, the next signal wakes `waker`, unless other tasks have waited for longer.
    /// `there` as for [`Gate::wait`].
    pub(crate) fn poll(
        &self,
        turn: &mut Turn,
        waker: &Waker,
        there: impl FnOnce() -> bool,
    ) -> bool {
        // The code of a waker is foreign, and may use the pool: it never runs under the lock.
        let mut waker = waker.clone();
        let mut queue = locked(&self.tasks);
        if turn.waits {
            let at = queue.tasks.iter().position(|task| Some(task.number) == turn.number);
            let Some(at) = at else {
                *turn = Turn { waits: false, woken: true, ..*turn };
                return true;
            };
            if !there() {
                std::mem::swap(&mut queue.tasks[at].waker, &mut waker);
                drop(queue);
                return false;
            }
            // A task that has its item may keep its turn, and would swallow a signal in the queue.
            turn.waits = false;
            let left = queue.tasks.remove(at);
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            drop(queue);
            drop(left);
            return true;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if there() {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            drop(queue);
            return true;
        }
        let number = turn.number.unwrap_or(queue.next);
        queue.next = queue.next.max(number + 1);
        let at = queue.tasks.partition_point(|task| task.number < number);
        queue.tasks.insert(at, WaitingTask { number, waker });
        *turn = Turn { number: Some(number), waits: true, woken: false };
        false
    }

    /// A task stops waiting. If it was woken and an item is still there, the next one is woken.
    ///
    /// `there` as for [`Gate::wait`]. It sees the item of the signal, whose sender stored it before
    /// it took the task out of the queue.
    pub(crate) fn leave(&self, turn: &mut Turn, there: impl FnOnce() -> bool) {
        let Turn { number, waits, woken } = std::mem::take(turn);
        if !waits {
            if woken && there() {
                self.signal();
            }
            return;
        }
        let mut queue = locked(&self.tasks);
        let at = queue.tasks.iter().position(|task| Some(task.number) == number);
        let left = at.and_then(|at| queue.tasks.remove(at));
        if left.is_some() {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        drop(queue);
        if left.is_none() && there() {
            self.signal();
        }
    }

    /// Wakes every waiting thread, and the task at the front of the queue, to look again. The
    /// caller stored the item before, with `SeqCst` or under a lock that they take.
    #[inline]
    pub(crate) fn signal(&self) {
        between_return_and_look();
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        let mut queue = locked(&self.tasks);
        self.came_back.notify_all();
        let next = queue.tasks.pop_front();
        if next.is_some() {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        drop(queue);
        if let Some(task) = next {
            task.waker.wake();
        }
    }
}
