//! The state of a pool: hand-out, return, limits, accounts.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use afresh_sys::planted::{Bug, is};
use afresh_sys::{InheritedCell, InheritedMutex, PerProcess, fork};

use crate::budget::{Budget, Evict, Room};
use crate::error::PoolError;
use crate::gate::Gate;
use crate::lease::Lease;
use crate::next_item::WaitingRoom;
use crate::return_guard::{Failures, ReturnGuard};
use crate::shard::{IdleItem, Shard};
use crate::trims::Trims;
use crate::{LimitPolicy, Limits, PoolStats, Recycle, ResetStats};

/// Maximum shards of a pool. More than any sensible number of busy threads.
const MAX_SHARDS: usize = 64;

/// The state of a pool; the process budget reads it as well.
pub(crate) struct PoolState<T: Recycle> {
    pub(crate) shards: Box<[Shard<T>]>,
    pub(crate) limits: Limits,
    /// The budget of the process that made the pool.
    pub(crate) budget: &'static Budget,
    pub(crate) alive: AtomicUsize,
    pub(crate) resident: AtomicUsize,
    pub(crate) tick: AtomicU64,
    pub(crate) created: AtomicU64,
    pub(crate) failures: InheritedMutex<Failures>,
    pub(crate) abandoned: AtomicU64,
    pub(crate) on_demand: AtomicU64,
    pub(crate) trimmed: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) trims: Trims,
    /// The counts of dropped items.
    pub(crate) retired: InheritedMutex<ResetStats>,
    /// Threads and tasks that wait: a child of a fork has none of its parent's.
    gates: PerProcess<Gate>,
}

/// The number of shards of a pool: a few for each thread that can run, so that two rarely meet.
pub(crate) fn shards() -> usize {
    static SHARDS: InheritedCell<usize> = InheritedCell::new();
    *SHARDS.get_or_make(|| {
        let threads = std::thread::available_parallelism().map_or(MAX_SHARDS, usize::from);
        threads.saturating_mul(4).next_power_of_two().clamp(8, MAX_SHARDS)
    })
}

/// This thread's shard number.
#[inline]
pub(crate) fn home() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static HOME: Cell<usize> = const { Cell::new(usize::MAX) });
    HOME.with(|home| {
        if home.get() == usize::MAX {
            home.set(NEXT.fetch_add(1, Ordering::Relaxed) % shards());
        }
        home.get()
    })
}

impl<T: Recycle> PoolState<T> {
    pub(crate) fn new(limits: Limits, budget: &'static Budget) -> Self {
        Self {
            shards: (0..shards()).map(|_| Shard::default()).collect(),
            limits,
            budget,
            alive: AtomicUsize::new(0),
            resident: AtomicUsize::new(0),
            tick: AtomicU64::new(0),
            created: AtomicU64::new(0),
            failures: InheritedMutex::default(),
            abandoned: AtomicU64::new(0),
            on_demand: AtomicU64::new(0),
            trimmed: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            trims: Trims::new(),
            retired: InheritedMutex::default(),
            gates: PerProcess::new(Gate::new),
        }
    }

    #[inline]
    pub(crate) fn shard(&self, at: usize) -> &Shard<T> {
        &self.shards[at]
    }

    #[inline]
    pub(crate) fn get<E>(
        &self,
        key: usize,
        exhausted: LimitPolicy,
        make: impl FnOnce(Option<T>) -> Result<T, E>,
    ) -> Result<Lease<'_, T>, PoolError<E>> {
        match self.shard(home()).take(key, || self.gate().signal()) {
            Some(idle) if idle.generation == fork::generation() || is(Bug::Parents) => {
                Ok(self.lease(idle, false))
            }
            other => {
                other.into_iter().for_each(|idle| self.discard(*idle));
                self.get_elsewhere(key, exhausted, make)
            }
        }
    }

    #[inline]
    pub(crate) fn lease(&self, idle: Box<IdleItem<T>>, spare: bool) -> Lease<'_, T> {
        Lease::new(self, idle, spare)
    }

    #[cold]
    pub(crate) fn get_elsewhere<E>(
        &self,
        key: usize,
        exhausted: LimitPolicy,
        make: impl FnOnce(Option<T>) -> Result<T, E>,
    ) -> Result<Lease<'_, T>, PoolError<E>> {
        let mut deadline = None;
        loop {
            // Compared after the look, because an item may be out to be trimmed.
            let trims_ended = self.trims.ended();
            if let Some(idle) = self.steal(|shard| shard.take(key, || self.gate().signal())) {
                if idle.generation == fork::generation() {
                    return Ok(self.lease(idle, false));
                }
                self.discard(*idle);
                continue;
            }
            if self.claim() {
                return self.create(None, false, make);
            }
            if let Some(other) = self.steal(Shard::take_any) {
                if other.generation != fork::generation() {
                    self.discard(*other);
                    continue;
                }
                let item = self.strike(*other);
                return self.create(Some(item), false, make);
            }
            match exhausted {
                LimitPolicy::Error | LimitPolicy::OnDemand
                    if self.trims.may_have_hidden(trims_ended) =>
                {
                    self.wait_for_trim();
                }
                LimitPolicy::Error => {
                    return Err(PoolError::Exhausted { limit: self.limits.items });
                }
                LimitPolicy::OnDemand => {
                    self.alive.fetch_add(1, Ordering::AcqRel);
                    self.on_demand.fetch_add(1, Ordering::Relaxed);
                    return self.create(None, true, make);
                }
                LimitPolicy::Wait(most) => {
                    // A wait that ends after the clock does has no end.
                    let deadline =
                        *deadline.get_or_insert_with(|| Instant::now().checked_add(most));
                    if !self.wait_until(deadline) {
                        return Err(PoolError::TimedOut(most));
                    }
                }
            }
        }
    }

    /// Makes an item that is idle at once, below the limit.
    pub(crate) fn insert<E>(
        &self,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<(), PoolError<E>> {
        if !self.claim() {
            return Err(PoolError::Exhausted { limit: self.limits.items });
        }
        drop(self.create(None, false, |_| make())?);
        Ok(())
    }

    /// Takes an idle item of `key` out of the pool.
    pub(crate) fn remove(&self, key: usize) -> Option<T> {
        loop {
            let idle = self.steal(|shard| shard.take(key, || self.gate().signal()))?;
            if idle.generation == fork::generation() {
                let _place = Reservation(self);
                return Some(self.strike(*idle));
            }
            self.discard(*idle);
        }
    }

    /// Counts an item that will be made, below the limit.
    fn claim(&self) -> bool {
        let more = |alive| (alive < self.limits.items).then_some(alive + 1);
        self.alive.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Whether the next look may find an item, or a place for one.
    pub(crate) fn has_room(&self) -> bool {
        self.alive.load(Ordering::SeqCst) < self.limits.items
            || self.shards.iter().any(|shard| !shard.is_empty())
    }

    /// Waits for a return; `false` at the deadline, if one is set.
    pub(crate) fn wait_until(&self, deadline: Option<Instant>) -> bool {
        self.gate().wait(deadline, || self.has_room())
    }

    /// Waits until no item is out to be trimmed, or one is back.
    pub(crate) fn wait_for_trim(&self) {
        self.gate().wait(None, || !self.trims.are_ongoing() || self.has_room());
    }

    /// Looks through all shards, this thread's first.
    pub(crate) fn steal(
        &self,
        take: impl Fn(&Shard<T>) -> Option<Box<IdleItem<T>>>,
    ) -> Option<Box<IdleItem<T>>> {
        let (home, shards) = (home(), self.shards.len());
        (0..shards).find_map(|i| take(self.shard((home + i) % shards)))
    }

    pub(crate) fn create<E>(
        &self,
        other: Option<T>,
        spare: bool,
        make: impl FnOnce(Option<T>) -> Result<T, E>,
    ) -> Result<Lease<'_, T>, PoolError<E>> {
        // The place that was claimed is given up again if `make` fails or panics.
        let place = Reservation(self);
        let item = make(other).map_err(PoolError::Create)?;
        std::mem::forget(place);
        self.created.fetch_add(1, Ordering::Relaxed);
        let mappings = item.mappings();
        let generation = fork::generation();
        let idle = IdleItem {
            item,
            resident: 0,
            mappings,
            since: 0,
            stamp: 0,
            resets: ResetStats::default(),
            generation,
        };
        let lease = self.lease(Box::new(idle), spare);
        self.budget.enter(Room { items: 1, bytes: 0, mappings });
        Ok(lease)
    }

    /// An item was dropped.
    pub(crate) fn note_dropped(&self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
        self.gate().signal();
    }

    #[inline]
    pub(crate) fn give_back(&self, idle: Box<IdleItem<T>>, spare: bool) {
        if std::thread::panicking() && !is(Bug::Unwound) {
            // The unwound code may have left the item in an unknown state.
            self.abandoned.fetch_add(1, Ordering::Relaxed);
            return self.discard(*idle);
        }
        let mut returning = ReturnGuard::new(self, idle);
        if !returning.clean(spare) {
            return;
        }
        let Some(idle) = returning.idle.take() else { return };
        self.shard(home()).put(idle);
        if returning.grew {
            self.budget.keep();
        }
        if self.limits.items != usize::MAX {
            self.gate().signal();
        }
    }

    /// Enters an item's new size into the accounts and trims it when the budget is passed; `false`
    /// when trimming failed and the item must go.
    #[cold]
    pub(crate) fn account(&self, idle: &mut IdleItem<T>, now: usize) -> bool {
        if self.resize(idle, now) <= self.limits.resident_bytes {
            return true;
        }
        self.trimmed.fetch_add(1, Ordering::Relaxed);
        self.trim(idle)
    }

    /// Enters an item's new size into the accounts; returns the sum over all.
    pub(crate) fn resize(&self, idle: &mut IdleItem<T>, now: usize) -> usize {
        let before = std::mem::replace(&mut idle.resident, now);
        self.budget.resize(before, now);
        if now > before {
            self.resident.fetch_add(now - before, Ordering::Relaxed) + (now - before)
        } else {
            self.resident.fetch_sub(before - now, Ordering::Relaxed) - (before - now)
        }
    }

    /// Trims an item and enters the rest into the accounts; `false` when it must be dropped.
    pub(crate) fn trim(&self, idle: &mut IdleItem<T>) -> bool {
        if idle.item.trim().is_err() {
            return false;
        }
        let left = idle.item.resident_bytes().min(idle.resident);
        self.resize(idle, left);
        true
    }

    /// Takes an item out of the accounts.
    pub(crate) fn strike(&self, idle: IdleItem<T>) -> T {
        let IdleItem { item, resident, mappings, resets, .. } = idle;
        self.retired.lock().join(&resets);
        self.resident.fetch_sub(resident, Ordering::Relaxed);
        self.budget.leave(Room { items: 1, bytes: resident, mappings });
        item
    }

    #[cold]
    pub(crate) fn discard(&self, idle: IdleItem<T>) {
        let item = self.strike(idle);
        // Frees the place when the item is dropped, even if the drop panics.
        let _place = Reservation(self);
        drop(item);
    }

    pub(crate) fn trim_idle(&self, ticks: u64) -> usize {
        let now = self.tick.fetch_add(1, Ordering::Relaxed) + 1;
        let is_old = |idle: &IdleItem<T>| idle.resident > 0 && idle.since + ticks <= now;
        (0..self.shards.len()).map(|at| self.trim_where(at, is_old).0).sum()
    }

    /// Trims the idle items of a shard for which `wanted` holds, one at a time, so that the others
    /// can be handed out. Returns how many, and how many bytes they had.
    pub(crate) fn trim_where(
        &self,
        at: usize,
        mut wanted: impl FnMut(&IdleItem<T>) -> bool,
    ) -> (usize, usize) {
        let mut found = Vec::new();
        self.shard(at).for_each(|idle| {
            if wanted(idle) {
                found.push(std::ptr::from_ref(idle).addr());
            }
        });
        let (mut count, mut bytes) = (0, 0);
        for address in found {
            let ongoing = self.trims.begin(self.gate());
            let taken = self.shard(at).take_at(address);
            let mut returning = taken.map(|idle| ReturnGuard::new(self, idle));
            // It ends before the item is dropped, whose code may wait for an item of this pool.
            let _ongoing = ongoing;
            let Some(returning) = &mut returning else { continue };
            returning.why.0 = "trim";
            count += 1;
            bytes += returning.idle.as_ref().map_or(0, |idle| idle.resident);
            if returning.idle.as_mut().is_some_and(|idle| self.trim(idle))
                && let Some(idle) = returning.idle.take()
            {
                self.shard(at).put_cold(idle);
            }
        }
        self.trimmed.fetch_add(count as u64, Ordering::Relaxed);
        (count, bytes)
    }

    pub(crate) fn stats(&self) -> PoolStats {
        let mut stats = PoolStats {
            alive: self.alive.load(Ordering::Acquire),
            created: self.created.load(Ordering::Relaxed),
            abandoned: self.abandoned.load(Ordering::Relaxed),
            on_demand: self.on_demand.load(Ordering::Relaxed),
            trimmed: self.trimmed.load(Ordering::Relaxed),
            evicted: self.evicted.load(Ordering::Relaxed),
            resident_bytes: self.resident.load(Ordering::Relaxed),
            ..PoolStats::default()
        };
        let failures = self.failures.lock();
        stats.quarantines.clone_from(&failures.by_reason);
        stats.last_failure.clone_from(&failures.last);
        drop(failures);
        stats.quarantined = stats.quarantines.values().sum();
        stats.resets = *self.retired.lock();
        for shard in &self.shards {
            shard.for_each(|idle| {
                stats.idle += 1;
                stats.resets.join(&idle.resets);
            });
        }
        stats.returned = stats.resets.count();
        stats.in_use = stats.alive.saturating_sub(stats.idle);
        stats
    }
}

impl<T: Recycle> WaitingRoom for PoolState<T> {
    fn gate(&self) -> &Gate {
        self.gates.get()
    }

    fn has_room(&self) -> bool {
        self.has_room()
    }
}

impl<T: Recycle> Evict for PoolState<T> {
    fn ages(&self, ages: &mut BTreeMap<u64, Room>) {
        if self.alive.load(Ordering::Relaxed) == 0 {
            return;
        }
        for shard in &self.shards {
            shard.for_each(|idle| {
                let room = Room { items: 1, bytes: idle.resident, mappings: idle.mappings };
                ages.entry(idle.stamp).or_default().add(&room);
            });
        }
    }

    fn evict(&self, until: u64, keep: usize, wanted: &Room, freed: &mut Room) -> u64 {
        // Its items may be made and dropped meanwhile.
        let mut left = self.alive.load(Ordering::Relaxed).saturating_sub(keep);
        let more = |idle: &IdleItem<T>| {
            let goes = left > 0 && !freed.covers(wanted);
            if goes {
                left -= 1;
                freed.add(&Room { items: 1, bytes: idle.resident, mappings: idle.mappings });
                self.evicted.fetch_add(1, Ordering::Relaxed);
            }
            goes
        };
        self.discard_oldest(|idle| idle.stamp <= until, more)
    }

    fn relieve(&self, until: u64, wanted: usize) -> (u64, usize) {
        let generation = fork::generation();
        let (mut count, mut bytes) = (0, 0);
        for at in 0..self.shards.len() {
            if bytes >= wanted {
                break;
            }
            let mut found = bytes;
            let (trimmed, had) = self.trim_where(at, |idle| {
                // A child does not use items of its parent.
                let ours = idle.generation == generation;
                let goes = ours && idle.resident > 0 && idle.stamp <= until && found < wanted;
                found += if goes { idle.resident } else { 0 };
                goes
            });
            (count, bytes) = (count + trimmed, bytes + had);
        }
        (count as u64, bytes)
    }
}

impl<T: Recycle> Drop for PoolState<T> {
    fn drop(&mut self) {
        // Through the accounts: the budget outlives the pool.
        self.clear(None);
    }
}

/// The place of an item that is being made or dropped; given up with this value.
struct Reservation<'a, T: Recycle>(&'a PoolState<T>);

impl<T: Recycle> Drop for Reservation<'_, T> {
    fn drop(&mut self) {
        self.0.note_dropped();
    }
}
