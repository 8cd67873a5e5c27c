//! One budget over all pools of the process: the longest idle item is dropped first, an item in use
//! never.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use afresh_pool::{Budget, Lease, Limits, Pool, ProcessLimits, Recycle, ResetCost};

struct Item {
    name: usize,
    bytes: usize,
    /// Memory that it keeps after it is returned.
    keeps: usize,
}

impl Recycle for Item {
    type Error = &'static str;
    fn key(&self) -> usize {
        0
    }
    fn recycle(&mut self) -> Result<ResetCost, Self::Error> {
        self.bytes = self.keeps;
        Ok(ResetCost::default())
    }
    fn resident_bytes(&self) -> usize {
        self.bytes
    }
    fn mappings(&self) -> usize {
        5
    }
    fn trim(&mut self) -> Result<(), Self::Error> {
        self.bytes = 0;
        Ok(())
    }
}

type Never = std::convert::Infallible;

fn get(pool: &Pool<Item>, name: usize) -> Lease<'_, Item> {
    pool.get(0, |_| Ok::<_, Never>(Item { name, bytes: 0, keeps: 0 })).unwrap()
}

/// Limits under which no thread evicts or trims idle items.
fn limits() -> ProcessLimits {
    ProcessLimits { idle: None, pressure: None, ..ProcessLimits::default() }
}

/// The budget is the process's, so one test at a time uses it.
fn alone() -> MutexGuard<'static, ()> {
    static TESTS: Mutex<()> = Mutex::new(());
    let guard = TESTS.lock().unwrap_or_else(PoisonError::into_inner);
    Budget::process().set(limits());
    empty();
    guard
}

/// The accounts are empty after the thread that evicts idle items has dropped its references.
fn empty() {
    let since = Instant::now();
    loop {
        let usage = Budget::process().usage();
        if (usage.items, usage.resident_bytes, usage.mappings) == (0, 0, 0) {
            break;
        }
        assert!(since.elapsed() < Duration::from_secs(60), "{usage:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn pools(count: usize) -> Vec<Pool<Item>> {
    (0..count).map(|_| Pool::new(Limits::default())).collect()
}

#[test]
fn memory_kept_by_pools_is_counted_and_released_with_them() {
    let _alone = alone();
    let budget = Budget::process();
    let pools = pools(3);
    let mut held = get(&pools[0], 0);
    held.keeps = 100;
    get(&pools[1], 1).keeps = 10;
    let usage = budget.usage();
    assert_eq!((usage.items, usage.resident_bytes, usage.mappings), (2, 10, 10));
    drop(held);
    get(&pools[0], 0).keeps = 30;
    assert_eq!(budget.usage().resident_bytes, 40);
    let code = budget.hold(7);
    assert_eq!(budget.usage().mappings, 17);
    drop((code, pools));
    empty();
}

#[test]
fn of_many_idle_items_those_idle_longest_go_and_those_in_use_stay() {
    let _alone = alone();
    let budget = Budget::process();
    budget.set(ProcessLimits { mappings: 5 * 64, ..limits() });
    let pools = pools(200);
    let held: Vec<_> = pools[..20].iter().map(|pool| get(pool, 0)).collect();
    for (name, pool) in pools.iter().enumerate().skip(20) {
        drop(get(pool, name));
        assert!(budget.usage().mappings <= 5 * 64, "{:?} after {name}", budget.usage());
    }
    assert!(budget.usage().items > 50, "{:?}: more went than had to", budget.usage());
    let there = |pool: &Pool<Item>| pool.stats().alive == 1;
    assert!(pools[..20].iter().all(there), "an item in use went");
    let first = pools.iter().skip(20).position(there).unwrap() + 20;
    assert!(pools[first..].iter().all(there), "a younger one went before an older one");
    // An item that went is made anew, under its own name.
    assert_eq!(get(&pools[21], 21).name, 21);
    assert_eq!(held.len(), 20);
}

#[test]
fn memory_that_items_come_back_with_counts_too() {
    let _alone = alone();
    let budget = Budget::process();
    budget.set(ProcessLimits { resident_bytes: 1000, ..limits() });
    let pools = pools(30);
    for pool in &pools {
        get(pool, 0).keeps = 100;
        assert!(budget.usage().resident_bytes <= 1000, "{:?}", budget.usage());
    }
    assert!(budget.usage().items >= 5, "{:?}", budget.usage());
    budget.set(ProcessLimits { items: 3, ..limits() });
    assert!(budget.usage().items <= 3, "{:?}", budget.usage());
}

#[test]
fn after_a_burst_all_but_one_of_a_pool_go() {
    let _alone = alone();
    let idle = Some(Duration::from_millis(30));
    Budget::process().set(ProcessLimits { idle, ..limits() });
    let pools = pools(2);
    let burst: Vec<_> = (0..50).map(|name| get(&pools[0], name)).collect();
    let kept = get(&pools[1], 0);
    drop(burst);
    let since = Instant::now();
    while pools[0].stats().alive > 1 {
        assert!(since.elapsed() < Duration::from_secs(60), "{:?}", pools[0].stats());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(pools[0].stats().idle, 1);
    assert_eq!(pools[1].stats().alive, 1);
    drop(kept);
}

/// An item whose code panics when it is dropped.
struct FragileItem;

impl Drop for FragileItem {
    fn drop(&mut self) {
        panic!("an item that panics when it is dropped");
    }
}

impl Recycle for FragileItem {
    type Error = Never;
    fn key(&self) -> usize {
        0
    }
    fn recycle(&mut self) -> Result<ResetCost, Never> {
        Ok(ResetCost::default())
    }
    fn resident_bytes(&self) -> usize {
        0
    }
    fn trim(&mut self) -> Result<(), Never> {
        Ok(())
    }
}

#[test]
fn items_that_panic_keep_no_others_from_being_dropped() {
    let _alone = alone();
    let idle = Some(Duration::from_millis(30));
    Budget::process().set(ProcessLimits { idle, ..limits() });
    let fragile = Pool::new(Limits::default());
    let burst: Vec<_> = (0..4).map(|_| fragile.get(0, |_| Ok::<_, Never>(FragileItem))).collect();
    drop(burst);
    let since = Instant::now();
    while fragile.stats().alive > 1 {
        assert!(since.elapsed() < Duration::from_secs(60), "{:?}", fragile.stats());
        std::thread::sleep(Duration::from_millis(10));
    }
    let pools = pools(1);
    let burst: Vec<_> = (0..4).map(|name| get(&pools[0], name)).collect();
    drop(burst);
    while pools[0].stats().alive > 1 {
        assert!(since.elapsed() < Duration::from_secs(60), "{:?}", pools[0].stats());
        std::thread::sleep(Duration::from_millis(10));
    }
    let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(fragile)));
    // The thread that evicts items may have had the last reference.
    drop(dropped);
    Budget::process().set(limits());
    drop(pools);
    empty();
}

#[test]
fn under_memory_pressure_idle_items_give_memory_back_and_stay() {
    let _alone = alone();
    if afresh_sys::host::memory_stalls().is_none() {
        println!("SKIPPED: this kernel does not report memory pressure");
        return;
    }
    let budget = Budget::process();
    let before = budget.usage();
    let pools = pools(3);
    for pool in &pools {
        let burst: Vec<_> = (0..4).map(|name| get(pool, name)).collect();
        burst.into_iter().for_each(|mut lease| lease.keeps = 1000);
    }
    let mut held = get(&pools[0], 0);
    held.bytes = 500;
    assert!(budget.usage().resident_bytes >= 11_000);
    // Any pressure is at least that.
    budget.set(ProcessLimits { pressure: Some(0), ..limits() });
    let since = Instant::now();
    // An item that is in use keeps its place in the accounts.
    while budget.usage().resident_bytes > 1000 {
        assert!(since.elapsed() < Duration::from_secs(120), "{:?}", budget.usage());
        std::thread::sleep(Duration::from_millis(10));
    }
    let usage = budget.usage();
    assert_eq!((usage.evicted, usage.relieved), (before.evicted, before.relieved + 11));
    assert_eq!(held.bytes, 500);
    for pool in &pools {
        assert_eq!((pool.stats().alive, pool.stats().created), (4, 4));
    }
    budget.set(limits());
    drop(held);
    drop(pools);
    empty();
}

#[test]
fn many_threads_over_many_pools_keep_the_books_right() {
    let _alone = alone();
    let budget = Budget::process();
    budget.set(ProcessLimits { items: 40, resident_bytes: 3000, ..limits() });
    let pools = pools(60);
    std::thread::scope(|scope| {
        for t in 0..8 {
            let pools = &pools;
            scope.spawn(move || {
                for i in 0..2000 {
                    let mut lease = get(&pools[(i * 7 + t * 13) % pools.len()], t);
                    lease.keeps = (i * 31 + t) % 200;
                }
            });
        }
    });
    let usage = budget.usage();
    assert!(usage.evicted > 0);
    assert!(pools.iter().map(|p| p.stats().evicted).sum::<u64>() > 0);
    assert_eq!(usage.items, pools.iter().map(|p| p.stats().alive).sum::<usize>());
    assert_eq!(usage.resident_bytes, pools.iter().map(|p| p.stats().resident_bytes).sum::<usize>());
    drop(pools);
    empty();
}
