//! A mutex that a child of a fork can lock, also if a thread of its parent held it.
//!
//! `std::sync::Mutex` stays locked in such a child without end: the thread that would unlock it is
//! missing there. The value can be half-changed, so the child gets a new one, and the old one is
//! leaked.
//!
//! Promises: a lock that is held by a thread of this process is waited for; one that was held in a
//! parent never is. The word of the lock distinguishes the two: it has the generation of the
//! process that holds it.

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::{fork, futex};

/// Longest wait before a thread looks at the lock again; it is woken when that is free.
const LOOK_TIMEOUT: Duration = Duration::from_secs(10);

/// A mutex without poisoning. A child of a fork takes it over from the threads of its parent.
pub struct InheritedMutex<T> {
    /// The generation of the process that holds it; 0 while the lock is free.
    holder: AtomicU32,
    /// Threads that wait. A child inherits the number, which costs it a system call an unlock.
    waiting: AtomicU32,
    value: UnsafeCell<T>,
}

/// The right to use the value of a lock; a panic gives it back too.
pub struct InheritedMutexGuard<'a, T>(&'a InheritedMutex<T>);

impl<T> InheritedMutex<T> {
    /// A free lock.
    #[must_use]
    pub const fn new(value: T) -> Self {
        let (holder, waiting) = (AtomicU32::new(0), AtomicU32::new(0));
        Self { holder, waiting, value: UnsafeCell::new(value) }
    }
}

impl<T: Default> InheritedMutex<T> {
    /// Locks it. In a child, a lock that a thread of its parent held has a new value.
    #[inline]
    pub fn lock(&self) -> InheritedMutexGuard<'_, T> {
        match self.take(fork::generation()) {
            Ok(guard) => guard,
            Err(own) => self.wait(own),
        }
    }

    /// As [`InheritedMutex::lock`]; `None` where another thread of this process holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<InheritedMutexGuard<'_, T>> {
        self.take(fork::generation()).ok()
    }

    /// Takes the lock for a process; its generation where a thread of it has the lock.
    #[inline]
    fn take(&self, own: u32) -> Result<InheritedMutexGuard<'_, T>, u32> {
        match self.holder.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(InheritedMutexGuard(self)),
            Err(holder) if holder == own => Err(own),
            Err(parent) => self.take_over(parent, own),
        }
    }

    #[cold]
    fn take_over(&self, parent: u32, own: u32) -> Result<InheritedMutexGuard<'_, T>, u32> {
        let new = T::default();
        match self.holder.compare_exchange(parent, own, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => {
                let guard = InheritedMutexGuard(self);
                // SAFETY: the lock is this thread's, and no other thread of this process had it.
                // The old value is not dropped: it can be half-changed.
                unsafe { self.value.get().write(new) };
                Ok(guard)
            }
            // Another thread of this process was faster.
            Err(_) => Err(own),
        }
    }

    #[cold]
    fn wait(&self, own: u32) -> InheritedMutexGuard<'_, T> {
        // Counted before the look: the holder frees the lock first and loads the count then, so
        // one of the two sees the other.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let guard = loop {
            if let Ok(guard) = self.take(own) {
                break guard;
            }
            futex::wait(&self.holder, own, LOOK_TIMEOUT);
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        guard
    }
}

impl<T> Deref for InheritedMutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `holder` was set for this guard and is cleared only when it is dropped.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for InheritedMutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as for `deref`, and `&mut self` makes this the only reference through the guard.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for InheritedMutexGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.holder.store(0, Ordering::SeqCst);
        if self.0.waiting.load(Ordering::SeqCst) > 0 {
            futex::wake_all(&self.0.holder);
        }
    }
}

impl<T: Default> Default for InheritedMutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> fmt::Debug for InheritedMutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InheritedMutex").finish_non_exhaustive()
    }
}

impl<T: fmt::Debug> fmt::Debug for InheritedMutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

// SAFETY: the value is reached only through a guard, and threads of one process have one guard at a
// time; moving it between threads that way needs `T: Send`, as for `std::sync::Mutex`. A thread of
// a parent has its own copy of all memory.
unsafe impl<T: Send> Sync for InheritedMutex<T> {}
// SAFETY: a reference to a guard gives references to the value alone.
unsafe impl<T: Sync> Sync for InheritedMutexGuard<'_, T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_threads_have_the_value_one_at_a_time() {
        let (threads, turns) = if cfg!(miri) { (2, 20) } else { (8, 20_000) };
        let count = InheritedMutex::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| (0..turns).for_each(|_| *count.lock() += 1));
            }
        });
        assert_eq!(*count.lock(), threads * turns);
    }

    #[test]
    fn a_holder_of_this_process_is_waited_for_and_a_panic_frees_the_lock() {
        let lock = InheritedMutex::new(vec![1]);
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lock.lock().clone());
            while lock.waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            drop(held);
            assert_eq!(waiting.join().unwrap(), [1]);
        });
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut held = lock.lock();
            held.push(2);
            panic!("a test");
        }));
        assert!(panicked.is_err());
        assert_eq!(*lock.lock(), [1, 2]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "forks")]
    fn a_child_takes_over_what_its_parent_held_and_keeps_the_rest() {
        let (held, free) = (InheritedMutex::new(vec![1]), InheritedMutex::new(vec![2]));
        let mut guard = held.lock();
        guard.push(3);
        assert!(crate::child_passes(|| {
            let taken = held.lock();
            let new = taken.is_empty() && held.try_lock().is_none();
            drop(taken);
            // A child of the child, too: the lock is free there.
            new && held.try_lock().is_some() && *free.lock() == [2]
        }));
        drop(guard);
        assert_eq!((held.lock().len(), free.lock().len()), (2, 1));
    }
}
