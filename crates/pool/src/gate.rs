//! Threads that wait for an item to come back.
//!
//! A return looks for waiting threads only after the item is where they look, and a waiting thread
//! counts itself before it looks. Each side thus stores one word and then loads the other's, and
//! one of the two loads must see the store. Acquire and release do not promise that: a processor
//! may do its load before its store is visible, and arm64 does. [`Gate::wait`] has a fence, and
//! returns store the item and load the count with `SeqCst`.

use std::time::Instant;

use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering, between_return_and_look, fence, locked};

pub(crate) struct Gate {
    /// Threads that wait, so that a return signals only when there is one.
    waiting: AtomicUsize,
    closed: Mutex<()>,
    came_back: Condvar,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self { waiting: AtomicUsize::new(0), closed: Mutex::new(()), came_back: Condvar::new() }
    }

    /// Waits for a [`Gate::signal`] unless `there` finds an item; `false` at the deadline, if one
    /// is set.
    ///
    /// Whatever `there` loads must be stored with `SeqCst`, or under a lock that it takes, before
    /// the signal.
    pub(crate) fn wait(&self, deadline: Option<Instant>, there: impl FnOnce() -> bool) -> bool {
        let guard = locked(&self.closed);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // Between the count and the look: an item that came back before the count sent no signal.
        fence(Ordering::SeqCst);
        let there = there();
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let over = left.is_some_and(|left| left.is_zero());
        match left {
            _ if there || over => drop(guard),
            Some(left) => drop(self.came_back.wait_timeout(guard, left)),
            None => drop(self.came_back.wait(guard)),
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        !over
    }

    /// Wakes every waiting thread, to look again. The caller stored the item before, with `SeqCst`
    /// or under a lock that they take.
    #[inline]
    pub(crate) fn signal(&self) {
        between_return_and_look();
        if self.waiting.load(Ordering::SeqCst) > 0 {
            let _guard = locked(&self.closed);
            self.came_back.notify_all();
        }
    }
}
