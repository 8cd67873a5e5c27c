//! A lock for values that are never contended: one atomic exchange to take, a plain store to
//! release.
//!
//! A guest's memory is used by its instance while a call runs, and by the pool at other times. The
//! two never overlap, but wasmtime's memory interface cannot express that in its types.
//! `std::sync::Mutex` would cost two exchanges on the hot path. Here a second user would spin,
//! yielding, until the first is done.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// A value with one user at a time.
#[derive(Debug)]
pub(crate) struct ExclusiveCell<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and only one guard exists at any time; moving
// it between threads that way needs `T: Send`, as for a mutex.
unsafe impl<T: Send> Sync for ExclusiveCell<T> {}

impl<T> ExclusiveCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Waits until the value is free.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        while self.taken.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        Guard(self)
    }
}

/// The right to use the value; a panic gives it back too.
pub(crate) struct Guard<'a, T>(&'a ExclusiveCell<T>);

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `taken` was set by this guard and is cleared only when it is dropped.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as for `deref`, and `&mut self` makes this the only reference through the guard.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_threads_have_the_value_one_at_a_time() {
        let count = ExclusiveCell::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| *count.lock() += 1));
            }
        });
        assert_eq!(*count.lock(), 40_000);
    }
}
