//! The number and size of the snapshots of each tenant, and the limit of the number.
//!
//! Counted once in a while, and kept up to date in between: snapshots of other hosts of a fleet are
//! counted that much later. Admissions by one host never exceed the limit, however many requests
//! are concurrent.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::records::record::SnapshotRecord;
use crate::sandbox::records::store::SandboxStore;
use crate::sandbox::tenants::accounts::Account;

/// How long a count is valid.
const COUNT_LIFETIME: Duration = Duration::from_secs(30);

/// Tenants with counts before those without snapshots lose them.
const MAX_COUNTERS: usize = 1024;

/// The snapshots of each tenant.
pub(crate) struct Quota {
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
    /// Bytes that these store.
    bytes: u64,
    /// When they were counted, if that is not long ago.
    counted: Option<Instant>,
    /// Those that are being made.
    coming: usize,
    /// Those that were made, ever.
    made: usize,
}

impl Counts {
    fn is_empty(&self) -> bool {
        self.there + self.coming == 0 && self.bytes == 0
    }
}

/// Room for one that is being made.
pub(crate) struct SnapshotReservation {
    counter: Arc<Counter>,
    /// Bytes that it stores, if it has a record.
    stored: Option<u64>,
}

impl SnapshotReservation {
    /// It has a record now, and stores these bytes.
    pub(crate) fn fill(mut self, bytes: u64) {
        self.stored = Some(bytes);
    }
}

impl Drop for SnapshotReservation {
    fn drop(&mut self) {
        let mut counts = lock(&self.counter.counts);
        counts.coming -= 1;
        if let Some(bytes) = self.stored {
            counts.there += 1;
            counts.bytes = counts.bytes.saturating_add(bytes);
            counts.made += 1;
        }
    }
}

impl Counter {
    /// Counts the snapshots of the tenant if the last count is old. `admitting` is held.
    async fn count(&self, ledger: &dyn SandboxStore, tenant: &str) -> Result<(), ErrorResponse> {
        let (made, coming) = {
            let counts = lock(&self.counts);
            if counts.counted.is_some_and(|at| at.elapsed() < COUNT_LIFETIME) {
                return Ok(());
            }
            (counts.made, counts.coming)
        };
        let known = ledger.snapshots(tenant).await?;
        let mut counts = lock(&self.counts);
        counts.bytes = known.iter().map(|record| record.stored).sum();
        // One that was made during the count may be among them. It is counted twice rather than not
        // at all, until the next count.
        counts.there = known.len() + (counts.made - made);
        counts.counted = (coming == 0).then(Instant::now);
        Ok(())
    }
}

impl Quota {
    /// `known` are the snapshots that this server knows at its start.
    pub(crate) fn new(most: usize, known: &[SnapshotRecord]) -> Self {
        let quota = Self { most, tenants: Mutex::default() };
        for record in known {
            lock(&quota.counter(&record.tenant).counts).bytes += record.stored;
        }
        quota
    }

    /// Bytes that the snapshots of each tenant store, as they were counted last.
    pub(crate) fn stored(&self) -> HashMap<String, u64> {
        let tenants = lock(&self.tenants);
        let bytes = tenants.iter().map(|(name, counter)| (name, lock(&counter.counts).bytes));
        bytes.filter(|(_, bytes)| *bytes > 0).map(|(name, bytes)| (name.clone(), bytes)).collect()
    }

    fn counter(&self, tenant: &str) -> Arc<Counter> {
        let mut tenants = lock(&self.tenants);
        if tenants.len() >= MAX_COUNTERS && !tenants.contains_key(tenant) {
            tenants.retain(|_, counter| {
                let is_empty = lock(&counter.counts).is_empty();
                Arc::strong_count(counter) > 1 || !is_empty
            });
        }
        tenants.entry(tenant.to_owned()).or_default().clone()
    }

    /// Counts the snapshots of a tenant, unless that was done a moment ago.
    pub(crate) async fn count(
        &self,
        ledger: &dyn SandboxStore,
        tenant: &str,
    ) -> Result<(), ErrorResponse> {
        let counter = self.counter(tenant);
        let _admitting = counter.admitting.lock().await;
        counter.count(ledger, tenant).await
    }

    /// Reserves room for one more snapshot of a tenant.
    pub(crate) async fn room(
        &self,
        ledger: &dyn SandboxStore,
        account: &Account,
        tenant: &str,
    ) -> Result<SnapshotReservation, ErrorResponse> {
        let counter = self.counter(tenant);
        let admitting = counter.admitting.lock().await;
        counter.count(ledger, tenant).await?;
        let mut counts = lock(&counter.counts);
        let own = counts.there + counts.coming;
        if own >= self.most {
            let used = (own as u64, 1);
            account.admit(
                "max-snapshots",
                Some(self.most as u64),
                used,
                "delete some snapshots",
            )?;
        }
        counts.coming += 1;
        drop((counts, admitting));
        Ok(SnapshotReservation { counter, stored: None })
    }

    /// Counts a tenant's snapshots anew, since one was removed that stored these bytes.
    pub(crate) fn recount(&self, tenant: &str, bytes: u64) {
        let counter = self.counter(tenant);
        let mut counts = lock(&counter.counts);
        counts.counted = None;
        counts.bytes = counts.bytes.saturating_sub(bytes);
    }
}
