//! Tasks that wait for an item: woken one by one, in order, and without a runtime.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use afresh_pool::{LimitPolicy, Limits, NextItem, OwnedLease, Pool, PoolError, Recycle, ResetCost};

/// Maximum wait for an end that is due.
const END_TIMEOUT: Duration = Duration::from_secs(60);

struct Item;

impl Recycle for Item {
    type Error = Infallible;
    fn key(&self) -> usize {
        0
    }
    fn recycle(&mut self) -> Result<ResetCost, Infallible> {
        Ok(ResetCost::default())
    }
    fn resident_bytes(&self) -> usize {
        0
    }
    fn trim(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Counts its wake-ups.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A task that waits for an item of a pool, polled by hand.
struct Task {
    next: NextItem,
    bell: Arc<Bell>,
}

impl Task {
    fn new(pool: &Pool<Item>) -> Self {
        Self { next: pool.room(), bell: Arc::default() }
    }

    /// Whether it may look for an item.
    fn poll(&mut self) -> bool {
        let waker = Waker::from(Arc::clone(&self.bell));
        let waiting = pin!(self.next.wait());
        waiting.poll(&mut Context::from_waker(&waker)) == Poll::Ready(())
    }

    fn wake_ups(&self) -> usize {
        self.bell.0.load(Ordering::SeqCst)
    }
}

fn pool(items: usize) -> Pool<Item> {
    Pool::new(Limits { items, ..Limits::default() })
}

/// Tasks that wait for an item, in this order.
fn waiting<const N: usize>(pool: &Pool<Item>) -> [Task; N] {
    let mut tasks = std::array::from_fn(|_| Task::new(pool));
    assert!(tasks.iter_mut().all(|task| !task.poll()));
    tasks
}

fn take(pool: &Pool<Item>) -> Result<OwnedLease<Item>, PoolError<Infallible>> {
    pool.get_owned(0, LimitPolicy::Error, |_| Ok(Item))
}

#[test]
fn an_owned_lease_outlives_the_handle_of_its_pool_and_comes_back_from_another_thread() {
    let pool = pool(2);
    let (one, other) = (take(&pool).unwrap(), take(&pool).unwrap());
    assert!(matches!(take(&pool), Err(PoolError::Exhausted { limit: 2 })));
    std::thread::spawn(move || drop(one)).join().unwrap();
    let stats = pool.stats();
    assert_eq!((stats.idle, stats.in_use, stats.returned), (1, 1, 1));
    other.discard();
    assert_eq!(pool.stats().alive, 1);
    let last = take(&pool).unwrap();
    drop(pool);
    drop(last);
}

#[test]
fn an_item_that_comes_back_wakes_the_task_that_has_waited_longest() {
    let pool = pool(1);
    let held = take(&pool).unwrap();
    let mut tasks: [Task; 2] = waiting(&pool);
    // Without a signal another poll changes nothing.
    assert!(tasks.iter_mut().all(|task| !task.poll()));
    drop(held);
    assert_eq!(tasks.each_ref().map(Task::wake_ups), [1, 0]);
    assert!(tasks[0].poll());
    let held = take(&pool).unwrap();
    assert!(!tasks[1].poll());
    drop(held);
    assert_eq!(tasks[1].wake_ups(), 1);
    assert!(tasks[1].poll() && take(&pool).is_ok());
}

#[test]
fn a_task_that_was_woken_too_late_keeps_its_place() {
    let pool = pool(1);
    let held = take(&pool).unwrap();
    let mut tasks: [Task; 2] = waiting(&pool);
    drop(held);
    // A thread is faster.
    let held = take(&pool).unwrap();
    assert!(tasks[0].poll() && take(&pool).is_err());
    assert!(!tasks[0].poll());
    drop(held);
    assert_eq!(tasks.each_ref().map(Task::wake_ups), [2, 0]);
}

#[test]
fn a_task_that_is_dropped_after_its_wake_up_wakes_the_next_one() {
    let pool = pool(1);
    let held = take(&pool).unwrap();
    let [first, second, mut third] = waiting(&pool);
    drop(second);
    drop(held);
    assert_eq!((first.wake_ups(), third.wake_ups()), (1, 0));
    drop(first);
    assert_eq!(third.wake_ups(), 1);
    assert!(third.poll());
}

#[test]
fn a_task_that_is_dropped_between_its_turn_and_its_attempt_wakes_the_next_one() {
    let pool = pool(1);
    let held = take(&pool).unwrap();
    let [mut first, mut second] = waiting(&pool);
    drop(held);
    assert!(first.poll());
    assert_eq!(second.wake_ups(), 0);
    drop(first);
    assert_eq!(second.wake_ups(), 1);
    assert!(second.poll() && take(&pool).is_ok());
}

#[test]
fn a_task_that_has_its_item_wakes_no_other_one() {
    let pool = pool(1);
    let held = take(&pool).unwrap();
    let [mut first, second] = waiting(&pool);
    drop(held);
    assert!(first.poll());
    let held = take(&pool).unwrap();
    drop(first);
    assert_eq!(second.wake_ups(), 0);
    drop(held);
    assert_eq!(second.wake_ups(), 1);
}

#[test]
fn a_task_that_found_its_item_by_itself_swallows_no_signal() {
    let pool = pool(3);
    let [one, other, third] = [0; 3].map(|_| take(&pool).unwrap());
    let mut tasks: [Task; 3] = waiting(&pool);
    drop(one);
    // It was not woken, and is faster than the task in front. It keeps its wait.
    assert!(tasks[1].poll());
    let one = take(&pool).unwrap();
    assert!(tasks[0].poll() && take(&pool).is_err() && !tasks[0].poll());
    drop(other);
    drop(third);
    assert_eq!(tasks.each_ref().map(Task::wake_ups), [2, 0, 1]);
    drop(one);
}

#[test]
fn a_task_that_looked_in_vain_keeps_its_place() {
    let pool = pool(1);
    let held = take(&pool).unwrap();
    let mut tasks: [Task; 3] = waiting(&pool);
    drop(held);
    assert!(tasks[2].poll() && tasks[1].poll());
    // A thread is faster than all of them.
    let held = take(&pool).unwrap();
    assert!(tasks.iter_mut().rev().all(|task| !task.poll() || !task.poll()));
    drop(held);
    assert_eq!(tasks.each_ref().map(Task::wake_ups), [2, 0, 0]);
}

/// Gives an item back when the last waker of its task is dropped.
struct LastWaker {
    pool: Arc<Pool<Item>>,
    item: Mutex<Option<OwnedLease<Item>>>,
}

impl Wake for LastWaker {
    fn wake(self: Arc<Self>) {}
}

impl Drop for LastWaker {
    fn drop(&mut self) {
        drop(self.item.get_mut().unwrap().take());
        assert!(self.pool.stats().idle > 0);
    }
}

/// Polls a task's wait with a waker that is dropped with the last reference of the queue.
fn poll_with_last_waker(pool: &Arc<Pool<Item>>, next: &mut NextItem, item: OwnedLease<Item>) {
    let (pool, item) = (Arc::clone(pool), Mutex::new(Some(item)));
    let waker = Waker::from(Arc::new(LastWaker { pool, item }));
    let waiting = pin!(next.wait());
    assert!(waiting.poll(&mut Context::from_waker(&waker)).is_pending());
}

#[test]
fn a_waker_that_uses_the_pool_when_it_is_dropped_does_not_block() {
    let (done, end) = std::sync::mpsc::channel();
    // In another thread: the fault would be a lock that is never released.
    std::thread::spawn(move || {
        let pool = Arc::new(pool(3));
        let [one, other, third] = [0; 3].map(|_| take(&pool).unwrap());
        let mut waiting = Task::new(&pool);
        assert!(!waiting.poll());

        let mut next = pool.room();
        poll_with_last_waker(&pool, &mut next, one);
        // Another waker takes the place of the first one, which gives its item back: that wakes
        // the task in front.
        assert!(pin!(next.wait()).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(waiting.wake_ups(), 1);
        let one = take(&pool).unwrap();
        assert!(waiting.poll() && !waiting.poll());

        // The wait ends with its waker in the queue.
        let mut leaving = pool.room();
        poll_with_last_waker(&pool, &mut leaving, other);
        drop(leaving);
        assert_eq!(waiting.wake_ups(), 2);
        let other = take(&pool).unwrap();
        assert!(waiting.poll() && !waiting.poll());

        // An item is there at the next poll.
        let mut looking = pool.room();
        poll_with_last_waker(&pool, &mut looking, third);
        drop(one);
        assert!(pin!(looking.wait()).poll(&mut Context::from_waker(Waker::noop())).is_ready());
        drop((waiting, next, looking, other));
        done.send(()).unwrap();
    });
    end.recv_timeout(END_TIMEOUT).expect("a waker was dropped under the lock of the queue");
}

#[test]
fn a_failed_maker_wakes_the_next_task() {
    let pool = pool(1);
    let mut task = Task::new(&pool);
    let failed = pool.get_owned(0, LimitPolicy::Error, |_| {
        assert!(!task.poll());
        Err("no")
    });
    assert!(matches!(failed, Err(PoolError::Create("no"))));
    assert_eq!(task.wake_ups(), 1);
    assert!(task.poll());
}
