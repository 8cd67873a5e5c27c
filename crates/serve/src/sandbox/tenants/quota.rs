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
use crate::sandbox::records::store::{SandboxStore, max_listed};
use crate::sandbox::tenants::accounts::Account;
use crate::sandbox::tenants::stored_blobs::StoredState;

/// Time for which a count is valid.
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
    /// The charges of those whose blobs are counted, by their ids.
    charges: HashMap<String, StoredState>,
    /// Bytes that the others store.
    bytes: u64,
    /// When they were counted, if that is not long ago.
    counted: Option<Instant>,
    /// Those that are being made.
    coming: usize,
    /// Those that were made, ever.
    made: usize,
}

impl Counts {
    fn add(&mut self, id: String, state: StoredState) {
        if state.is_counted() {
            self.charges.insert(id, state);
        } else {
            self.bytes = self.bytes.saturating_add(state.bytes());
        }
    }

    fn is_empty(&self) -> bool {
        self.there + self.coming == 0 && self.bytes == 0 && self.charges.is_empty()
    }
}

/// Room for one that is being made.
pub(crate) struct SnapshotReservation {
    counter: Arc<Counter>,
    /// Its id and its charge, if it has a record.
    stored: Option<(String, StoredState)>,
}

impl SnapshotReservation {
    /// It has a record now, and this charge.
    pub(crate) fn fill(mut self, id: &str, state: StoredState) {
        self.stored = Some((id.to_owned(), state));
    }
}

impl Drop for SnapshotReservation {
    fn drop(&mut self) {
        let mut counts = lock(&self.counter.counts);
        counts.coming -= 1;
        if let Some((id, state)) = self.stored.take() {
            counts.there += 1;
            counts.add(id, state);
            counts.made += 1;
        }
    }
}

impl Counter {
    /// Counts the snapshots of the tenant if the last count is old. `admitting` is held.
    async fn count(
        &self,
        ledger: &dyn SandboxStore,
        tenant: &str,
        most: usize,
    ) -> Result<(), ErrorResponse> {
        let (made, coming) = {
            let counts = lock(&self.counts);
            if counts.counted.is_some_and(|at| at.elapsed() < COUNT_LIFETIME) {
                return Ok(());
            }
            (counts.made, counts.coming)
        };
        let known = ledger.snapshots(tenant, max_listed(most)).await?;
        let mut counts = lock(&self.counts);
        let others = known.iter().filter(|record| !counts.charges.contains_key(&record.id));
        counts.bytes = others.map(|record| record.stored).sum();
        // One that was made during the count may be among them. It is counted twice rather than not
        // at all, until the next count.
        counts.there = known.len() + (counts.made - made);
        counts.counted = (coming == 0).then(Instant::now);
        Ok(())
    }
}

impl Quota {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, tenants: Mutex::default() }
    }

    /// Charges a snapshot that this server knows at its start.
    pub(crate) fn add_known(&self, record: &SnapshotRecord, state: StoredState) {
        lock(&self.counter(&record.tenant).counts).add(record.id.clone(), state);
    }

    /// Bytes that the snapshots of each tenant store, as they were counted last, without those
    /// whose blobs are counted.
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
        counter.count(ledger, tenant, self.most).await
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
        counter.count(ledger, tenant, self.most).await?;
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

    /// Counts a tenant's snapshots anew, since this one was removed.
    pub(crate) fn recount(&self, removed: &SnapshotRecord) {
        let counter = self.counter(&removed.tenant);
        let mut counts = lock(&counter.counts);
        counts.counted = None;
        if counts.charges.remove(&removed.id).is_none() {
            counts.bytes = counts.bytes.saturating_sub(removed.stored);
        }
    }
}
