//! The number of snapshots of a tenant, and its limit.
//!
//! Counted once in a while, and kept up to date in between: snapshots of other hosts of a fleet are counted that much
//! later. Admissions by one host never exceed the limit, however many requests are concurrent.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hyper::StatusCode;

use super::ledger::Ledger;
use super::registry::lock;
use crate::error_response::ErrorResponse;

/// How long a count is valid.
const COUNT_LIFETIME: Duration = Duration::from_secs(30);

/// The snapshots of each tenant.
pub(super) struct Quota {
    most: usize,
    tenants: Mutex<HashMap<String, Arc<Counter>>>,
}

#[derive(Default)]
struct Counter {
    /// Held while one is admitted; others wait for the count.
    admitting: tokio::sync::Mutex<()>,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    /// Those that have a record.
    there: usize,
    /// When they were counted, if that is not long ago.
    counted: Option<Instant>,
    /// Those that are being made.
    coming: usize,
    /// Those that were made, ever.
    made: usize,
}

/// Room for one that is being made.
pub(super) struct SnapshotReservation {
    counter: Arc<Counter>,
    kept: bool,
}

impl SnapshotReservation {
    /// It has a record now.
    pub(super) fn used(mut self) {
        self.kept = true;
    }
}

impl Drop for SnapshotReservation {
    fn drop(&mut self) {
        let mut counts = lock(&self.counter.counts);
        counts.coming -= 1;
        counts.there += usize::from(self.kept);
        counts.made += usize::from(self.kept);
    }
}

impl Quota {
    pub(super) fn new(most: usize) -> Self {
        Self { most, tenants: Mutex::default() }
    }

    fn counter(&self, tenant: &str) -> Arc<Counter> {
        lock(&self.tenants).entry(tenant.to_owned()).or_default().clone()
    }

    /// Reserves room for one more snapshot of a tenant.
    pub(super) async fn room(
        &self,
        ledger: &Ledger,
        tenant: &str,
    ) -> Result<SnapshotReservation, ErrorResponse> {
        let counter = self.counter(tenant);
        let admitting = counter.admitting.lock().await;
        let before = {
            let counts = lock(&counter.counts);
            let good = counts.counted.is_some_and(|at| at.elapsed() < COUNT_LIFETIME);
            (!good).then_some((counts.made, counts.coming))
        };
        if let Some((made, coming)) = before {
            let there = ledger.snapshots(tenant).await?.len();
            let mut counts = lock(&counter.counts);
            // One that was made during the count may be among them. It is counted twice rather than not at all, until the next count.
            counts.there = there + (counts.made - made);
            counts.counted = (coming == 0).then(Instant::now);
        }
        let mut counts = lock(&counter.counts);
        let own = counts.there + counts.coming;
        if own >= self.most {
            let most = self.most;
            let message = format!("a tenant may have {most} snapshots, and has {own}; delete some");
            return Err(ErrorResponse::busy(StatusCode::TOO_MANY_REQUESTS, message));
        }
        counts.coming += 1;
        drop((counts, admitting));
        Ok(SnapshotReservation { counter, kept: false })
    }

    /// Counts a tenant's snapshots anew, since some were removed.
    pub(super) fn recount(&self, tenant: &str) {
        lock(&self.counter(tenant).counts).counted = None;
    }
}
