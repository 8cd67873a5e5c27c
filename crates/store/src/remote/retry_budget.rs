//! The retry budget of a remote: a token bucket over all of its requests.
//!
//! A retry takes tokens, and a success gives some back. So single failures are retried, and a
//! server that fails most requests gets about one attempt for each instead of several: retries do
//! not hold an overloaded server down. The costs are those of the AWS SDKs. Time adds tokens as
//! well, so that a remote with few requests recovers.
//!
//! Promises: first attempts are free. `requests` failed requests cause at most
//! `MAX_TOKENS / RETRY_COST` retries, and one for each second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Tokens of a full bucket.
const MAX_TOKENS: f64 = 500.0;
/// Tokens of a retry.
pub(super) const RETRY_COST: u32 = 5;
/// Tokens of a retry after an attempt without an answer.
pub(super) const TIMEOUT_COST: u32 = 10;
/// Tokens that a success at the first attempt adds.
const SUCCESS_GAIN: u32 = 1;
/// Tokens that a second adds.
const TOKENS_PER_SECOND: f64 = 5.0;

/// Retries of all remotes of this process.
static PROCESS: Counters = Counters::new();

/// Numbers of retries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetryCounts {
    /// Requests that were sent again after a failure.
    pub retries: u64,
    /// Retries that a spent retry budget refused. The request fails then, or waits longer if a
    /// guest needs its pages.
    pub refused: u64,
}

impl RetryCounts {
    /// The counts of all remotes of this process so far.
    #[must_use]
    pub fn of_process() -> Self {
        PROCESS.counts()
    }
}

#[derive(Debug, Default)]
struct Counters {
    retries: AtomicU64,
    refused: AtomicU64,
}

impl Counters {
    const fn new() -> Self {
        Self { retries: AtomicU64::new(0), refused: AtomicU64::new(0) }
    }

    fn count(&self, taken: bool) {
        let counter = if taken { &self.retries } else { &self.refused };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn counts(&self) -> RetryCounts {
        RetryCounts {
            retries: self.retries.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}

/// The bucket.
#[derive(Debug)]
pub(super) struct RetryBudget {
    bucket: Mutex<Bucket>,
    counters: Counters,
}

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    /// When time last added tokens.
    refilled: Instant,
}

impl Default for RetryBudget {
    fn default() -> Self {
        let bucket = Bucket { tokens: MAX_TOKENS, refilled: Instant::now() };
        Self { bucket: Mutex::new(bucket), counters: Counters::new() }
    }
}

impl Bucket {
    fn add(&mut self, tokens: f64) {
        self.tokens = (self.tokens + tokens).min(MAX_TOKENS);
    }

    fn take(&mut self, cost: u32, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.refilled);
        self.refilled = self.refilled.max(now);
        self.add(passed.as_secs_f64() * TOKENS_PER_SECOND);
        let enough = self.tokens >= f64::from(cost);
        if enough {
            self.tokens -= f64::from(cost);
        }
        enough
    }
}

impl RetryBudget {
    /// Takes the tokens of a retry. False if there are too few: the request must not be sent again.
    #[must_use]
    pub(super) fn take(&self, cost: u32) -> bool {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = bucket.take(cost, Instant::now());
        drop(bucket);
        self.counters.count(taken);
        PROCESS.count(taken);
        taken
    }

    /// Returns the tokens of the last retry of a request that the server answered, or adds some if
    /// it needed none.
    pub(super) fn note_success(&self, last_cost: u32) {
        let gain = last_cost.max(SUCCESS_GAIN);
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner).add(f64::from(gain));
    }

    pub(super) fn counts(&self) -> RetryCounts {
        self.counters.counts()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_bucket_empties_and_is_filled_by_successes_and_by_time() {
        let start = Instant::now();
        let mut bucket = Bucket { tokens: MAX_TOKENS, refilled: start };
        let taken = (0..1000).filter(|_| bucket.take(RETRY_COST, start)).count();
        assert_eq!(taken, 100);
        let later = start + Duration::from_secs(3);
        let taken = (0..1000).filter(|_| bucket.take(RETRY_COST, later)).count();
        assert_eq!(taken, 3);
        bucket.add(f64::from(RETRY_COST));
        assert!(bucket.take(RETRY_COST, later) && !bucket.take(RETRY_COST, later));
        let much_later = later + Duration::from_secs(10_000);
        assert!(bucket.take(RETRY_COST, much_later));
        assert!(bucket.tokens <= MAX_TOKENS);
        // A clock that goes back adds nothing.
        let before = bucket.tokens;
        assert!(bucket.take(RETRY_COST, start) && bucket.tokens < before);
    }
}
