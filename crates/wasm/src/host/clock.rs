//! The clock that guests read. It never goes backwards, in any state of the guest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use wasmtime_wasi::HostMonotonicClock;

/// The monotonic clock of a guest. The warm-up and every lease share it, so no reading in the warm
/// state is later than a reading in a lease.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    start: Instant,
    /// The reading at `start`, in nanoseconds.
    at_start: u64,
    /// How far states that came from elsewhere have moved it on.
    ahead: Arc<AtomicU64>,
    /// Whether the guest has ever looked at it.
    asked: Arc<AtomicBool>,
}

impl Clock {
    /// Reads `reading` now: the last reading of a frozen guest, or 0.
    pub(crate) fn from(reading: u64) -> Self {
        Self {
            start: Instant::now(),
            at_start: reading,
            ahead: Arc::default(),
            asked: Arc::default(),
        }
    }

    /// Moves it on, so that it reads no less than `reading` from now on: a state in which it did
    /// was brought here.
    pub(crate) fn reach(&self, reading: u64) {
        let behind = reading.saturating_sub(self.elapsed());
        self.ahead.fetch_add(behind, Ordering::AcqRel);
        if behind > 0 {
            self.asked.store(true, Ordering::Release);
        }
    }

    /// An upper bound of all guest readings so far, in nanoseconds.
    pub(crate) fn latest(&self) -> u64 {
        if self.asked.load(Ordering::Acquire) { self.elapsed() } else { self.at_start }
    }

    fn elapsed(&self) -> u64 {
        let gone = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.at_start.saturating_add(gone).saturating_add(self.ahead.load(Ordering::Acquire))
    }
}

impl HostMonotonicClock for Clock {
    fn resolution(&self) -> u64 {
        1
    }

    fn now(&self) -> u64 {
        // Written once, so that threads do not take the line from one another.
        if !self.asked.load(Ordering::Relaxed) {
            self.asked.store(true, Ordering::Release);
        }
        self.elapsed()
    }
}
