//! Tasks that wait for an item: woken one by one, in order, and without a runtime.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use afresh_pool::{LimitPolicy, Limits, NextItem, OwnedLease, Pool, PoolError, Recycle, ResetCost};

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
    let mut tasks = [Task::new(&pool), Task::new(&pool)];
    assert!(tasks.iter_mut().all(|task| !task.poll()));
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
    let mut tasks = [Task::new(&pool), Task::new(&pool)];
    assert!(tasks.iter_mut().all(|task| !task.poll()));
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
    let [mut first, mut second, mut third] = [0; 3].map(|_| Task::new(&pool));
    assert!(!first.poll() && !second.poll() && !third.poll());
    drop(second);
    drop(held);
    assert_eq!((first.wake_ups(), third.wake_ups()), (1, 0));
    drop(first);
    assert_eq!(third.wake_ups(), 1);
    assert!(third.poll());
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
