//! The pool: its items are handed out and come back.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use crate::budget::Budget;
use crate::error::PoolError;
use crate::lease::{Lease, OwnedLease};
use crate::next_item::{NextItem, WaitingRoom};
use crate::pool_state::PoolState;
use crate::{LimitPolicy, Limits, PoolStats, Recycle};

#[cfg(all(test, not(miri)))]
mod fork_tests;

/// A sharded pool of recyclable items.
pub struct Pool<T: Recycle> {
    shared: Arc<PoolState<T>>,
}

impl<T: Recycle> std::fmt::Debug for Pool<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let limits = self.shared.limits;
        f.debug_struct("Pool").field("limits", &limits).field("stats", &self.stats()).finish()
    }
}

impl<T: Recycle> Pool<T> {
    /// An empty pool, within the process's budget.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let budget = Budget::process();
        let shared = Arc::new(PoolState::new(limits, budget));
        let weak: Weak<PoolState<T>> = Arc::downgrade(&shared);
        budget.register(weak);
        Self { shared }
    }

    /// Hands out an item for `key`: an idle one, or one that `make` makes.
    ///
    /// At the limit, `make` gets an idle item of another key, if one exists, to convert or to drop.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] or [`PoolError::TimedOut`] at the limit, and any error of `make`.
    #[inline]
    pub fn get<E>(
        &self,
        key: usize,
        make: impl FnOnce(Option<T>) -> Result<T, E>,
    ) -> Result<Lease<'_, T>, PoolError<E>> {
        self.shared.get(key, self.shared.limits.exhausted, make)
    }

    /// As [`Pool::get`], with `exhausted` as the response at the limit.
    ///
    /// # Errors
    /// As [`Pool::get`].
    pub fn get_with<E>(
        &self,
        key: usize,
        exhausted: LimitPolicy,
        make: impl FnOnce(Option<T>) -> Result<T, E>,
    ) -> Result<Lease<'_, T>, PoolError<E>> {
        self.shared.get(key, exhausted, make)
    }

    /// As [`Pool::get_with`], for a lease that keeps the pool.
    ///
    /// # Errors
    /// As [`Pool::get`].
    pub fn get_owned<E>(
        &self,
        key: usize,
        exhausted: LimitPolicy,
        make: impl FnOnce(Option<T>) -> Result<T, E>,
    ) -> Result<OwnedLease<T>, PoolError<E>> {
        let lease = self.shared.get(key, exhausted, make)?;
        Ok(OwnedLease::new(Arc::clone(&self.shared), lease))
    }

    /// Waits, as a task, for an item to come back when the pool is at its limit.
    #[must_use]
    pub fn room(&self) -> NextItem {
        NextItem::new(Arc::clone(&self.shared) as Arc<dyn WaitingRoom>)
    }

    /// Makes a new item for comparisons, regardless of idle items and of the limit. It is dropped
    /// when it comes back.
    ///
    /// # Errors
    /// What `make` returns.
    pub fn spare<E>(
        &self,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Lease<'_, T>, PoolError<E>> {
        self.shared.alive.fetch_add(1, Ordering::AcqRel);
        self.shared.create(None, true, |_| make())
    }

    /// Adds an item that is idle at once, made by `make` if the pool is below its limit.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] at the limit, and any error of `make`.
    pub fn insert<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<(), PoolError<E>> {
        self.shared.insert(make)
    }

    /// Takes an idle item for `key` out of the pool, which then counts it no more.
    #[must_use]
    pub fn remove(&self, key: usize) -> Option<T> {
        self.shared.remove(key)
    }

    /// Trims items that have been idle for `ticks` calls of this method or more, for a timer. So a
    /// quiet pool gives its memory back. Returns how many were trimmed.
    pub fn trim_idle(&self, ticks: u64) -> usize {
        self.shared.trim_idle(ticks)
    }

    /// Drops every item that is idle now, of `key` or of all, a few at a time: those that have been
    /// idle longest first. The others can be handed out, and come back later.
    pub fn clear(&self, key: Option<usize>) {
        self.shared.clear(key);
    }

    /// The limits it was made with.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// Its counters so far.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.shared.stats()
    }
}
