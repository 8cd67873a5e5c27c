//! The blobs of saved states, as they count in budgets and bills.
//!
//! Promises: a tenant of a server without a fleet is charged for each blob that its saved states
//! reach, once, except for blobs of the templates that the server has when the state is saved or
//! found. In a fleet each state is charged alone, with all of its blobs.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::{Arc, Mutex};

use afresh::{Cause, Sha256, Store};
use serde::Deserialize;

use crate::lock::lock;

/// Tenants with counts before those without blobs lose them.
const MAX_COUNTERS: usize = 1024;

/// A blob of the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blob {
    pub(super) digest: Sha256,
    bytes: u64,
}

/// The blobs that a manifest names.
#[derive(Deserialize)]
struct Contents {
    config: Entry,
    layers: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    digest: String,
    size: u64,
}

/// The blobs of a state, each of them once.
pub(crate) fn blobs_of(store: &Store, state: Sha256) -> Result<Vec<Blob>, Cause> {
    let contents: Contents = serde_json::from_slice(&fs::read(store.blob_path(state))?)?;
    let mut known = HashSet::new();
    let mut blobs = Vec::with_capacity(contents.layers.len() + 1);
    for entry in contents.layers.iter().chain([&contents.config]) {
        let digest: Sha256 = entry.digest.parse()?;
        if known.insert(digest) {
            blobs.push(Blob { digest, bytes: entry.size });
        }
    }
    Ok(blobs)
}

/// The digests of the blobs of a state.
pub(crate) fn digests_of(store: &Store, state: Sha256) -> Result<HashSet<Sha256>, Cause> {
    Ok(blobs_of(store, state)?.iter().map(|blob| blob.digest).collect())
}

/// The blobs that the saved states of each tenant reach.
#[derive(Default)]
pub(crate) struct StoredBlobs(Mutex<HashMap<Arc<str>, Arc<Counter>>>);

#[derive(Default)]
struct Counter(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    /// The size of each blob, and the number of states that reach it.
    blobs: HashMap<Sha256, (u64, usize)>,
    /// The sum of the sizes.
    bytes: u64,
}

impl StoredBlobs {
    /// Charges a tenant for a state.
    pub(crate) fn charge(&self, tenant: &Arc<str>, blobs: Vec<Blob>) -> StoredState {
        let counter = {
            let mut tenants = lock(&self.0);
            if tenants.len() >= MAX_COUNTERS && !tenants.contains_key(tenant) {
                // Each state has one, and so has a charge that begins.
                tenants.retain(|_, counter| Arc::strong_count(counter) > 1);
            }
            tenants.entry(tenant.clone()).or_default().clone()
        };
        let mut counts = lock(&counter.0);
        for blob in &blobs {
            let (_, states) = counts.blobs.entry(blob.digest).or_insert((blob.bytes, 0));
            *states += 1;
            if *states == 1 {
                counts.bytes = counts.bytes.saturating_add(blob.bytes);
            }
        }
        drop(counts);
        StoredState { bytes: sum(&blobs), shared: Some((counter, blobs)) }
    }

    /// Bytes of the blobs of a tenant.
    pub(crate) fn bytes(&self, tenant: &str) -> u64 {
        lock(&self.0).get(tenant).map_or(0, |counter| lock(&counter.0).bytes)
    }

    /// Bytes of the blobs of each tenant with some.
    pub(crate) fn all(&self) -> Vec<(Arc<str>, u64)> {
        let tenants = lock(&self.0);
        let bytes = tenants.iter().map(|(name, counter)| (name.clone(), lock(&counter.0).bytes));
        bytes.filter(|(_, bytes)| *bytes > 0).collect()
    }
}

fn sum(blobs: &[Blob]) -> u64 {
    blobs.iter().fold(0, |sum, blob| sum.saturating_add(blob.bytes))
}

/// The charge of a saved state. It ends with the value.
#[derive(Default)]
pub(crate) struct StoredState {
    bytes: u64,
    /// The blobs of a charge that states of the same tenant share.
    shared: Option<(Arc<Counter>, Vec<Blob>)>,
}

impl StoredState {
    /// The charge of a state whose blobs are not known here, or that are not shared.
    pub(crate) fn of_size(bytes: u64) -> Self {
        Self { bytes, shared: None }
    }

    /// The charge of a state that shares none of its blobs.
    pub(crate) fn alone(blobs: &[Blob]) -> Self {
        Self::of_size(sum(blobs))
    }

    /// Bytes of the state, with those that it shares.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether [`StoredBlobs`] counts it.
    pub(crate) fn is_counted(&self) -> bool {
        self.shared.is_some()
    }

    /// Bytes that no other state of the tenant reaches.
    pub(crate) fn own_bytes(&self) -> u64 {
        let Some((counter, blobs)) = &self.shared else { return self.bytes };
        let counts = lock(&counter.0);
        let own = blobs
            .iter()
            .filter(|blob| counts.blobs.get(&blob.digest).is_some_and(|(_, states)| *states == 1));
        own.fold(0, |sum, blob| sum.saturating_add(blob.bytes))
    }
}

impl Drop for StoredState {
    fn drop(&mut self) {
        let Some((counter, blobs)) = self.shared.take() else { return };
        let mut counts = lock(&counter.0);
        for blob in blobs {
            let Some((bytes, states)) = counts.blobs.get_mut(&blob.digest) else { continue };
            *states -= 1;
            if *states == 0 {
                let bytes = *bytes;
                counts.blobs.remove(&blob.digest);
                counts.bytes = counts.bytes.saturating_sub(bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(number: u8, bytes: u64) -> Blob {
        Blob { digest: Sha256([number; 32]), bytes }
    }

    #[test]
    fn a_blob_counts_once_for_a_tenant_until_its_last_state_is_gone() {
        let stored = StoredBlobs::default();
        let [acme, other]: [Arc<str>; 2] = ["acme".into(), "other".into()];
        let first = stored.charge(&acme, vec![blob(1, 10)]);
        let second = stored.charge(&acme, vec![blob(1, 10), blob(2, 5)]);
        assert_eq!((first.bytes(), first.own_bytes()), (10, 0));
        assert_eq!((second.bytes(), second.own_bytes()), (15, 5));
        let apart = stored.charge(&other, vec![blob(1, 10)]);
        assert_eq!((stored.bytes(&acme), stored.bytes(&other)), (15, 10));
        drop(first);
        assert_eq!((stored.bytes(&acme), second.own_bytes()), (15, 15));
        drop((second, apart));
        assert_eq!((stored.bytes(&acme), stored.all().len()), (0, 0));
    }

    #[test]
    fn counts_outlive_many_other_tenants() {
        let stored = StoredBlobs::default();
        let kept = stored.charge(&"acme".into(), vec![blob(1, 10)]);
        for number in 0..2 * MAX_COUNTERS {
            drop(stored.charge(&format!("t{number}").into(), vec![blob(2, 1)]));
        }
        assert!(lock(&stored.0).len() <= MAX_COUNTERS);
        assert_eq!((stored.bytes("acme"), kept.bytes()), (10, 10));
    }
}
