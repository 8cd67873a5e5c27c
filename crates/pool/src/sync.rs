//! Atomics and locks of the shards and the gate; their model (`tests/shard_model.rs`) replaces
//! them.

use std::sync::PoisonError;

pub(crate) use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

pub(crate) use afresh_sys::{InheritedMutex, InheritedMutexGuard};

/// Locks `mutex`, also after a panic of a holder: nothing that a lock of this crate guards is left
/// half-changed.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex that a child of a fork inherits.
#[inline]
pub(crate) fn locked_here<T: Default>(mutex: &InheritedMutex<T>) -> InheritedMutexGuard<'_, T> {
    mutex.lock()
}

/// Between the store of an item and the load of the number of waiting threads. Both are `SeqCst`,
/// so they need no fence. The model does not know that order, and has a fence here.
#[inline]
pub(crate) fn between_return_and_look() {}
