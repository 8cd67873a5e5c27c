//! The sandboxes of each tenant on all hosts, from a watch of the ledger: running ones, and paused
//! ones without an owner.
//!
//! Promises: a count costs no request. It is late by as much as the watch, so that hosts which make
//! sandboxes of one tenant at the same moment can exceed its limit together: by at most what each
//! of them admits within that delay, which is a few milliseconds where NATS answers. A host whose
//! watch is not complete has no counts. The price: NATS sends every host the key of each entry that
//! changes, without its value, and a host keeps 16 bytes for each sandbox of the fleet. That grows
//! by the square of the hosts, so a host that hears a part of a large fleet does not watch: it
//! lists the sandboxes of a tenant when that makes one.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, Weak};
use std::time::Duration;

use super::nats::{self, EntryChange};
use super::{Fleet, record};
use crate::lock::lock;

/// Pause before the watch is begun again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// Pause before a host of a large fleet checks whether the fleet is small now.
const PARTIAL_INTERVAL: Duration = Duration::from_secs(30);

/// The counts.
#[derive(Default)]
pub(crate) struct TenantCounts {
    known: Mutex<KnownSandboxes>,
}

#[derive(Default)]
struct KnownSandboxes {
    /// The watch has delivered every entry.
    complete: bool,
    /// The random part of each id, by the part that identifies the tenant. Two tenants may share
    /// that: their counts are then too high, and the ledger decides.
    tenants: HashMap<String, HashSet<u64>>,
}

/// Both parts of an id.
fn parts(id: &str) -> Option<(&str, u64)> {
    let key_length = record::key(id)?.len() - id.len() - 1;
    let (tenant, random) = id.split_at(key_length);
    Some((tenant, u64::from_str_radix(random, 16).ok()?))
}

impl TenantCounts {
    /// Sandboxes of a tenant that are not among `here`; `None` while the watch is not complete.
    pub(crate) fn elsewhere<'a>(
        &self,
        tenant: &str,
        here: impl Iterator<Item = &'a str>,
    ) -> Option<usize> {
        let known = lock(&self.known);
        let Some(all) = known.tenants.get(&record::tenant_prefix(tenant)) else {
            return known.complete.then_some(0);
        };
        let here = here.filter_map(parts).filter(|(_, random)| all.contains(random)).count();
        known.complete.then(|| all.len() - here)
    }

    /// Sandboxes of all tenants.
    pub(super) fn count(&self) -> usize {
        lock(&self.known).tenants.values().map(HashSet::len).sum()
    }

    fn observe(&self, watched: &EntryChange) {
        let mut known = lock(&self.known);
        let id = watched.key.split_once('.').map_or("", |(_, id)| id);
        if let Some((tenant, random)) = parts(id) {
            if watched.removed {
                if let Some(all) = known.tenants.get_mut(tenant) {
                    all.remove(&random);
                    if all.is_empty() {
                        known.tenants.remove(tenant);
                    }
                }
            } else {
                known.tenants.entry(tenant.to_owned()).or_default().insert(random);
            }
        }
        known.complete |= watched.left == 0;
    }

    fn forget(&self) {
        *lock(&self.known) = KnownSandboxes::default();
    }
}

/// Counts until the fleet is dropped.
pub(super) async fn counting(fleet: Weak<Fleet>) {
    loop {
        let Some(this) = fleet.upgrade() else { return };
        if lock(&this.heartbeat_groups).is_partial() {
            this.tenants.forget();
            drop(this);
            tokio::time::sleep(PARTIAL_INTERVAL).await;
            continue;
        }
        let (client, sandboxes) = (this.links.client.clone(), this.links.sandboxes.clone());
        drop(this);
        let watched = nats::watch(&client, &sandboxes, |watched| {
            let Some(this) = fleet.upgrade() else { return false };
            if lock(&this.heartbeat_groups).is_partial() {
                return false;
            }
            match watched {
                Some(watched) => this.tenants.observe(&watched),
                // Nothing is there yet.
                None => lock(&this.tenants.known).complete = true,
            }
            true
        });
        let ended = watched.await;
        let Some(this) = fleet.upgrade() else { return };
        if let Err(error) = ended {
            tracing::warn!(%error, "the sandboxes of tenants are not counted for now");
        }
        // A removal may have been missed.
        this.tenants.forget();
        drop(this);
        tokio::time::sleep(RESTART_PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observe(counts: &TenantCounts, id: &str, removed: bool, left: u64) {
        let key = record::key(id).expect("it is an id");
        counts.observe(&EntryChange { key, removed, left });
    }

    #[test]
    fn sandboxes_count_once_on_whichever_host_they_are_and_no_more_once_removed() {
        let counts = TenantCounts::default();
        let id =
            |tenant: &str, number: u64| format!("{}{number:016x}", record::tenant_prefix(tenant));
        let here = [id("acme", 1), id("acme", 9)];
        let elsewhere = |counts: &TenantCounts, tenant: &str| {
            counts.elsewhere(tenant, here.iter().map(String::as_str))
        };
        observe(&counts, &id("acme", 1), false, 2);
        assert_eq!(elsewhere(&counts, "acme"), None, "there are more");
        assert_eq!(elsewhere(&counts, "other"), None);
        observe(&counts, &id("acme", 2), false, 1);
        observe(&counts, &id("other", 3), false, 0);
        assert_eq!((elsewhere(&counts, "acme"), counts.count()), (Some(1), 3));
        // A save is a change of the entry, and no further sandbox.
        observe(&counts, &id("acme", 2), false, 0);
        assert_eq!((elsewhere(&counts, "acme"), elsewhere(&counts, "nobody")), (Some(1), Some(0)));
        observe(&counts, &id("acme", 2), true, 0);
        observe(&counts, &id("acme", 2), true, 0);
        assert_eq!((elsewhere(&counts, "acme"), elsewhere(&counts, "other")), (Some(0), Some(1)));
        counts.forget();
        assert_eq!(elsewhere(&counts, "other"), None);
    }
}
