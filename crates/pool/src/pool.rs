//! The pool: hand-out, return, limits, books.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::shard::{Idle, Shard};
use crate::{Exhausted, Limits, Recycle};

/// Shards of a pool. More than any sensible number of busy threads, so that two rarely meet; cheap,
/// because a shard is a lock and an empty vector.
const SHARDS: usize = 64;

/// Why no item could be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError<E> {
    /// The pool is at its limit and the caller chose not to wait.
    #[error(
        "all {limit} items of the pool are in use: raise the limit, wait, or allow items on demand"
    )]
    Exhausted {
        /// The limit.
        limit: usize,
    },
    /// The pool stayed at its limit for as long as the caller was ready to wait.
    #[error("no item of the pool came back within {0:?}")]
    TimedOut(std::time::Duration),
    /// Making a new item failed.
    #[error(transparent)]
    Create(E),
}

/// What a pool has done so far, summed over its shards; a snapshot that may be a moment old.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Items alive, idle and in use.
    pub alive: usize,
    /// Items idle.
    pub idle: usize,
    /// Items made.
    pub created: u64,
    /// Items in use.
    pub in_use: usize,
    /// Hand-outs that came back and were made pristine.
    pub returned: u64,
    /// Items dropped because recycling failed.
    pub quarantined: u64,
    /// Items dropped because their user panicked.
    pub abandoned: u64,
    /// Items handed out beyond the limit.
    pub on_demand: u64,
    /// Times an item was trimmed to stay within the memory budget.
    pub trimmed: u64,
    /// Bytes of private memory that idle items keep.
    pub resident_bytes: usize,
}

/// A sharded pool of recyclable items.
pub struct Pool<T: Recycle> {
    shards: Box<[Shard<T>]>,
    limits: Limits,
    alive: AtomicUsize,
    resident: AtomicUsize,
    tick: AtomicU64,
    created: AtomicU64,
    quarantined: AtomicU64,
    abandoned: AtomicU64,
    on_demand: AtomicU64,
    trimmed: AtomicU64,
    /// Returns of items that are no more.
    retired_returns: AtomicU64,
    /// Requests that wait, so that a return needs to signal only when somebody does.
    waiting: AtomicUsize,
    gate: Mutex<()>,
    came_back: Condvar,
}

impl<T: Recycle> std::fmt::Debug for Pool<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("limits", &self.limits).field("stats", &self.stats()).finish()
    }
}

/// This thread's shard number.
#[inline]
fn home() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static HOME: Cell<usize> = const { Cell::new(usize::MAX) });
    HOME.with(|home| {
        if home.get() == usize::MAX {
            home.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
        }
        home.get()
    })
}

impl<T: Recycle> Pool<T> {
    /// An empty pool.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            limits,
            alive: AtomicUsize::new(0),
            resident: AtomicUsize::new(0),
            tick: AtomicU64::new(0),
            created: AtomicU64::new(0),
            quarantined: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
            on_demand: AtomicU64::new(0),
            trimmed: AtomicU64::new(0),
            retired_returns: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            gate: Mutex::new(()),
            came_back: Condvar::new(),
        }
    }

    #[inline]
    fn shard(&self, at: usize) -> &Shard<T> {
        &self.shards[at]
    }

    /// Hands out an item for `key`: an idle one, or one that `make` makes.
    ///
    /// At the limit, `make` gets an idle item of another key, if there is one, to turn into what is
    /// wanted or to drop.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] or [`PoolError::TimedOut`] at the limit, and what `make` returns.
    #[inline]
    pub fn get<E>(
        &self,
        key: usize,
        make: impl FnOnce(Option<T>) -> Result<T, E>,
    ) -> Result<Lease<'_, T>, PoolError<E>> {
        match self.shard(home()).take(key) {
            Some(idle) => Ok(self.lease(idle, false)),
            None => self.get_elsewhere(key, make),
        }
    }

    /// Makes an item that is new, whatever is idle and whatever the limit; it is dropped when it comes
    /// back. For comparing a used item with one that has never been used.
    ///
    /// # Errors
    /// What `make` returns.
    pub fn spare<E>(
        &self,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Lease<'_, T>, PoolError<E>> {
        self.alive.fetch_add(1, Ordering::AcqRel);
        self.create(None, true, |_| make())
    }

    #[inline]
    fn lease(&self, idle: Box<Idle<T>>, spare: bool) -> Lease<'_, T> {
        Lease { pool: self, idle: ManuallyDrop::new(idle), spare }
    }

    #[cold]
    fn get_elsewhere<E>(
        &self,
        key: usize,
        make: impl FnOnce(Option<T>) -> Result<T, E>,
    ) -> Result<Lease<'_, T>, PoolError<E>> {
        let mut deadline = None;
        loop {
            if let Some(idle) = self.steal(|shard| shard.take(key)) {
                return Ok(self.lease(idle, false));
            }
            let claimed = self.alive.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
                (n < self.limits.items).then_some(n + 1)
            });
            if claimed.is_ok() {
                return self.create(None, false, make);
            }
            if let Some(other) = self.steal(Shard::take_any) {
                let Idle { item, resident, returns, .. } = *other;
                self.resident.fetch_sub(resident, Ordering::Relaxed);
                self.retired_returns.fetch_add(returns, Ordering::Relaxed);
                return self.create(Some(item), false, make);
            }
            match self.limits.exhausted {
                Exhausted::Error => {
                    return Err(PoolError::Exhausted { limit: self.limits.items });
                }
                Exhausted::OnDemand => {
                    self.alive.fetch_add(1, Ordering::AcqRel);
                    self.on_demand.fetch_add(1, Ordering::Relaxed);
                    return self.create(None, true, make);
                }
                Exhausted::Wait(most) => {
                    let deadline = *deadline.get_or_insert_with(|| Instant::now() + most);
                    if !self.wait_until(deadline) {
                        return Err(PoolError::TimedOut(most));
                    }
                }
            }
        }
    }

    /// Waits for a return; `false` at the deadline.
    fn wait_until(&self, deadline: Instant) -> bool {
        let guard = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // An item that came back before we were counted signalled nobody: look once more.
        let there = self.alive.load(Ordering::SeqCst) < self.limits.items
            || self.shards.iter().any(|shard| !shard.is_empty());
        let left = deadline.saturating_duration_since(Instant::now());
        if !there && !left.is_zero() {
            drop(self.came_back.wait_timeout(guard, left));
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        !left.is_zero()
    }

    /// Looks through all shards, this thread's first.
    fn steal(&self, take: impl Fn(&Shard<T>) -> Option<Box<Idle<T>>>) -> Option<Box<Idle<T>>> {
        let home = home();
        (0..SHARDS).find_map(|i| take(self.shard((home + i) % SHARDS)))
    }

    fn create<E>(
        &self,
        other: Option<T>,
        spare: bool,
        make: impl FnOnce(Option<T>) -> Result<T, E>,
    ) -> Result<Lease<'_, T>, PoolError<E>> {
        // The place that was claimed is given up again if `make` fails or panics.
        struct Claim<'a, T: Recycle>(&'a Pool<T>);
        impl<T: Recycle> Drop for Claim<'_, T> {
            fn drop(&mut self) {
                self.0.gone();
            }
        }
        let claim = Claim(self);
        let item = make(other).map_err(PoolError::Create)?;
        std::mem::forget(claim);
        self.created.fetch_add(1, Ordering::Relaxed);
        Ok(self.lease(Box::new(Idle { item, resident: 0, since: 0, returns: 0 }), spare))
    }

    /// An item is no more.
    fn gone(&self) {
        self.alive.fetch_sub(1, Ordering::AcqRel);
        self.signal();
    }

    #[inline]
    fn signal(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            let _guard = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            self.came_back.notify_all();
        }
    }

    #[inline]
    fn give_back(&self, mut idle: Box<Idle<T>>, spare: bool) {
        if std::thread::panicking() {
            // What the unwound code left half-done inside the item is unknown.
            self.abandoned.fetch_add(1, Ordering::Relaxed);
            return self.discard(*idle);
        }
        if idle.item.recycle().is_err() {
            self.quarantined.fetch_add(1, Ordering::Relaxed);
            return self.discard(*idle);
        }
        idle.returns += 1;
        if spare {
            return self.discard(*idle);
        }
        let now = idle.item.resident_bytes();
        if now != idle.resident && !self.account(&mut idle, now) {
            return self.discard(*idle);
        }
        idle.since = self.tick.load(Ordering::Relaxed);
        self.shard(home()).put(idle);
        if self.limits.items != usize::MAX {
            self.signal();
        }
    }

    /// Enters an item's new size into the books and trims it when the budget is passed; `false` when
    /// trimming failed and the item must go.
    #[cold]
    fn account(&self, idle: &mut Idle<T>, now: usize) -> bool {
        let before = std::mem::replace(&mut idle.resident, now);
        let total = if now > before {
            self.resident.fetch_add(now - before, Ordering::Relaxed) + (now - before)
        } else {
            self.resident.fetch_sub(before - now, Ordering::Relaxed) - (before - now)
        };
        if total <= self.limits.resident_bytes {
            return true;
        }
        self.trimmed.fetch_add(1, Ordering::Relaxed);
        self.trim(idle)
    }

    /// Trims an item and enters what is left into the books; `false` when it must go.
    fn trim(&self, idle: &mut Idle<T>) -> bool {
        if idle.item.trim().is_err() {
            self.quarantined.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let left = idle.item.resident_bytes().min(idle.resident);
        self.resident.fetch_sub(idle.resident - left, Ordering::Relaxed);
        idle.resident = left;
        true
    }

    #[cold]
    fn discard(&self, idle: Idle<T>) {
        let Idle { item, resident, returns, .. } = idle;
        drop(item);
        self.retired_returns.fetch_add(returns, Ordering::Relaxed);
        self.resident.fetch_sub(resident, Ordering::Relaxed);
        self.gone();
    }

    /// Trims items that have been idle for `ticks` calls of this method or more, so that a quiet pool
    /// gives its memory back. Call it from a timer. Returns how many were trimmed.
    pub fn trim_idle(&self, ticks: u64) -> usize {
        let now = self.tick.fetch_add(1, Ordering::Relaxed) + 1;
        let mut count = 0;
        for at in 0..SHARDS {
            let old =
                self.shard(at).take_where(|idle| idle.resident > 0 && idle.since + ticks <= now);
            for mut idle in old {
                count += 1;
                if self.trim(&mut idle) {
                    self.shard(at).put(idle);
                } else {
                    self.discard(*idle);
                }
            }
        }
        self.trimmed.fetch_add(count as u64, Ordering::Relaxed);
        count
    }

    /// Drops every idle item, of `key` or of all.
    pub fn clear(&self, key: Option<usize>) {
        for at in 0..SHARDS {
            let items =
                self.shard(at).take_where(|idle| key.is_none_or(|key| idle.item.key() == key));
            for idle in items {
                self.discard(*idle);
            }
        }
    }

    /// The limits it was made with.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let mut stats = PoolStats {
            alive: self.alive.load(Ordering::Acquire),
            created: self.created.load(Ordering::Relaxed),
            quarantined: self.quarantined.load(Ordering::Relaxed),
            abandoned: self.abandoned.load(Ordering::Relaxed),
            on_demand: self.on_demand.load(Ordering::Relaxed),
            trimmed: self.trimmed.load(Ordering::Relaxed),
            resident_bytes: self.resident.load(Ordering::Relaxed),
            ..PoolStats::default()
        };
        stats.returned = self.retired_returns.load(Ordering::Relaxed);
        for shard in &self.shards {
            shard.for_each(|idle| {
                stats.idle += 1;
                stats.returned += idle.returns;
            });
        }
        stats.in_use = stats.alive.saturating_sub(stats.idle);
        stats
    }
}

/// An item in use. Dropping it recycles the item and returns it to its pool.
pub struct Lease<'a, T: Recycle> {
    pool: &'a Pool<T>,
    idle: ManuallyDrop<Box<Idle<T>>>,
    /// Beyond the limit: dropped on return.
    spare: bool,
}

impl<T: Recycle> Lease<'_, T> {
    /// Drops the item instead of returning it.
    pub fn discard(mut self) {
        // SAFETY: `self` is forgotten right after, so the item is taken exactly once.
        let idle = unsafe { ManuallyDrop::take(&mut self.idle) };
        let pool = self.pool;
        std::mem::forget(self);
        pool.discard(*idle);
    }
}

impl<T: Recycle + std::fmt::Debug> std::fmt::Debug for Lease<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Lease").field(&**self).finish()
    }
}

impl<T: Recycle> Deref for Lease<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.idle.item
    }
}

impl<T: Recycle> DerefMut for Lease<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.idle.item
    }
}

impl<T: Recycle> Drop for Lease<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `drop` runs once, and `discard` forgets the lease instead of dropping it.
        let idle = unsafe { ManuallyDrop::take(&mut self.idle) };
        self.pool.give_back(idle, self.spare);
    }
}
