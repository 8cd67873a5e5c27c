//! The promises of a pool: affinity, limits, waiting, budgets, and that no broken item is returned.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use afresh_pool::{Lease, LimitPolicy, Limits, Pool, PoolError, Recycle, ResetCost};
use afresh_sys::planted::{self, Bug};

/// Counts its resets and breaks on demand.
struct Item {
    key: usize,
    clean: bool,
    broken: bool,
    panics: bool,
    bytes: usize,
}

impl Recycle for Item {
    type Error = &'static str;
    fn key(&self) -> usize {
        self.key
    }
    fn recycle(&mut self) -> Result<ResetCost, Self::Error> {
        assert!(!self.panics, "a bug in recycling");
        self.clean = true;
        let took = ResetCost { pages: self.bytes, grown: self.bytes > 4, ..ResetCost::default() };
        if self.broken { Err("broken") } else { Ok(took) }
    }
    fn reason(error: &Self::Error) -> &'static str {
        error
    }
    fn resident_bytes(&self) -> usize {
        self.bytes
    }
    fn trim(&mut self) -> Result<(), Self::Error> {
        self.bytes = 0;
        Ok(())
    }
}

type Never = std::convert::Infallible;

fn item(key: usize) -> impl FnOnce(Option<Item>) -> Result<Item, Never> {
    move |_| Ok(Item { key, clean: true, broken: false, panics: false, bytes: 0 })
}

#[test]
fn an_item_comes_back_clean_and_to_its_key() {
    let pool = Pool::new(Limits::default());
    for key in [1, 2, 1, 2, 1] {
        let mut lease = pool.get(key, item(key)).unwrap();
        assert!(lease.clean && lease.key == key);
        lease.clean = false;
    }
    assert_eq!(pool.stats().created, 2);
    assert_eq!(pool.stats().returned, 5);
    assert_eq!(pool.stats().idle, 2);
}

#[test]
fn items_are_added_below_the_limit_and_taken_out() {
    let pool = Pool::new(Limits { items: 2, ..Limits::default() });
    assert!(pool.remove(1).is_none());
    let add = |bytes| pool.insert(|| Ok::<_, Never>(Item { bytes, ..item(1)(None).unwrap() }));
    add(3).unwrap();
    add(4).unwrap();
    assert!(matches!(add(5), Err(PoolError::Exhausted { limit: 2 })));
    let stats = pool.stats();
    assert_eq!((stats.alive, stats.idle, stats.resident_bytes), (2, 2, 7));
    assert!(pool.remove(2).is_none());
    let taken = pool.remove(1).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.alive, stats.idle, stats.resident_bytes), (1, 1, 7 - taken.bytes));
    // Its place is free. A leased item cannot be taken out.
    add(0).unwrap();
    let leased = [pool.get(1, item(1)).unwrap(), pool.get(1, item(1)).unwrap()];
    assert!(pool.remove(1).is_none());
    drop(leased);
    pool.remove(1).unwrap();
    // One that is not made, or not clean, takes no place.
    assert!(pool.insert(|| Err::<Item, _>("no")).is_err());
    pool.insert(|| Ok::<_, Never>(Item { broken: true, ..item(1)(None).unwrap() })).unwrap();
    assert_eq!((pool.stats().alive, pool.stats().quarantined), (1, 1));
}

#[test]
fn resets_of_dropped_items_stay_counted() {
    let pool = Pool::new(Limits::default());
    for bytes in [0, 1, 4, 5, 100_000] {
        pool.get(1, item(1)).unwrap().bytes = bytes;
    }
    pool.clear(None);
    pool.get(1, item(1)).unwrap().bytes = 4;
    let stats = pool.stats();
    assert_eq!(stats.resets.by_pages, [1, 1, 2, 1, 0, 0, 0, 0, 0, 1]);
    assert_eq!((stats.resets.pages, stats.resets.grown), (100_014, 2));
    assert_eq!((stats.returned, stats.resets.count()), (6, 6));
}

#[test]
fn a_broken_item_and_one_whose_user_panicked_are_never_handed_out() {
    let pool = Pool::new(Limits { items: 1, ..Limits::default() });
    pool.get(1, item(1)).unwrap().broken = true;
    assert!(!pool.get(1, item(1)).unwrap().broken);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut lease = pool.get(1, item(1)).unwrap();
        lease.broken = true;
        panic!("a host function");
    }));
    assert!(panicked.is_err());
    assert!(!pool.get(1, item(1)).unwrap().broken);
    let stats = pool.stats();
    assert_eq!((stats.quarantined, stats.abandoned, stats.alive), (1, 1, 1));
    assert_eq!(stats.quarantines, [("broken", 1)].into());
    assert_eq!(stats.last_failure.as_deref(), Some("broken"));
}

#[test]
fn an_item_whose_recycling_panics_leaves_its_place() {
    let pool = Pool::new(Limits { items: 1, ..Limits::default() });
    for round in 1..=3 {
        let mut lease = pool.get(1, item(1)).unwrap();
        (lease.panics, lease.bytes) = (true, 7);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(lease)));
        assert!(panicked.is_err());
        let stats = pool.stats();
        assert_eq!((stats.quarantined, stats.alive, stats.resident_bytes), (round, 0, 0));
        assert_eq!(stats.quarantines, [("panic", round)].into());
    }
    assert!(!pool.get(1, item(1)).unwrap().panics);
}

#[test]
fn a_wait_may_have_no_end() {
    let exhausted = LimitPolicy::Wait(Duration::MAX);
    let pool = Pool::new(Limits { items: 1, exhausted, ..Limits::default() });
    let held = pool.get(1, item(1)).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.get(1, item(1)).map(|lease| lease.key).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
        assert_eq!(waiter.join().unwrap(), 1);
    });
}

#[test]
fn at_the_limit_the_caller_chooses_error_wait_or_one_on_demand() {
    let limits = |exhausted| Limits { items: 1, exhausted, ..Limits::default() };
    let pool = Pool::new(limits(LimitPolicy::Error));
    let held = pool.get(1, item(1)).unwrap();
    assert!(matches!(pool.get(1, item(1)), Err(PoolError::Exhausted { limit: 1 })));
    drop(held);

    let pool = Pool::new(limits(LimitPolicy::OnDemand));
    let held = pool.get(1, item(1)).unwrap();
    drop(pool.get(1, item(1)).unwrap());
    drop(held);
    let stats = pool.stats();
    assert_eq!((stats.on_demand, stats.alive, stats.idle), (1, 1, 1));

    let pool = Pool::new(limits(LimitPolicy::Wait(Duration::from_millis(20))));
    let held = pool.get(1, item(1)).unwrap();
    assert!(matches!(pool.get(1, item(1)), Err(PoolError::TimedOut(_))));
    drop(held);

    let pool = Pool::new(limits(LimitPolicy::Wait(Duration::from_secs(20))));
    let held = pool.get(1, item(1)).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.get(1, item(1)).map(|lease| lease.key).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
        assert_eq!(waiter.join().unwrap(), 1);
    });
}

#[test]
fn at_the_limit_an_idle_item_of_another_key_makes_room() {
    let pool = Pool::new(Limits { items: 1, ..Limits::default() });
    drop(pool.get(1, item(1)).unwrap());
    let lease = pool
        .get(2, |other: Option<Item>| {
            assert_eq!(other.as_ref().unwrap().key, 1);
            item(2)(other)
        })
        .unwrap();
    assert_eq!(lease.key, 2);
    assert_eq!(pool.stats().alive, 1);
}

#[test]
fn idle_memory_stays_within_the_budget_and_old_idle_memory_is_given_back() {
    let pool = Pool::new(Limits { resident_bytes: 100, ..Limits::default() });
    let mut leases: Vec<_> = (0..4).map(|_| pool.get(1, item(1)).unwrap()).collect();
    for lease in &mut leases {
        lease.bytes = 40;
    }
    drop(leases);
    let stats = pool.stats();
    assert_eq!((stats.resident_bytes, stats.trimmed, stats.idle), (80, 2, 4));
    assert_eq!(pool.trim_idle(2), 0);
    assert_eq!(pool.trim_idle(2), 2);
    assert_eq!(pool.stats().resident_bytes, 0);
    pool.clear(Some(1));
    assert_eq!(pool.stats().alive, 0);
}

#[test]
fn a_failing_maker_gives_its_place_back() {
    let pool: Pool<Item> = Pool::new(Limits { items: 1, ..Limits::default() });
    for _ in 0..3 {
        assert!(matches!(pool.get(1, |_| Err("no")), Err(PoolError::Create("no"))));
    }
    assert_eq!(pool.stats().alive, 0);
    assert!(pool.get(1, item(1)).is_ok());
}

#[test]
fn under_many_threads_no_item_has_two_users_and_the_books_balance() {
    let limits = Limits {
        items: 5,
        exhausted: LimitPolicy::Wait(Duration::from_secs(60)),
        ..Limits::default()
    };
    let pool = Pool::new(limits);
    let users: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
    std::thread::scope(|scope| {
        for t in 0..16usize {
            let (pool, users) = (&pool, &users);
            scope.spawn(move || {
                for n in 0..500 {
                    let key = (t + n) % 3;
                    let mut lease = pool.get(key, item(key)).unwrap();
                    assert!(std::mem::replace(&mut lease.clean, false), "two users, or not reset");
                    assert!(users[key].fetch_add(1, Ordering::SeqCst) < 5);
                    std::hint::black_box(&lease);
                    users[key].fetch_sub(1, Ordering::SeqCst);
                }
            });
        }
    });
    let stats = pool.stats();
    assert_eq!(stats.returned, 16 * 500);
    assert_eq!((stats.idle, stats.in_use), (stats.alive, 0));
    assert!(stats.alive <= 5);
}

#[test]
fn a_child_of_a_fork_is_handed_nothing_that_its_parent_made() {
    let pool = Pool::new(Limits { items: 4, ..Limits::default() });
    let leases: Vec<_> = (0..3).map(|key| pool.get(key, item(key)).unwrap()).collect();
    drop(leases);
    let held = pool.get(9, item(9)).unwrap();
    // SAFETY: the child uses this pool, which no other thread has, and the allocator; it ends
    // without destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(60) };
        let mut made = 0;
        for key in 0..3 {
            let lease = pool.get(key, |other| {
                assert!(other.is_none(), "not even to be turned into something else");
                made += 1;
                item(key)(None)
            });
            drop(lease.unwrap());
        }
        drop(held);
        let stats = pool.stats();
        let good = made == 3 && (stats.alive, stats.idle, stats.in_use) == (3, 3, 0);
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    drop(held);
    assert_eq!(pool.stats().idle, 4);
}

#[test]
fn planted_bugs_are_caught() {
    let broken = ["a_broken_item_and_one_whose_user_panicked_are_never_handed_out"];
    planted::must_be_caught(&[Bug::Unclean, Bug::Unwound], &broken);
    planted::must_be_caught(&[Bug::Key], &["an_item_comes_back_clean_and_to_its_key"]);
    let fork = ["a_child_of_a_fork_is_handed_nothing_that_its_parent_made"];
    planted::must_be_caught(&[Bug::Parents], &fork);
}

/// An item that looks at its pool while it is dropped.
struct Witness {
    number: usize,
    dropped: mpsc::Sender<(usize, usize)>,
    pool: Arc<OnceLock<Pool<Witness>>>,
}

impl Recycle for Witness {
    type Error = &'static str;
    fn key(&self) -> usize {
        1
    }
    fn recycle(&mut self) -> Result<ResetCost, Self::Error> {
        Ok(ResetCost::default())
    }
    fn reason(error: &Self::Error) -> &'static str {
        error
    }
    fn resident_bytes(&self) -> usize {
        0
    }
    fn trim(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        let Some(pool) = self.pool.get() else { return };
        let _ = self.dropped.send((self.number, pool.stats().idle));
    }
}

#[test]
fn a_pool_that_is_cleared_has_items_for_calls_until_its_last_batch() {
    const COUNT: usize = 100;
    let place = Arc::new(OnceLock::new());
    let (dropped, seen) = mpsc::channel();
    let pool = place.get_or_init(|| Pool::new(Limits { items: COUNT, ..Limits::default() }));
    let leases: Vec<_> = (0..COUNT)
        .map(|number| {
            let (dropped, pool) = (dropped.clone(), place.clone());
            pool_item(place.get().unwrap(), Witness { number, dropped, pool })
        })
        .collect();
    // Another pool advances the clock, so that the items have been idle for different times.
    let other = Pool::new(Limits::default());
    for lease in leases {
        drop(lease);
        other.clear(None);
        drop(other.get(1, item(1)).unwrap());
    }
    pool.clear(Some(1));
    let seen: Vec<_> = seen.try_iter().collect();
    assert_eq!((seen.len(), pool.stats().alive), (COUNT, 0));
    // Idle items were there while the others were dropped, but for the last batch.
    assert!(seen[0].1 >= COUNT / 2, "{seen:?}");
    assert_eq!(seen.iter().filter(|(_, idle)| *idle == 0).count(), COUNT % 16);
    // Those that had been idle longest went first.
    assert!(seen[..16].iter().all(|(number, _)| *number < 16), "{seen:?}");
}

fn pool_item(pool: &Pool<Witness>, witness: Witness) -> Lease<'_, Witness> {
    pool.get(1, |_| Ok::<_, Never>(witness)).unwrap()
}
