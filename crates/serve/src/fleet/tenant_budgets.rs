//! Budgets of tenants over all hosts: each host reports the use of its tenants in heartbeats, and
//! adds the reports of the others to its own use.
//!
//! Promises: a check costs no request. The use of another host is late by its heartbeat, and one
//! heartbeat has [`super::policy::MAX_REPORTED_TENANTS`] tenants. Hosts can exceed a budget
//! together, by admissions within that time. A host that is cut off admits until its lease is over.
//! Names of tenants are in no heartbeat. The price: about 100 bytes in a heartbeat for each tenant
//! with limits that uses something. In a fleet in which each host hears a part, heartbeats would be
//! too rare with them: there they have none, and these budgets hold on each host.

use std::collections::BTreeMap;
use std::sync::Mutex;

use sha2::{Digest, Sha256};

use super::Fleet;
use super::clock::now;
use super::policy::{KnownUses, MonotonicTime, TenantUse, TenantUses, UseReports};
use crate::lock::lock;

/// Uses of other hosts, and the reports of this one.
#[derive(Default)]
pub(super) struct TenantBudgets {
    known: Mutex<KnownUses>,
    reports: Mutex<UseReports>,
}

/// The key of a tenant in heartbeats.
fn tenant_key(tenant: &str) -> String {
    let digest = Sha256::digest(tenant.as_bytes());
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// The part of a life that is the same in all lives of a host.
fn node_of(life: &str) -> &str {
    life.split_once('-').map_or(life, |(node, _)| node)
}

impl Fleet {
    /// The use of tenants on this host, for its next heartbeat.
    pub(super) fn tenant_report(&self) -> Option<TenantUses> {
        if lock(&self.heartbeat_groups).is_partial() {
            return None;
        }
        let uses = self.host()?.sandboxes()?.tenant_uses();
        let uses: BTreeMap<String, TenantUse> =
            uses.into_iter().map(|(tenant, used)| (tenant_key(&tenant), used)).collect();
        lock(&self.tenant_budgets.reports).next(&uses)
    }

    /// Another host reports the use of tenants.
    pub(super) fn receive_tenants(&self, life: &str, report: TenantUses, expires: MonotonicTime) {
        let node = node_of(life);
        if node != self.node {
            lock(&self.tenant_budgets.known).receive(node, report, expires);
        }
    }

    /// The use of a tenant on other hosts, in this window.
    pub(super) fn tenant_use(&self, tenant: &str, window: u64) -> TenantUse {
        lock(&self.tenant_budgets.known).elsewhere(&tenant_key(tenant), window, now())
    }
}
