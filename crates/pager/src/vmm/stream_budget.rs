//! Room for pages on their way from a source to VMMs, shared by all VMMs of a process.
//!
//! Promises: pages that are streamed ahead take no more memory than the budget has, however many
//! VMMs there are. A thread takes its room before it claims pages, so no fault waits for room.
//!
//! May break it: sources that hang. Their reads hold their room, and streaming waits for the rest;
//! faults do not.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum time of one wait for room.
const TICK: Duration = Duration::from_millis(20);

/// A limit on bytes that are streamed at the same time. Clones share it.
#[derive(Clone, Debug)]
pub struct StreamBudget(Arc<StreamBudgetState>);

#[derive(Debug)]
struct StreamBudgetState {
    bytes: usize,
    used: Mutex<usize>,
    /// Rung when room is given back.
    bell: Condvar,
}

impl StreamBudgetState {
    fn used(&self) -> MutexGuard<'_, usize> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Room that was taken; given back when it is dropped.
#[derive(Debug)]
pub(super) struct StreamPermit {
    stream_budget: StreamBudget,
    bytes: usize,
}

impl StreamBudget {
    /// A budget of so many bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(StreamBudgetState { bytes, used: Mutex::new(0), bell: Condvar::new() }))
    }

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> usize {
        *self.0.used()
    }

    /// Takes room, or returns `None` once `is_over`. A request that exceeds the budget waits until
    /// it is empty.
    pub(super) fn take(&self, bytes: usize, is_over: impl Fn() -> bool) -> Option<StreamPermit> {
        let mut used = self.0.used();
        while !is_over() {
            if *used == 0 || *used + bytes <= self.0.bytes {
                *used += bytes;
                return Some(StreamPermit { stream_budget: self.clone(), bytes });
            }
            let waited = self.0.bell.wait_timeout(used, TICK);
            used = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        None
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        *self.stream_budget.0.used() -= self.bytes;
        self.stream_budget.0.bell.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_bounded_and_comes_back() {
        let stream_budget = StreamBudget::new(100);
        let first = stream_budget.take(60, || false).unwrap();
        assert!(stream_budget.take(60, || true).is_none());
        let (bell, turns) = (std::sync::Barrier::new(2), std::sync::atomic::AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                bell.wait();
                let room = stream_budget.take(60, || {
                    turns.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    false
                });
                (room, stream_budget.used())
            });
            bell.wait();
            drop(first);
            let (room, used) = waiting.join().unwrap();
            assert!(room.is_some() && used == 60);
        });
        assert_eq!(stream_budget.used(), 0);
        assert!(stream_budget.take(1000, || false).is_some(), "more than there is, alone");
    }
}
