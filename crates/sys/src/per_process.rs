//! A value that belongs to one process: the child of a fork makes its own.
//!
//! A forked child inherits every value as it was at that moment, and much of it is wrong there:
//! threads are missing and may hold locks, descriptors refer to the parent's memory, and secret
//! keys are known twice. [`PerProcess`] is how this project keeps such state. Reading one is three
//! loads.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::fork;

/// A value that is made on first use in a process, and made anew in each forked child.
///
/// The parent's value is leaked in the child, not dropped: its destructor would wait for missing
/// threads, or release resources that the parent still uses.
pub struct PerProcess<T> {
    current: AtomicPtr<ProcessValue<T>>,
    make: fn() -> T,
    /// It owns the value.
    _owned: PhantomData<Box<T>>,
}

struct ProcessValue<T> {
    /// The process that made it.
    generation: u32,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// A cell whose value `make` makes. Two threads that race for the first value may both call it;
    /// one of the two values is dropped and never seen.
    #[must_use]
    pub const fn new(make: fn() -> T) -> Self {
        Self { current: AtomicPtr::new(std::ptr::null_mut()), make, _owned: PhantomData }
    }

    /// The value of this process.
    #[inline]
    #[must_use]
    pub fn get(&self) -> &T {
        let generation = fork::generation();
        let current = self.current.load(Ordering::Acquire);
        // SAFETY: a published value is changed only through `T` itself, and is freed with the cell
        // alone, which the result borrows.
        match unsafe { current.as_ref() } {
            Some(made) if made.generation == generation => &made.value,
            _ => self.remake(generation),
        }
    }

    #[cold]
    fn remake(&self, generation: u32) -> &T {
        let new = Box::into_raw(Box::new(ProcessValue { generation, value: (self.make)() }));
        let mut current = self.current.load(Ordering::Acquire);
        loop {
            // SAFETY: as in `get`.
            if let Some(made) = unsafe { current.as_ref() }
                && made.generation == generation
            {
                // SAFETY: made above, and never published.
                drop(unsafe { Box::from_raw(new) });
                return &made.value;
            }
            match self.current.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: published just now, so as in `get`.
                Ok(_) => return unsafe { &(*new).value },
                Err(other) => current = other,
            }
        }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let current = *self.current.get_mut();
        // SAFETY: published by `remake`, which took it from a box. Nothing borrows the cell.
        let made = unsafe { current.as_ref() }.map(|made| made.generation);
        if made == Some(fork::generation()) {
            // SAFETY: as above.
            drop(unsafe { Box::from_raw(current) });
        }
    }
}

impl<T: Send + Sync + fmt::Debug> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerProcess").finish_non_exhaustive()
    }
}

// SAFETY: the cell returns shared references to a `T` that may be made by one thread and dropped by
// it, or seen by others; `T` must be both wherever a value can be reached.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::sync::{Arc, Mutex};

    #[test]
    fn a_value_is_dropped_with_its_cell() {
        let shared = Arc::new(());
        let cell = PerProcess::<Mutex<Option<Arc<()>>>>::new(Mutex::default);
        *cell.get().lock().unwrap() = Some(shared.clone());
        drop(cell);
        assert_eq!(Arc::strong_count(&shared), 1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "forks")]
    fn a_child_does_not_wait_for_a_lock_of_its_parent() {
        let cell = PerProcess::<Mutex<u32>>::new(Mutex::default);
        let mut held = cell.get().lock().unwrap();
        *held = 5;
        assert!(crate::child_passes(|| *cell.get().lock().unwrap() == 0));
        drop(held);
        assert_eq!(*cell.get().lock().unwrap(), 5);
    }

    #[test]
    fn all_threads_see_one_value() {
        static MADE: AtomicU32 = AtomicU32::new(0);
        static CELL: PerProcess<u32> = PerProcess::new(|| MADE.fetch_add(1, Ordering::Relaxed));
        let seen: Vec<u32> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| *CELL.get())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(seen.iter().all(|value| *value == seen[0]), "{seen:?}");
    }
}
