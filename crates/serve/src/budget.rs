//! The budget for bytes of requests and answers in memory, over all guests.
//!
//! Promises: a byte is counted before it is kept, and no longer than that. A part of the budget
//! has its own limit, and counts its bytes in the whole as well.

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
    /// The budget that this is a part of.
    whole: Option<Budget>,
}

/// Bytes that are counted, until this is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Budget,
    bytes: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.release(self.bytes);
    }
}

impl Budget {
    pub(crate) fn new(most: usize) -> Self {
        Self { inner: Arc::new(Inner { most, used: AtomicUsize::new(0), whole: None }) }
    }

    /// A part of it, of at most a `divisor`th. Parts together may be more than the whole.
    pub(crate) fn part(&self, divisor: usize) -> Self {
        let (most, whole) = (self.inner.most / divisor.max(1), Some(self.clone()));
        Self { inner: Arc::new(Inner { most, used: AtomicUsize::new(0), whole }) }
    }

    fn take(&self, bytes: usize) -> bool {
        let Inner { most, used, whole } = &*self.inner;
        let taken = used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| sum <= most)
        });
        if taken.is_err() {
            return false;
        }
        let fits = whole.as_ref().is_none_or(|whole| whole.take(bytes));
        if !fits {
            used.fetch_sub(bytes, Ordering::Relaxed);
        }
        fits
    }

    fn release(&self, bytes: usize) {
        self.inner.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.inner.whole {
            whole.release(bytes);
        }
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
    /// Whether nothing is counted.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Counts `bytes` more; `false`, and nothing is counted, where they do not fit.
    #[must_use]
    pub(crate) fn add(&mut self, bytes: usize) -> bool {
        let fits = self.budget.take(bytes);
        if fits {
            self.bytes += bytes;
        }
        fits
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

    #[test]
    fn a_part_has_its_own_limit_and_counts_in_the_whole() {
        let whole = Budget::new(10);
        let parts = [whole.part(2), whole.part(2), whole.part(4)];
        let mut shares: Vec<Share> = parts.iter().map(Budget::share).collect();
        assert!(shares[0].add(5) && !shares[0].add(1));
        assert!(shares[1].add(4));
        // The whole has less left than this part.
        assert!(!shares[2].add(2) && shares[2].add(1) && !shares[2].add(1));
        assert_eq!((whole.used(), parts[2].used()), (10, 1));
        shares.remove(0);
        assert!(shares[1].add(1));
        drop(shares);
        assert!(whole.used() == 0 && parts.iter().all(|part| part.used() == 0));
    }
}
