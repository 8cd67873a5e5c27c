//! The budget for bytes of requests and answers in memory, over all guests.
//!
//! Promises: a byte is counted before it is kept, and no longer than that.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The budget; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    most: usize,
    used: AtomicUsize,
}

/// Bytes that are counted, until this is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Budget,
    bytes: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.inner.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Budget {
    pub(crate) fn new(most: usize) -> Self {
        Self { inner: Arc::new(Inner { most, used: AtomicUsize::new(0) }) }
    }

    /// Nothing yet.
    pub(crate) fn share(&self) -> Share {
        Share { budget: self.clone(), bytes: 0 }
    }

    pub(crate) fn used(&self) -> usize {
        self.inner.used.load(Ordering::Relaxed)
    }
}

impl Share {
    /// Counts `bytes` more; `false`, and nothing is counted, where they do not fit.
    #[must_use]
    pub(crate) fn add(&mut self, bytes: usize) -> bool {
        let Inner { most, used } = &*self.budget.inner;
        let taken = used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| sum <= most)
        });
        if taken.is_ok() {
            self.bytes += bytes;
        }
        taken.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_reservation_is_not_counted_and_a_dropped_one_is_free_again() {
        let budget = Budget::new(10);
        let mut one = budget.share();
        let mut two = budget.share();
        assert!(one.add(6) && two.add(4));
        assert!(!two.add(1) && !two.add(usize::MAX));
        assert_eq!(budget.used(), 10);
        drop(one);
        assert!(two.add(6));
        drop(two);
        assert_eq!(budget.used(), 0);
    }
}
