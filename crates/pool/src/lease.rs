//! Items in use: leases that borrow their pool, and leases that own it.
//!
//! Promises: an item comes back exactly once, where its lease is dropped, or is dropped by
//! `discard`.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::Recycle;
use crate::pool_state::PoolState;
use crate::shard::IdleItem;

/// An item in use. Dropping it recycles the item and returns it to its pool.
pub struct Lease<'a, T: Recycle> {
    pool: &'a PoolState<T>,
    idle: ManuallyDrop<Box<IdleItem<T>>>,
    /// Beyond the limit: dropped on return.
    spare: bool,
}

impl<'a, T: Recycle> Lease<'a, T> {
    #[inline]
    pub(crate) fn new(pool: &'a PoolState<T>, idle: Box<IdleItem<T>>, spare: bool) -> Self {
        Self { pool, idle: ManuallyDrop::new(idle), spare }
    }

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

/// An item in use, with the pool that it returns to. It borrows nothing, so that tasks and threads
/// can own it.
pub struct OwnedLease<T: Recycle> {
    pool: Arc<PoolState<T>>,
    /// Taken when the lease ends.
    idle: ManuallyDrop<Box<IdleItem<T>>>,
    spare: bool,
}

impl<T: Recycle> OwnedLease<T> {
    /// Owns the item of `lease`, which is one of `pool`.
    pub(crate) fn new(pool: Arc<PoolState<T>>, lease: Lease<'_, T>) -> Self {
        let mut lease = ManuallyDrop::new(lease);
        // SAFETY: `lease` is not dropped, so the item is taken exactly once.
        let idle = unsafe { ManuallyDrop::take(&mut lease.idle) };
        Self { pool, idle: ManuallyDrop::new(idle), spare: lease.spare }
    }

    /// Drops the item instead of returning it.
    pub fn discard(self) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, so item and pool are taken exactly once.
        let (idle, pool) =
            unsafe { (ManuallyDrop::take(&mut this.idle), std::ptr::read(&raw const this.pool)) };
        pool.discard(*idle);
    }
}

impl<T: Recycle + std::fmt::Debug> std::fmt::Debug for OwnedLease<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("OwnedLease").field(&**self).finish()
    }
}

impl<T: Recycle> Deref for OwnedLease<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.idle.item
    }
}

impl<T: Recycle> DerefMut for OwnedLease<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.idle.item
    }
}

impl<T: Recycle> Drop for OwnedLease<T> {
    fn drop(&mut self) {
        // SAFETY: `drop` runs once, and not for a lease that was discarded.
        let idle = unsafe { ManuallyDrop::take(&mut self.idle) };
        self.pool.give_back(idle, self.spare);
    }
}
