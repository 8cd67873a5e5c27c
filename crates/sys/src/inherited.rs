//! A value that is made on first use, and that a child of a fork keeps: facts of the host, or of
//! content that never changes, which are true for the child as well.
//!
//! Why not `OnceLock`: a thread that reads it while another thread is making the value waits for
//! that thread. In a child forked at that moment the thread is missing, and the child waits without
//! end. Here every early caller makes a value, and one of the values stays.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value that is made on first use, and stays; no caller waits.
pub struct InheritedCell<T> {
    value: AtomicPtr<T>,
    /// It owns the value.
    _owned: PhantomData<Box<T>>,
}

impl<T: Send + Sync> InheritedCell<T> {
    /// An empty cell.
    #[must_use]
    pub const fn new() -> Self {
        Self { value: AtomicPtr::new(std::ptr::null_mut()), _owned: PhantomData }
    }

    /// The value, unless it is still to be made.
    #[inline]
    #[must_use]
    pub fn get(&self) -> Option<&T> {
        // SAFETY: as in `get_or_make`.
        unsafe { self.value.load(Ordering::Acquire).as_ref() }
    }

    /// The value, made by `make` if it is missing. Threads that race for the first value all make
    /// one; all but one of them are dropped and never seen.
    #[inline]
    pub fn get_or_make(&self, make: impl FnOnce() -> T) -> &T {
        // SAFETY: a published value is never changed, and is freed with the cell alone, which the
        // result borrows.
        match unsafe { self.value.load(Ordering::Acquire).as_ref() } {
            Some(value) => value,
            None => self.publish(Box::new(make())).unwrap_or_else(|(first, _)| first),
        }
    }

    /// Sets a value that is missing.
    ///
    /// # Errors
    /// `value`, when there is one already.
    pub fn set(&self, value: T) -> Result<(), T> {
        self.publish(Box::new(value)).map(drop).map_err(|(_, value)| *value)
    }

    /// The value that was set, or the one that was there and the new one.
    #[cold]
    fn publish(&self, value: Box<T>) -> Result<&T, (&T, Box<T>)> {
        let new = Box::into_raw(value);
        let null = std::ptr::null_mut();
        match self.value.compare_exchange(null, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: published just now, so as in `get_or_make`.
            Ok(_) => Ok(unsafe { &*new }),
            // SAFETY: the first as in `get_or_make`; the other was made above, and never published.
            Err(first) => Err(unsafe { (&*first, Box::from_raw(new)) }),
        }
    }
}

impl<T> Drop for InheritedCell<T> {
    fn drop(&mut self) {
        let value = *self.value.get_mut();
        if !value.is_null() {
            // SAFETY: published by `publish`, which took it from a box. Nothing borrows the cell.
            drop(unsafe { Box::from_raw(value) });
        }
    }
}

impl<T: Send + Sync> From<T> for InheritedCell<T> {
    fn from(value: T) -> Self {
        Self { value: AtomicPtr::new(Box::into_raw(Box::new(value))), _owned: PhantomData }
    }
}

impl<T: Send + Sync> Default for InheritedCell<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for InheritedCell<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InheritedCell").finish_non_exhaustive()
    }
}

// SAFETY: the cell returns shared references to a `T` that one thread made; `T` must be both
// wherever a value can be reached.
unsafe impl<T: Send + Sync> Sync for InheritedCell<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_who_come_first_see_one_value() {
        static CELL: InheritedCell<usize> = InheritedCell::new();
        let seen: Vec<usize> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..8).map(|at| scope.spawn(move || *CELL.get_or_make(|| at))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(seen.iter().all(|value| *value == seen[0]), "{seen:?}");
        assert_eq!(*CELL.get_or_make(|| usize::MAX), seen[0]);
    }

    #[test]
    fn a_value_is_set_once_and_dropped_with_its_cell() {
        let value = std::sync::Arc::new(5);
        let cell = InheritedCell::new();
        assert!(cell.get().is_none());
        cell.set(value.clone()).unwrap();
        assert!(cell.set(value.clone()).is_err());
        assert_eq!(std::sync::Arc::strong_count(&value), 2);
        drop(cell);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
        assert_eq!(**InheritedCell::from(value).get_or_make(std::sync::Arc::default), 5);
    }

    #[test]
    #[cfg_attr(miri, ignore = "forks")]
    fn a_child_does_not_wait_for_a_thread_of_its_parent_that_makes_the_value() {
        let cell = InheritedCell::new();
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let cell = &cell;
            scope.spawn(move || {
                cell.get_or_make(|| {
                    begun.send(()).unwrap();
                    ended.recv().unwrap();
                    1
                });
            });
            has_begun.recv().unwrap();
            let passed = crate::child_passes(|| *cell.get_or_make(|| 2) == 2);
            end.send(()).unwrap();
            assert!(passed);
        });
        assert_eq!(cell.get(), Some(&1));
    }
}
