//! Turns of new processes. Their first calls run one after another on each processor, when many
//! begin at the same time: between two threads that alternate on a processor, each system call of
//! a guest would find the caches of the other one.
//!
//! Promises: turns begin in the order of their requests. A turn ends when the guest waits, when its
//! call ends, or after [`MAX_TURN`], so no call keeps others from beginning. A call that has had
//! its turn is never held back again.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use afresh_sys::PerProcess;

/// Maximum length of a turn.
const MAX_TURN: Duration = Duration::from_millis(20);

static QUEUE: PerProcess<StartQueue> = PerProcess::new(|| {
    StartQueue::new(thread::available_parallelism().map_or(1, std::num::NonZero::get))
});

thread_local! {
    /// The number of the turn that this thread has.
    static TURN: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Turns, and the threads that wait for one.
struct StartQueue {
    /// Turns at the same time.
    limit: usize,
    state: Mutex<QueueState>,
}

#[derive(Default)]
struct QueueState {
    requests: u64,
    /// The numbers of present turns, and when they end at the latest.
    running: Vec<(u64, Instant)>,
    waiting: VecDeque<(u64, Thread)>,
}

impl QueueState {
    /// Wakes the thread whose turn may begin next.
    fn wake_first(&self) {
        if let Some((_, thread)) = self.waiting.front() {
            thread.unpark();
        }
    }
}

impl StartQueue {
    fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn, and returns its number.
    fn take(&self) -> u64 {
        let mut state = self.lock();
        let number = state.requests;
        state.requests += 1;
        state.waiting.push_back((number, thread::current()));
        loop {
            let now = Instant::now();
            state.running.retain(|(_, end)| *end > now);
            let is_first = state.waiting.front().is_some_and(|(first, _)| *first == number);
            if is_first && state.running.len() < self.limit {
                state.waiting.pop_front();
                state.running.push((number, now + MAX_TURN));
                state.wake_first();
                return number;
            }
            let end = state.running.iter().map(|(_, end)| *end).min().unwrap_or(now + MAX_TURN);
            drop(state);
            thread::park_timeout(end - now);
            state = self.lock();
        }
    }

    /// Ends a turn, unless it has ended already.
    fn end(&self, number: u64) {
        let mut state = self.lock();
        state.running.retain(|(running, _)| *running != number);
        state.wake_first();
    }
}

/// The turn of the current thread. It ends with this value, or before.
pub(crate) struct StartTurn {
    /// Whether it is another value's, further up on the stack.
    is_nested: bool,
}

impl StartTurn {
    /// Waits for a turn. A thread that has one needs no other.
    pub(crate) fn take() -> Self {
        let is_nested = TURN.get().is_some();
        if !is_nested {
            TURN.set(Some(QUEUE.get().take()));
        }
        Self { is_nested }
    }

    /// Ends the turn of the current thread, if it has one: its guest waits.
    pub(crate) fn end() {
        if let Some(number) = TURN.take() {
            QUEUE.get().end(number);
        }
    }
}

impl Drop for StartTurn {
    fn drop(&mut self) {
        if !self.is_nested {
            Self::end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    /// Waits until `count` threads wait for a turn.
    fn await_waiting(queue: &StartQueue, count: usize) {
        while queue.lock().waiting.len() != count {
            thread::yield_now();
        }
    }

    #[test]
    fn turns_begin_in_the_order_of_their_requests() {
        let queue = Arc::new(StartQueue::new(1));
        let (send, begun) = channel();
        let first = queue.take();
        let far = Instant::now() + Duration::from_secs(3600);
        queue.lock().running[0].1 = far;
        let threads: Vec<_> = (0..8)
            .map(|place| {
                let (queue_of_thread, send) = (Arc::clone(&queue), send.clone());
                let thread = thread::spawn(move || {
                    let number = queue_of_thread.take();
                    send.send(place).unwrap();
                    queue_of_thread.end(number);
                });
                await_waiting(&queue, place + 1);
                thread
            })
            .collect();
        assert!(begun.try_recv().is_err(), "the first turn has not ended");
        queue.end(first);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(begun.try_iter().collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn there_are_so_many_turns_at_the_same_time_and_no_more() {
        let queue = Arc::new(StartQueue::new(3));
        let (present, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let threads: Vec<_> = (0..30)
            .map(|_| {
                let (queue, present, most) = (queue.clone(), present.clone(), most.clone());
                thread::spawn(move || {
                    let number = queue.take();
                    // A slow host must not end a turn.
                    let far = Instant::now() + Duration::from_secs(3600);
                    let mut state = queue.lock();
                    let turn = state.running.iter_mut().find(|(turn, _)| *turn == number);
                    let has_turn = turn.map(|turn| turn.1 = far).is_some();
                    drop(state);
                    if has_turn {
                        most.fetch_max(
                            present.fetch_add(1, Ordering::SeqCst) + 1,
                            Ordering::SeqCst,
                        );
                        thread::yield_now();
                        present.fetch_sub(1, Ordering::SeqCst);
                    }
                    queue.end(number);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
        assert!(queue.lock().running.is_empty() && queue.lock().waiting.is_empty());
    }

    #[test]
    fn a_turn_without_an_end_lets_others_begin() {
        let queue = StartQueue::new(1);
        let first = queue.take();
        let second = queue.take();
        queue.end(first);
        assert_eq!(queue.lock().running.iter().map(|turn| turn.0).collect::<Vec<_>>(), [second]);
    }

    #[test]
    fn a_thread_with_a_turn_takes_no_second_one() {
        let outer = StartTurn::take();
        let turn = TURN.get();
        assert!(turn.is_some());
        drop(StartTurn::take());
        assert_eq!(TURN.get(), turn, "the inner value ends nothing");
        StartTurn::end();
        assert_eq!(TURN.get(), None);
        drop(outer);
    }
}
