//! Instances that may answer further requests, if the guest's configuration allows it.
//!
//! Promises: no instance answers more requests than it may, and an unused one is reset after a
//! while. By default an instance answers one request, and never comes here.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::lock::lock;

/// Leases that have requests left.
pub(crate) struct ReusePool<L> {
    most: usize,
    idle: Duration,
    waiting: Mutex<Vec<WaitingLease<L>>>,
}

struct WaitingLease<L> {
    lease: L,
    used: usize,
    since: Instant,
}

/// A lease in use, and how many requests it has answered before.
pub(crate) struct UsedLease<L> {
    pub(crate) lease: L,
    count: usize,
}

impl<L> ReusePool<L> {
    pub(crate) fn new(most: usize, idle: Duration) -> Self {
        Self { most: most.max(1), idle, waiting: Mutex::new(Vec::new()) }
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<WaitingLease<L>>> {
        lock(&self.waiting)
    }

    /// The lease that was put back last, if any.
    pub(crate) fn take(&self) -> Option<UsedLease<L>> {
        if self.most == 1 {
            return None;
        }
        let taken = self.waiting().pop()?;
        (taken.since.elapsed() < self.idle)
            .then_some(UsedLease { lease: taken.lease, count: taken.used })
    }

    /// A lease that has answered nothing yet.
    pub(crate) fn fresh(lease: L) -> UsedLease<L> {
        UsedLease { lease, count: 0 }
    }

    /// Puts a lease back that has answered one request more. One that may answer no other is
    /// dropped.
    pub(crate) fn give_back(&self, used: UsedLease<L>) {
        let count = used.count + 1;
        if count < self.most {
            let waiting = WaitingLease { lease: used.lease, used: count, since: Instant::now() };
            self.waiting().push(waiting);
        }
    }

    /// Drops those that have waited for too long.
    pub(crate) fn sweep(&self) {
        let mut waiting = self.waiting();
        // The oldest come first.
        let old = waiting.iter().take_while(|w| w.since.elapsed() >= self.idle).count();
        let old: Vec<_> = waiting.drain(..old).collect();
        drop(waiting);
        // Outside of the lock: bringing an instance back takes time.
        drop(old);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_answers_no_more_requests_than_it_may() {
        let shelf = ReusePool::new(3, Duration::from_secs(600));
        let mut used = ReusePool::fresh("lease");
        for _ in 0..2 {
            shelf.give_back(used);
            used = shelf.take().expect("it may answer another");
        }
        shelf.give_back(used);
        assert!(shelf.take().is_none());
    }

    #[test]
    fn by_default_nothing_is_kept_and_what_is_idle_is_dropped() {
        let one = ReusePool::new(1, Duration::from_secs(600));
        one.give_back(ReusePool::fresh(()));
        assert!(one.take().is_none() && one.waiting().is_empty());
        let short = ReusePool::new(9, Duration::ZERO);
        short.give_back(ReusePool::fresh(()));
        assert_eq!(short.waiting().len(), 1);
        short.sweep();
        assert!(short.waiting().is_empty());
    }
}
