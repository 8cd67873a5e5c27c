//! The budget for bytes of requests and answers in memory, over all guests.
//!
//! Promises: a byte is counted before it is kept, and no longer than that. A part of the budget
//! has its own limit, and counts its bytes in the whole as well. A part takes bytes only while it
//! leaves the others at least as much as it has then: of `n` parts that take all they get, each has
//! one of `n + 1` equal shares, and the last share is free for a part that has nothing yet. This is
//! the rule of dynamic thresholds that switches with shared memory use (Choudhury and Hahne, 1998).

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

    /// A part of it, of at most a `divisor`th, and of at most the bytes that it leaves free. Parts
    /// together may be more than the whole.
    pub(crate) fn part(&self, divisor: usize) -> Self {
        let (most, whole) = (self.inner.most / divisor.max(1), Some(self.clone()));
        Self { inner: Arc::new(Inner { most, used: AtomicUsize::new(0), whole }) }
    }

    /// Takes bytes if at least `rest()` are left then.
    fn take(&self, bytes: usize, rest: &dyn Fn() -> usize) -> bool {
        let Inner { most, used, whole } = &*self.inner;
        let taken = used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            used.checked_add(bytes).filter(|sum| most.checked_sub(*sum) >= Some(rest()))
        });
        if taken.is_err() {
            return false;
        }
        // A part counts bytes before its whole does and releases them after it, so the bytes of
        // concurrent requests are among these, and they never exceed the rule together.
        let own = || used.load(Ordering::Acquire);
        let fits = whole.as_ref().is_none_or(|whole| whole.take(bytes, &own));
        if !fits {
            used.fetch_sub(bytes, Ordering::Relaxed);
        }
        fits
    }

    fn release(&self, bytes: usize) {
        if let Some(whole) = &self.inner.whole {
            whole.release(bytes);
        }
        self.inner.used.fetch_sub(bytes, Ordering::Release);
    }

    /// Nothing yet.
    pub(crate) fn share(&self) -> Share {
        Share { budget: self.clone(), bytes: 0 }
    }

    /// Whether something else counts in it, or will.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
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

    /// The count of `bytes` of it, or of all if it has fewer, which ends by itself.
    #[cfg(feature = "fleet")]
    pub(crate) fn split(&mut self, bytes: usize) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { budget: self.budget.clone(), bytes }
    }

    /// Counts `bytes` more; `false`, and nothing is counted, where they do not fit.
    #[must_use]
    pub(crate) fn add(&mut self, bytes: usize) -> bool {
        let fits = self.budget.take(bytes, &|| 0);
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
        assert!(shares[1].add(2) && !shares[1].add(1));
        // It leaves as much as it has.
        assert!(!shares[2].add(2) && shares[2].add(1) && !shares[2].add(1));
        assert_eq!((whole.used(), parts[2].used()), (8, 1));
        shares.remove(0);
        assert!(shares[1].add(1));
        // Bytes of no part need no rest.
        assert!(whole.share().add(6));
        drop(shares);
        assert!(whole.used() == 0 && parts.iter().all(|part| part.used() == 0));
    }

    /// Parts that take all they get, one byte at a time.
    fn flood(shares: &mut [Share]) {
        while shares.iter_mut().map(|share| share.add(1)).filter(|took| *took).count() > 0 {}
    }

    #[test]
    fn parts_that_take_all_they_get_leave_an_equal_share_to_another() {
        for count in 1..=20 {
            let whole = Budget::new(10_000);
            let parts: Vec<Budget> = (0..=count).map(|_| whole.part(2)).collect();
            let mut shares: Vec<Share> = parts.iter().map(Budget::share).collect();
            let mut last = shares.pop().unwrap();
            flood(&mut shares);
            let fair = 10_000 / (count + 1);
            for part in &parts[..count] {
                assert!(part.used().abs_diff(fair) <= count, "{} of {count}", part.used());
            }
            // Half of it at once, and the rest of an equal share as the others drop theirs.
            assert!(last.add(fair / 2), "{count}");
            for (index, part) in parts[..count].iter().enumerate() {
                shares[index] = part.share();
                while last.add(1) {}
                flood(&mut shares);
            }
            let fair = 10_000 / (count + 2);
            assert!(parts[count].used() + 2 * count >= fair, "{} of {fair}", parts[count].used());
        }
    }

    #[test]
    fn concurrent_requests_of_a_part_keep_its_rule_together() {
        let whole = Budget::new(100_000);
        let part = whole.part(1);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let mut share = part.share();
                        while share.add(7) {
                            assert!(whole.used() <= 50_000, "{}", whole.used());
                        }
                    }
                });
            }
        });
        assert_eq!((whole.used(), part.used()), (0, 0));
    }
}
