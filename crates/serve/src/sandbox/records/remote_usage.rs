//! The bytes of saved sandboxes that a fleet has outside of this host: those of other hosts, and
//! paused ones without an owner.
//!
//! The ledger is read for a tenant with a budget of saved states, at most once in
//! [`COUNT_LIFETIME`]. In between, the sandboxes that this host takes and releases are counted at
//! once. May break it: states that other hosts save count from the next reading.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::lock::lock;

/// Time for which a count is valid.
pub(crate) const COUNT_LIFETIME: Duration = Duration::from_secs(10);

/// The bytes of each tenant.
#[derive(Default)]
pub(crate) struct RemoteUsage(Mutex<HashMap<Arc<str>, Arc<Count>>>);

#[derive(Default)]
pub(crate) struct Count {
    /// Held while the ledger is read; others wait for the result.
    pub(crate) reading: tokio::sync::Mutex<Option<Instant>>,
    pub(crate) bytes: Mutex<u64>,
}

impl RemoteUsage {
    pub(crate) fn count(&self, tenant: &Arc<str>) -> Arc<Count> {
        lock(&self.0).entry(tenant.clone()).or_default().clone()
    }

    /// Bytes of a tenant, as counted last.
    pub(crate) fn bytes(&self, tenant: &str) -> u64 {
        lock(&self.0).get(tenant).map_or(0, |count| *lock(&count.bytes))
    }

    /// This host releases a sandbox with these bytes.
    pub(crate) fn add(&self, tenant: &str, bytes: u64) {
        if let Some(count) = lock(&self.0).get(tenant) {
            let mut sum = lock(&count.bytes);
            *sum = sum.saturating_add(bytes);
        }
    }

    /// This host takes a sandbox with these bytes.
    #[cfg(feature = "fleet")]
    pub(crate) fn subtract(&self, tenant: &str, bytes: u64) {
        if let Some(count) = lock(&self.0).get(tenant) {
            let mut sum = lock(&count.bytes);
            *sum = sum.saturating_sub(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_follow_the_sandboxes_that_this_host_takes_and_releases() {
        let stored = RemoteUsage::default();
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
