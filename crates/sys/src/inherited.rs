//! A static that a child of a fork keeps: facts of the host, which are true for the child as well.
//!
//! Why not `OnceLock`: a thread that reads it while another thread is making the value waits for
//! that thread. In a child forked at that moment the thread is missing, and the child waits without
//! end. Here every early caller makes a value, and one of the values stays.

use std::fmt;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value that is made on first use, and stays; no caller waits.
pub struct InheritedCell<T: 'static> {
    value: AtomicPtr<T>,
}

impl<T: Send + Sync> InheritedCell<T> {
    /// An empty cell.
    #[must_use]
    pub const fn new() -> Self {
        Self { value: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The value, unless it is still to be made.
    #[inline]
    #[must_use]
    pub fn get(&'static self) -> Option<&'static T> {
        // SAFETY: as in `get_or_make`.
        unsafe { self.value.load(Ordering::Acquire).as_ref() }
    }

    /// The value, made by `make` if it is missing. Threads that race for the first value all make
    /// one; all but one of them are dropped and never seen.
    #[inline]
    pub fn get_or_make(&'static self, make: impl FnOnce() -> T) -> &'static T {
        // SAFETY: a published value is never freed and never changed.
        match unsafe { self.value.load(Ordering::Acquire).as_ref() } {
            Some(value) => value,
            None => self.publish(make()),
        }
    }

    #[cold]
    fn publish(&'static self, value: T) -> &'static T {
        let new = Box::into_raw(Box::new(value));
        let null = std::ptr::null_mut();
        match self.value.compare_exchange(null, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: published just now, so never freed from here on.
            Ok(_) => unsafe { &*new },
            Err(first) => {
                // SAFETY: made above, and never published.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: as in `get_or_make`.
                unsafe { &*first }
            }
        }
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
}
