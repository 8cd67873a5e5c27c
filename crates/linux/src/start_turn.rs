//! Turns of new processes. Their first calls run one after another on each processor, when many
//! begin at the same time: between two threads that alternate on a processor, each system call of
//! a guest would find the caches of the other one.
//!
//! Promises: turns begin in the order of their requests. A turn ends when the guest waits, when its
//! call ends, or after [`MAX_TURN`]. A turn begins at the latest [`MAX_WAIT`] after its request,
//! whatever the calls before it do. A call that has had its turn is never held back again.

use std::cell::Cell;
use std::collections::VecDeque;
use std::num::NonZero;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use afresh_sys::PerProcess;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::limits::StopHandle;

/// Maximum length of a turn.
const MAX_TURN: Duration = Duration::from_millis(20);
/// Maximum wait for a turn. It is no time of the call, and other callers determine its length.
const MAX_WAIT: Duration = Duration::from_millis(100);

static QUEUE: PerProcess<StartQueue> =
    PerProcess::new(|| StartQueue::new(process_cpus(), MAX_WAIT));

thread_local! {
    /// The number of the turn that this thread has.
    static TURN: Cell<Option<u64>> = const { Cell::new(None) };
}

/// CPUs on which the threads of this process may run, as far as its control group allows. The
/// current thread may be pinned to one of them.
fn process_cpus() -> usize {
    let mut all = CpuSet::new();
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let ids = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
    for id in ids.filter_map(Pid::from_raw) {
        // A thread may have ended.
        let Ok(set) = sched_getaffinity(Some(id)) else { continue };
        (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).for_each(|cpu| all.set(cpu));
    }
    let count = move || {
        // Refused, it counts the CPUs of the current thread.
        let _ = sched_setaffinity(None, &all);
        thread::available_parallelism().map_or(1, NonZero::get)
    };
    let counter = thread::Builder::new().spawn(count).ok();
    counter.and_then(|counter| counter.join().ok()).unwrap_or(1)
}

/// Turns, and the threads that wait for one.
struct StartQueue {
    /// Turns at the same time.
    limit: usize,
    max_wait: Duration,
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
    fn new(limit: usize, max_wait: Duration) -> Self {
        Self { limit, max_wait, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn, and returns its number.
    fn take(&self) -> u64 {
        let latest = Instant::now() + self.max_wait;
        let mut state = self.lock();
        let number = state.requests;
        state.requests += 1;
        state.waiting.push_back((number, thread::current()));
        loop {
            // The others have requested later. The first one wakes them when its turn begins.
            if state.waiting.front().is_none_or(|(first, _)| *first != number) {
                drop(state);
                thread::park();
                state = self.lock();
                continue;
            }
            let now = Instant::now();
            state.running.retain(|(_, end)| *end > now);
            if state.running.len() < self.limit || now >= latest {
                state.waiting.pop_front();
                state.running.push((number, now + MAX_TURN));
                state.wake_first();
                return number;
            }
            let end = state.running.iter().map(|(_, end)| *end).min().unwrap_or(latest);
            drop(state);
            thread::park_timeout(end.min(latest) - now);
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
    /// Waits for a turn, unless the call is stopped already. A thread that has one needs no other.
    pub(crate) fn take(stop: Option<&StopHandle>) -> Self {
        let is_nested = TURN.get().is_some();
        if !is_nested && !stop.is_some_and(StopHandle::is_stopped) {
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

    const FAR: Duration = Duration::from_secs(3600);

    /// Waits until `count` threads wait for a turn.
    fn await_waiting(queue: &StartQueue, count: usize) {
        while queue.lock().waiting.len() != count {
            thread::yield_now();
        }
    }

    #[test]
    fn turns_begin_in_the_order_of_their_requests() {
        let queue = Arc::new(StartQueue::new(1, FAR));
        let (send, begun) = channel();
        let first = queue.take();
        let far = Instant::now() + FAR;
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
        let queue = Arc::new(StartQueue::new(3, FAR));
        let (present, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let threads: Vec<_> = (0..30)
            .map(|_| {
                let (queue, present, most) = (queue.clone(), present.clone(), most.clone());
                thread::spawn(move || {
                    let number = queue.take();
                    // A slow host must not end a turn.
                    let far = Instant::now() + FAR;
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
        let queue = StartQueue::new(1, FAR);
        let first = queue.take();
        let second = queue.take();
        queue.end(first);
        assert_eq!(queue.lock().running.iter().map(|turn| turn.0).collect::<Vec<_>>(), [second]);
    }

    #[test]
    fn a_call_begins_after_the_longest_wait_whatever_the_others_do() {
        let queue = Arc::new(StartQueue::new(1, Duration::from_millis(1)));
        let mut turns = Vec::new();
        for _ in 0..3 {
            turns.push(queue.take());
            queue.lock().running.iter_mut().for_each(|turn| turn.1 = Instant::now() + FAR);
        }
        let running = || queue.lock().running.iter().map(|turn| turn.0).collect::<Vec<_>>();
        assert_eq!(running(), turns, "the turns before have not ended");
        // Those that wait together begin too.
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let queue = queue.clone();
                thread::spawn(move || queue.take())
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(queue.lock().waiting.is_empty());
    }

    #[test]
    fn a_stopped_call_does_not_wait() {
        let stop = StopHandle::default();
        stop.stop();
        let turn = StartTurn::take(Some(&stop));
        assert_eq!(TURN.get(), None);
        drop(turn);
        drop(StartTurn::take(Some(&StopHandle::default())));
        assert_eq!(TURN.get(), None);
    }

    #[test]
    fn a_pinned_thread_counts_the_cpus_of_the_process() {
        let before = process_cpus();
        let pinned = thread::spawn(|| {
            let mut one = CpuSet::new();
            one.set(rustix::thread::sched_getcpu());
            sched_setaffinity(None, &one).unwrap();
            process_cpus()
        });
        assert_eq!(pinned.join().unwrap(), before);
    }

    #[test]
    fn a_thread_with_a_turn_takes_no_second_one() {
        let outer = StartTurn::take(None);
        let turn = TURN.get();
        assert!(turn.is_some());
        drop(StartTurn::take(None));
        assert_eq!(TURN.get(), turn, "the inner value ends nothing");
        StartTurn::end();
        assert_eq!(TURN.get(), None);
        drop(outer);
    }
}
