//! The bytes of saved sandboxes that a fleet has outside of this host: those of other hosts, and
//! paused ones without an owner.
//!
//! The ledger is read for a tenant with a budget of saved states, at most once in
//! [`COUNT_LIFETIME`]. In between, the sandboxes that this host takes and releases are counted at
//! once. May break it: states that other hosts save count from the next reading.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::registry::{Sandboxes, lock};
use crate::error_response::ErrorResponse;

/// How long a count is valid.
const COUNT_LIFETIME: Duration = Duration::from_secs(10);

/// The bytes of each tenant.
#[derive(Default)]
pub(super) struct StoredElsewhere(Mutex<HashMap<Arc<str>, Arc<Count>>>);

#[derive(Default)]
struct Count {
    /// Held while the ledger is read; others wait for the result.
    reading: tokio::sync::Mutex<Option<Instant>>,
    bytes: Mutex<u64>,
}

impl StoredElsewhere {
    fn count(&self, tenant: &Arc<str>) -> Arc<Count> {
        lock(&self.0).entry(tenant.clone()).or_default().clone()
    }

    /// Bytes of a tenant, as counted last.
    pub(super) fn bytes(&self, tenant: &str) -> u64 {
        lock(&self.0).get(tenant).map_or(0, |count| *lock(&count.bytes))
    }

    /// This host releases a sandbox with these bytes.
    pub(super) fn add(&self, tenant: &str, bytes: u64) {
        if let Some(count) = lock(&self.0).get(tenant) {
            let mut sum = lock(&count.bytes);
            *sum = sum.saturating_add(bytes);
        }
    }

    /// This host takes a sandbox with these bytes.
    #[cfg(feature = "fleet")]
    pub(super) fn subtract(&self, tenant: &str, bytes: u64) {
        if let Some(count) = lock(&self.0).get(tenant) {
            let mut sum = lock(&count.bytes);
            *sum = sum.saturating_sub(bytes);
        }
    }
}

impl Sandboxes {
    /// Counts the saved states of a tenant in the fleet before they are checked, if there is a
    /// budget of them and the last count is old.
    pub(super) async fn count_stored(&self, tenant: &Arc<str>) -> Result<(), ErrorResponse> {
        if !self.ledger.releases() || self.accounts.budgets().of(tenant).stored.is_none() {
            return Ok(());
        }
        let count = self.stored_elsewhere.count(tenant);
        let mut counted = count.reading.lock().await;
        if counted.is_some_and(|at| at.elapsed() < COUNT_LIFETIME) {
            return Ok(());
        }
        self.quota.count(&*self.ledger, tenant).await?;
        // The size of an unreadable entry is not known.
        let known = self.ledger.sandboxes_of(tenant, usize::MAX).await?;
        let bytes = {
            let (all, killed) = (lock(&self.all), lock(&self.killed));
            let is_elsewhere = |id: &String| !all.contains_key(id) && !killed.contains_key(id);
            let elsewhere = known.records.iter().filter(|record| is_elsewhere(&record.id));
            elsewhere.fold(0, |sum: u64, record| sum.saturating_add(record.stored))
        };
        *lock(&count.bytes) = bytes;
        *counted = Some(Instant::now());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_follow_the_sandboxes_that_this_host_takes_and_releases() {
        let stored = StoredElsewhere::default();
        let tenant: Arc<str> = "acme".into();
        // A tenant that was never counted has no budget.
        stored.add(&tenant, 5);
        assert_eq!(stored.bytes(&tenant), 0);
        *lock(&stored.count(&tenant).bytes) = 10;
        stored.add(&tenant, 5);
        assert_eq!((stored.bytes(&tenant), stored.bytes("other")), (15, 0));
        #[cfg(feature = "fleet")]
        {
            stored.subtract(&tenant, 7);
            assert_eq!(stored.bytes(&tenant), 8);
            stored.subtract(&tenant, 70);
            assert_eq!(stored.bytes(&tenant), 0);
        }
    }
}
