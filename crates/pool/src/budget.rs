//! One budget for everything that the pools of this process keep.
//!
//! Each pool keeps to its own [`crate::Limits`]. The bounds here apply to the whole process, over
//! all pools: items, the memory they keep, and mappings (the kernel allows a process 65,530 by
//! default). Where a bound is exceeded, the items that have been idle longest are evicted, from any
//! pool; one in use never is. Items that have been idle for some time are evicted even within the
//! bounds, except one per pool. Under memory pressure idle items give their memory back and stay:
//! half of it at each look, those first that have been idle longest.
//!
//! Promises: after an item was made, and after one came back with more memory than before, the
//! bounds are kept again, unless the excess is in use. Handing an item out and taking it back costs
//! nothing more for it. May break it: items that understate their sizes.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use afresh_sys::{InheritedCell, InheritedMutex, InheritedMutexGuard, fork};

use crate::pressure::PressureGauge;
use crate::shared_cache::{SharedCache, SharedCaches};

/// Stands for the absence of a limit to the pressure: no percentage.
const NO_PRESSURE: u8 = u8::MAX;

/// The limits of all pools of the process together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessLimits {
    /// Maximum live items.
    pub items: usize,
    /// Maximum bytes of private memory that idle items keep.
    pub resident_bytes: usize,
    /// Maximum mappings.
    pub mappings: usize,
    /// Time for which an item may be idle while its pool has another one; in effect up to twice
    /// that.
    pub idle: Option<Duration>,
    /// The memory pressure from which on idle items give memory back: percent of a second in which
    /// some task of the control group waited for memory (PSI), or of the host where the group has
    /// no count. The percentage has no effect where the kernel has no PSI (without `CONFIG_PSI`, or
    /// booted with `psi=0`); `afresh doctor` shows the source. With a limit, idle items also give
    /// memory back while the group or the host has less than a sixteenth of its memory left, or
    /// soon will have. Caches release unused entries then ([`Budget::relieve_cache`]).
    pub pressure: Option<u8>,
}

impl Default for ProcessLimits {
    /// As many items and bytes as there may be, three quarters of the mappings that the kernel
    /// allows the process, half a minute, and 20 percent.
    fn default() -> Self {
        Self {
            items: usize::MAX,
            resident_bytes: usize::MAX,
            mappings: afresh_sys::host::max_mappings() / 4 * 3,
            idle: Some(Duration::from_secs(30)),
            pressure: Some(20),
        }
    }
}

/// The usage of all pools together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Items alive, idle and in use.
    pub items: usize,
    /// Bytes of private memory that idle items keep, and those that [`MappingCharge`] values count.
    pub resident_bytes: usize,
    /// Mappings of items, and others that [`Budget::hold`] counts.
    pub mappings: usize,
    /// Items that went to keep the bounds, or because they had been idle.
    pub evicted: u64,
    /// Times that an idle item gave memory back under memory pressure.
    pub relieved: u64,
    /// Bytes of the caches that [`Budget::relieve_cache`] names.
    pub cache_bytes: usize,
    /// Bytes that these caches have released under memory pressure.
    pub released_cache_bytes: u64,
}

/// Amounts that items take: counted up and down, and requested.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Room {
    pub(crate) items: usize,
    pub(crate) bytes: usize,
    pub(crate) mappings: usize,
}

impl Room {
    pub(crate) fn covers(&self, wanted: &Room) -> bool {
        self.items >= wanted.items && self.bytes >= wanted.bytes && self.mappings >= wanted.mappings
    }

    pub(crate) fn add(&mut self, other: &Room) {
        self.items += other.items;
        self.bytes += other.bytes;
        self.mappings += other.mappings;
    }
}

/// A pool, as the budget sees it.
pub(crate) trait Evict: Send + Sync {
    /// Enters the sizes of idle items, by the time of their return.
    fn ages(&self, ages: &mut BTreeMap<u64, Room>);

    /// Drops idle items that came back at `until` or before, until `freed` covers `wanted` or the
    /// pool has at most `keep` items. Returns how many went.
    fn evict(&self, until: u64, keep: usize, wanted: &Room, freed: &mut Room) -> u64;

    /// Trims idle items that came back at `until` or before, until they have given `wanted` bytes
    /// back. Returns how many were trimmed, and how many bytes they had.
    fn relieve(&self, until: u64, wanted: usize) -> (u64, usize);
}

/// The budget of a process.
#[derive(Debug)]
pub struct Budget {
    max_items: AtomicUsize,
    max_bytes: AtomicUsize,
    max_mappings: AtomicUsize,
    /// Milliseconds; 0 for no limit.
    idle: AtomicU64,
    /// Percent, or [`NO_PRESSURE`] for no limit.
    pressure: AtomicU8,
    items: AtomicUsize,
    bytes: AtomicUsize,
    mappings: AtomicUsize,
    evicted: AtomicU64,
    relieved: AtomicU64,
    /// Advances with each item made and with each look at idle ones: when items came back, in
    /// order.
    clock: AtomicU64,
    pools: InheritedMutex<Vec<PoolHandle>>,
    caches: SharedCaches,
    released_cache_bytes: AtomicU64,
    /// The process in which the keeper runs: its generation and one, or 0 for none.
    keeper: AtomicU32,
}

struct PoolHandle(Weak<dyn Evict>);

impl std::fmt::Debug for PoolHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PoolHandle")
    }
}

impl Budget {
    fn new() -> Self {
        let this = Self {
            max_items: AtomicUsize::new(0),
            max_bytes: AtomicUsize::new(0),
            max_mappings: AtomicUsize::new(0),
            idle: AtomicU64::new(0),
            pressure: AtomicU8::new(NO_PRESSURE),
            items: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            mappings: AtomicUsize::new(0),
            evicted: AtomicU64::new(0),
            relieved: AtomicU64::new(0),
            clock: AtomicU64::new(1),
            pools: InheritedMutex::new(Vec::new()),
            caches: SharedCaches::new(),
            released_cache_bytes: AtomicU64::new(0),
            keeper: AtomicU32::new(0),
        };
        this.store(ProcessLimits::default());
        this
    }

    /// The budget of this process. A forked child continues with a copy: it has the same pools, and
    /// its own accounts.
    #[must_use]
    pub fn process() -> &'static Self {
        static PROCESS: InheritedCell<Budget> = InheritedCell::new();
        PROCESS.get_or_make(Budget::new)
    }

    fn store(&self, bounds: ProcessLimits) {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
        self.max_items.store(bounds.items, Ordering::Relaxed);
        self.max_bytes.store(bounds.resident_bytes, Ordering::Relaxed);
        self.max_mappings.store(bounds.mappings, Ordering::Relaxed);
        self.idle.store(bounds.idle.map_or(0, millis), Ordering::Relaxed);
        let percent = bounds.pressure.map_or(NO_PRESSURE, |percent| percent.min(100));
        self.pressure.store(percent, Ordering::Relaxed);
    }

    /// Changes the bounds, and keeps them at once.
    pub fn set(&'static self, bounds: ProcessLimits) {
        self.store(bounds);
        self.keep();
        self.wake_keeper();
    }

    /// The bounds.
    #[must_use]
    pub fn bounds(&self) -> ProcessLimits {
        let idle = self.idle.load(Ordering::Relaxed);
        ProcessLimits {
            items: self.max_items.load(Ordering::Relaxed),
            resident_bytes: self.max_bytes.load(Ordering::Relaxed),
            mappings: self.max_mappings.load(Ordering::Relaxed),
            idle: (idle > 0).then(|| Duration::from_millis(idle)),
            pressure: self.pressure_limit(),
        }
    }

    fn pressure_limit(&self) -> Option<u8> {
        Some(self.pressure.load(Ordering::Relaxed)).filter(|percent| *percent != NO_PRESSURE)
    }

    /// The present usage.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            items: self.items.load(Ordering::Relaxed),
            resident_bytes: self.bytes.load(Ordering::Relaxed),
            mappings: self.mappings.load(Ordering::Relaxed),
            evicted: self.evicted.load(Ordering::Relaxed),
            relieved: self.relieved.load(Ordering::Relaxed),
            cache_bytes: self.caches.bytes(),
            released_cache_bytes: self.released_cache_bytes.load(Ordering::Relaxed),
        }
    }

    /// Counts mappings that do not belong to an item, and cannot be evicted, until the value is
    /// dropped.
    #[must_use]
    pub fn hold(&'static self, mappings: usize) -> MappingCharge {
        let held = self.hold_later(mappings, 0);
        self.keep();
        held
    }

    /// As [`Budget::hold`], with bytes of memory, and without making room: the next item does that.
    /// For code that runs while items are dropped.
    #[must_use]
    pub fn hold_later(&'static self, mappings: usize, bytes: usize) -> MappingCharge {
        self.mappings.fetch_add(mappings, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        MappingCharge { budget: self, mappings, bytes }
    }

    /// Has `cache` release unused entries under memory pressure, as idle items give memory back.
    /// Each use of the cache may repeat the call, which has no further effect.
    pub fn relieve_cache(&'static self, cache: &'static dyn SharedCache) {
        self.caches.add(cache);
        self.wake_keeper();
    }

    /// When it is, as items are stamped.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// The list of pools. A forked child gets an empty one if a thread of its parent held the lock:
    /// the pools of before keep their own limits, and nothing else is evicted from them.
    fn list(&self) -> InheritedMutexGuard<'_, Vec<PoolHandle>> {
        self.pools.lock()
    }

    pub(crate) fn register(&'static self, pool: Weak<dyn Evict>) {
        let mut pools = self.list();
        if pools.len() == pools.capacity() {
            pools.retain(|pool| pool.0.strong_count() > 0);
        }
        pools.push(PoolHandle(pool));
    }

    /// The pools that are there. The list is unlocked when they are used, because dropping an item
    /// may run any code.
    fn pools(&self) -> Vec<Arc<dyn Evict>> {
        let mut pools = self.list();
        pools.retain(|pool| pool.0.strong_count() > 0);
        pools.iter().filter_map(|pool| pool.0.upgrade()).collect()
    }

    /// Whether the keeper has work: there are pools, or caches with bytes. No pool is held for it,
    /// so that each goes with its owner.
    fn has_work(&self) -> bool {
        let live = |pool: &PoolHandle| pool.0.strong_count() > 0;
        self.list().iter().any(live) || self.has_cache()
    }

    /// Whether a cache has bytes that it may have to release.
    fn has_cache(&self) -> bool {
        self.pressure_limit().is_some() && self.caches.bytes() > 0
    }

    /// Counts a new item, and makes room for it.
    pub(crate) fn enter(&'static self, room: Room) {
        self.clock.fetch_add(1, Ordering::Relaxed);
        self.items.fetch_add(room.items, Ordering::Relaxed);
        self.mappings.fetch_add(room.mappings, Ordering::Relaxed);
        self.keep();
        self.wake_keeper();
    }

    fn wake_keeper(&'static self) {
        // One that the parent of a fork started does not run here.
        let mine = fork::generation().wrapping_add(1);
        let works = self.idle.load(Ordering::Relaxed) > 0 || self.pressure_limit().is_some();
        if works && self.keeper.swap(mine, Ordering::AcqRel) != mine {
            self.start_keeper();
        }
    }

    pub(crate) fn leave(&self, room: Room) {
        self.items.fetch_sub(room.items, Ordering::Relaxed);
        self.bytes.fetch_sub(room.bytes, Ordering::Relaxed);
        self.mappings.fetch_sub(room.mappings, Ordering::Relaxed);
    }

    /// An idle item keeps another number of bytes than before.
    pub(crate) fn resize(&'static self, before: usize, now: usize) {
        if now > before {
            self.bytes.fetch_add(now - before, Ordering::Relaxed);
        } else {
            self.bytes.fetch_sub(before - now, Ordering::Relaxed);
        }
    }

    /// The amounts to evict.
    fn excess(&self) -> Option<Room> {
        // A bit more than needed, so that the next item does not begin the search again.
        let over = |used: &AtomicUsize, bound: &AtomicUsize| {
            let (used, bound) = (used.load(Ordering::Relaxed), bound.load(Ordering::Relaxed));
            if used > bound { used - bound + bound / 16 } else { 0 }
        };
        let excess = Room {
            items: over(&self.items, &self.max_items),
            bytes: over(&self.bytes, &self.max_bytes),
            mappings: over(&self.mappings, &self.max_mappings),
        };
        (!Room::default().covers(&excess)).then_some(excess)
    }

    /// Keeps the bounds: drops the items that have been idle longest.
    #[inline]
    pub(crate) fn keep(&self) {
        if let Some(excess) = self.excess() {
            self.make_room(&excess);
        }
    }

    #[cold]
    fn make_room(&self, wanted: &Room) {
        let pools = self.pools();
        let mut ages = BTreeMap::new();
        for pool in &pools {
            pool.ages(&mut ages);
        }
        let mut found = Room::default();
        let mut until = 0;
        for (age, room) in &ages {
            found.add(room);
            until = *age;
            if found.covers(wanted) {
                break;
            }
        }
        let mut freed = Room::default();
        for pool in &pools {
            let gone = pool.evict(until, 0, wanted, &mut freed);
            self.evicted.fetch_add(gone, Ordering::Relaxed);
            if freed.covers(wanted) {
                break;
            }
        }
    }

    /// Drops items that came back at `until` or before, except one per pool. Returns how many pools
    /// there are. A panic of an item ends the work on its own pool alone.
    fn retire(&self, until: u64) -> usize {
        let pools = self.pools();
        let all = Room { items: usize::MAX, bytes: usize::MAX, mappings: usize::MAX };
        for pool in &pools {
            let evicting = || pool.evict(until, 1, &all, &mut Room::default());
            if let Ok(gone) = catch_unwind(AssertUnwindSafe(evicting)) {
                self.evicted.fetch_add(gone, Ordering::Relaxed);
            }
        }
        pools.len()
    }

    /// Has idle items give half of their memory back, those first that have been idle longest, and
    /// caches half of their unused bytes. Panics are as for [`Budget::retire`].
    fn relieve(&self) {
        if let Ok(bytes) = catch_unwind(AssertUnwindSafe(|| self.caches.release())) {
            self.released_cache_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        let pools = self.pools();
        let mut ages = BTreeMap::new();
        for pool in &pools {
            pool.ages(&mut ages);
        }
        let mut left = ages.values().map(|room| room.bytes).sum::<usize>().div_ceil(2);
        let (mut found, mut until) = (0, 0);
        for (age, room) in &ages {
            if found >= left {
                break;
            }
            found += room.bytes;
            until = *age;
        }
        for pool in &pools {
            if left == 0 {
                break;
            }
            let relieving = || pool.relieve(until, left);
            if let Ok((trimmed, bytes)) = catch_unwind(AssertUnwindSafe(relieving)) {
                left = left.saturating_sub(bytes);
                self.relieved.fetch_add(trimmed, Ordering::Relaxed);
            }
        }
    }

    /// Starts the thread that drops idle items, and trims them under memory pressure. It ends when
    /// no pool and no cache is left, or when neither work is wanted.
    #[cold]
    fn start_keeper(&'static self) {
        // Also where the thread does not start: the bounds are kept all the same, and the next item
        // tries again.
        let keeping = KeeperGuard(self);
        let thread = std::thread::Builder::new().name("afresh-pool".to_owned());
        let work = move || {
            let budget = keeping.0;
            budget.keep_idle();
            drop(keeping);
            // A pool may have been made, a cache filled, or the bounds set, after the last look.
            if budget.has_work() {
                budget.wake_keeper();
            }
        };
        let _ = thread.spawn(work);
    }

    /// The work of that thread.
    fn keep_idle(&self) {
        let mut last = 0;
        let mut gauge = PressureGauge::new();
        // Since the items were looked at for being idle.
        let mut slept = Duration::ZERO;
        loop {
            let idle = Some(self.idle.load(Ordering::Relaxed)).filter(|idle| *idle > 0);
            let idle = idle.map(Duration::from_millis);
            let limit = self.pressure_limit();
            let step = match (idle.map(|idle| idle.saturating_sub(slept)), limit) {
                (Some(left), Some(_)) => left.min(gauge.interval()),
                (Some(left), None) => left,
                (None, Some(_)) => gauge.interval(),
                (None, None) => break,
            };
            std::thread::sleep(step);
            slept += step;
            // The last reference to a pool may be the thread's, and dropping its items may run any
            // code.
            let step = catch_unwind(AssertUnwindSafe(|| {
                if limit.is_some_and(|limit| gauge.is_high(u32::from(limit))) {
                    self.relieve();
                }
                if idle.is_none_or(|idle| slept < idle) {
                    return self.has_work();
                }
                slept = Duration::ZERO;
                let until =
                    std::mem::replace(&mut last, self.clock.fetch_add(1, Ordering::Relaxed));
                self.retire(until) > 0 || self.has_cache()
            }));
            if matches!(step, Ok(false)) {
                break;
            }
        }
    }
}

/// The thread of a budget, while it works or is being started.
struct KeeperGuard(&'static Budget);

impl Drop for KeeperGuard {
    fn drop(&mut self) {
        // Acquires what a thread did that found the keeper at work and started none: its pool is
        // seen, or its bounds.
        self.0.keeper.swap(0, Ordering::AcqRel);
    }
}

/// Mappings and memory that the budget counts.
#[derive(Debug)]
pub struct MappingCharge {
    budget: &'static Budget,
    mappings: usize,
    bytes: usize,
}

impl MappingCharge {
    /// Bytes of memory that it counts.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for MappingCharge {
    fn drop(&mut self) {
        self.budget.mappings.fetch_sub(self.mappings, Ordering::Relaxed);
        self.budget.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::{Limits, Pool};
    use afresh_memory::{Image, Slot, SlotConfig};

    #[test]
    fn a_child_forked_while_the_list_was_locked_makes_and_uses_pools() {
        let budget = Budget::process();
        let locked = budget.list();
        // SAFETY: the child touches memory that it owns, and ends without running the parent's
        // registered handlers.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a call without preconditions; it ends the child if it hangs.
            unsafe { libc::alarm(60) };
            let image = Image::zero(1);
            let pool: Pool<Slot> = Pool::new(Limits::default());
            let made = (0..3).all(|_| {
                pool.get(0, |_| Slot::new(&image, SlotConfig::default()))
                    .is_ok_and(|mut slot| slot.write(0, b"x").is_ok())
            });
            budget.keep();
            let counted = budget.usage().items >= 1;
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if made && counted { 0 } else { 1 }) };
        }
        drop(locked);
        assert!(child > 0);
        let mut status = -1;
        // SAFETY: `status` is valid for the call.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child failed or hung");
    }
}
