//! The admission of sandboxes and saved states against the budgets of their tenant and of the
//! server.
//!
//! Promises: no tenant has more sandboxes on this server than its limit. In a fleet this limit is
//! for all hosts, and paused sandboxes count. Hosts that admit at the same moment may exceed it
//! together, by as much as [`SandboxStore::elsewhere`] is late. A sandbox that the ledger has no
//! more does not count. The memory of a tenant on other hosts is late by their reports
//! ([`SandboxStore::use_elsewhere`]), and its saved states there by
//! [`remote_usage`](crate::sandbox::records::remote_usage). Budgets of all tenants together
//! are for this server. Sandboxes that this server admits at the same time never exceed a budget
//! together. One that is killed while it is recorded is struck out again, and its client gets an
//! error.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use afresh::Session;
use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::lifecycle::tasks::to_its_end;
use crate::sandbox::records::remote_usage::COUNT_LIFETIME;
use crate::sandbox::records::store::RecordedSandboxes;
#[cfg(doc)]
use crate::sandbox::records::store::SandboxStore;
use crate::sandbox::tenants::accounts::Account;
use crate::sandbox::tenants::budgets::Limits;
use crate::sandbox::tenants::charge::memory_of;

/// The budget of the number of sandboxes.
const SANDBOXES: &str = "max-sandboxes";
/// The budget of the memory of live sandboxes.
pub(crate) const MEMORY: &str = "max-memory-mib";
const STORED: &str = "max-stored-mib";

const COUNT_ADVICE: &str = "kill some, paused ones included";

/// Things that a tenant, or the whole server, has now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResourceUse {
    pub(crate) sandboxes: u64,
    /// Bytes of memory of live sandboxes.
    pub(crate) memory: u64,
    /// Bytes of saved states.
    pub(crate) stored: u64,
}

impl ResourceUse {
    fn add(&mut self, sandbox: &Sandbox) {
        self.sandboxes += 1;
        let memory = sandbox.charge.memory().saturating_add(sandbox.watchers.bytes());
        self.memory = self.memory.saturating_add(memory);
        self.stored = self.stored.saturating_add(sandbox.charge.stored_apart());
    }
}

/// Refuses more memory than the budget has.
fn admit_memory(
    account: &Account,
    limits: &Limits,
    held: &ResourceUse,
    more: u64,
) -> Result<(), ErrorResponse> {
    let advice = "pause or kill some sandboxes";
    account.admit(MEMORY, limits.memory, (held.memory, more), advice)
}

/// Refuses another saved state of at least `more` bytes.
fn admit_stored(
    account: &Account,
    limits: &Limits,
    held: &ResourceUse,
    more: u64,
) -> Result<(), ErrorResponse> {
    let advice = "kill paused sandboxes or delete snapshots";
    account.admit(STORED, limits.stored, (held.stored, more.max(1)), advice)
}

impl Sandboxes {
    /// Takes new sandboxes in, all of them or none.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        new: Vec<Arc<Sandbox>>,
    ) -> Result<(), ErrorResponse> {
        let Some(tenant) = new.first().map(|first| first.tenant.clone()) else { return Ok(()) };
        self.count_stored(&tenant).await?;
        // Before others see them: the end of one that is killed waits until it is recorded.
        let entries = new.iter().map(|sandbox| sandbox.standing.begin());
        let entries: Option<Vec<_>> = entries.collect();
        let entries = entries.ok_or_else(ErrorResponse::host)?;
        if let Err(refusal) = self.take_in(&new, None) {
            let is_count = |refusal: &ErrorResponse| {
                refusal.budget.as_ref().is_some_and(|excess| excess.name == SANDBOXES)
            };
            if !is_count(&refusal) || refusal.status != StatusCode::TOO_MANY_REQUESTS {
                return Err(refusal);
            }
            // The counts of other hosts are late by a moment: the ledger decides.
            let most = self.max_sandboxes(&tenant);
            let _place = self.list_place(&tenant).await?;
            let known = self.ledger.sandboxes_of(&tenant, most.saturating_add(1)).await?;
            self.take_in(&new, Some(&known))?;
        }
        let this = self.clone();
        to_its_end(async move {
            let entering = new.iter().zip(entries);
            let entering = entering.map(|(sandbox, entry)| this.ledger.create(&**sandbox, entry));
            let entered = futures_util::future::join_all(entering).await;
            let entered: Result<(), _> = entered.into_iter().collect();
            let killed = new.iter().find(|sandbox| sandbox.killed.load(Ordering::Acquire));
            let entered =
                entered.and(killed.map_or(Ok(()), |one| Err(Sandbox::not_found(&one.id))));
            if entered.is_err() {
                for sandbox in &new {
                    lock(&this.all).remove(&sandbox.id);
                    // Their entries are removed; no client has learnt of the others.
                    let _ = this.ledger.remove(&**sandbox).await;
                }
            } else {
                this.accounts.add_sandboxes(&tenant, new.len());
            }
            entered
        })
        .await
    }

    /// Maximum sandboxes of a tenant.
    pub(crate) fn max_sandboxes(&self, tenant: &str) -> usize {
        self.accounts.budgets().of(tenant).sandboxes.unwrap_or(self.config.max_sandboxes)
    }

    /// Refuses `more` sandboxes of a tenant that are too many even without those on other hosts.
    pub(crate) fn check_count(&self, tenant: &Arc<str>, more: usize) -> Result<(), ErrorResponse> {
        let is_own = |(_, sandbox): &(&String, &Arc<Sandbox>)| sandbox.tenant == *tenant;
        let own = {
            let (all, killed) = (lock(&self.all), lock(&self.killed));
            all.iter().chain(killed.iter()).filter(is_own).count()
        };
        let most = self.max_sandboxes(tenant) as u64;
        let account = self.accounts.of(tenant);
        account.admit(SANDBOXES, Some(most), (own as u64, more as u64), COUNT_ADVICE)
    }

    /// Takes new sandboxes in if their tenant may have them. `known` are the tenant's sandboxes in
    /// the ledger; without them the counts of the fleet are used.
    fn take_in(
        &self,
        new: &[Arc<Sandbox>],
        known: Option<&RecordedSandboxes>,
    ) -> Result<(), ErrorResponse> {
        let Some(first) = new.first() else { return Ok(()) };
        let mut all = lock(&self.all);
        if self.ending.load(Ordering::Relaxed) {
            let message = "this server is ending, and makes no sandbox; try again";
            return Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, message));
        }
        // A call of one that was killed may run on, with all of its memory.
        let killed = lock(&self.killed);
        let own = all.iter().chain(killed.iter());
        let own = own.filter(|(_, sandbox)| sandbox.tenant == first.tenant);
        let own = own.map(|(id, _)| id.as_str());
        let here = own.clone().count();
        let elsewhere = match known {
            None => self.ledger.elsewhere(&first.tenant, &mut own.into_iter()),
            Some(known) => {
                let here = |id: &String| all.contains_key(id) || killed.contains_key(id);
                let elsewhere = known.records.iter().filter(|record| !here(&record.id)).count();
                Some(elsewhere + known.unreadable)
            }
        };
        let own = elsewhere.map_or(usize::MAX, |elsewhere| here + elsewhere) as u64;
        let budgets = self.accounts.budgets();
        let limits = budgets.of(&first.tenant);
        let (account, server) = (self.accounts.of(&first.tenant), &self.accounts.server);
        let most = limits.sandboxes.unwrap_or(self.config.max_sandboxes) as u64;
        let (advice, more) = (COUNT_ADVICE, new.len() as u64);
        account.admit(SANDBOXES, Some(most), (own, more), advice)?;
        let (mut held, total) = self.held_in(&all, &killed, &first.tenant);
        self.add_elsewhere(&mut held, &first.tenant, &limits);
        let most = budgets.server.sandboxes.map(|most| most as u64);
        server.admit(SANDBOXES, most, (total.sandboxes, more), advice)?;
        let memory = new.iter().map(|sandbox| sandbox.charge.memory()).sum();
        for (account, limits, held) in
            [(&account, &limits, &held), (server, &budgets.server, &total)]
        {
            admit_memory(account, limits, held, memory)?;
            // Each sandbox is saved sooner or later.
            admit_stored(account, limits, held, 0)?;
        }
        drop(killed);
        all.extend(new.iter().map(|sandbox| (sandbox.id.clone(), sandbox.clone())));
        Ok(())
    }

    /// The holdings of a tenant, and of all tenants together.
    fn held_in(
        &self,
        all: &HashMap<String, Arc<Sandbox>>,
        killed: &HashMap<String, Arc<Sandbox>>,
        tenant: &str,
    ) -> (ResourceUse, ResourceUse) {
        let (mut own, mut total) = (ResourceUse::default(), ResourceUse::default());
        for sandbox in all.values().chain(killed.values()) {
            total.add(sandbox);
            if *sandbox.tenant == *tenant {
                own.add(sandbox);
            }
        }
        let snapshots = self.quota.stored();
        own.stored += snapshots.get(tenant).copied().unwrap_or(0);
        total.stored += snapshots.values().sum::<u64>();
        own.stored = own.stored.saturating_add(self.stored_blobs.bytes(tenant));
        for (_, bytes) in self.stored_blobs.all() {
            total.stored = total.stored.saturating_add(bytes);
        }
        (own, total)
    }

    /// Adds the holdings of a tenant on other hosts, as far as it has limits of them.
    fn add_elsewhere(&self, held: &mut ResourceUse, tenant: &str, limits: &Limits) {
        if limits.memory.is_some() {
            let elsewhere = self.accounts.elsewhere(tenant).memory;
            held.memory = held.memory.saturating_add(elsewhere);
        }
        if limits.stored.is_some() {
            held.stored = held.stored.saturating_add(self.remote_usage.bytes(tenant));
        }
    }

    /// The holdings of each tenant.
    pub(crate) fn resource_use(&self) -> HashMap<Arc<str>, ResourceUse> {
        let mut held: HashMap<Arc<str>, ResourceUse> = HashMap::new();
        {
            let (all, killed) = (lock(&self.all), lock(&self.killed));
            for sandbox in all.values().chain(killed.values()) {
                held.entry(sandbox.tenant.clone()).or_default().add(sandbox);
            }
        }
        for (tenant, bytes) in self.quota.stored() {
            held.entry(tenant.into()).or_default().stored += bytes;
        }
        for (tenant, bytes) in self.stored_blobs.all() {
            held.entry(tenant).or_default().stored += bytes;
        }
        held
    }

    /// Adds the memory and storage of all tenants since the last time to their totals.
    pub(crate) fn account_resource_use(&self) {
        let time = {
            let mut accounted = lock(&self.accounted);
            let time = accounted.elapsed();
            *accounted = Instant::now();
            time
        };
        for (tenant, held) in self.resource_use() {
            self.accounts.add_held(&tenant, (held.memory, held.stored), time);
        }
    }

    /// Refuses memory for more live sandboxes of a tenant, and charges nothing.
    pub(crate) fn check_memory(&self, tenant: &Arc<str>, more: u64) -> Result<(), ErrorResponse> {
        let (all, killed) = (lock(&self.all), lock(&self.killed));
        self.memory_in(&all, &killed, tenant, more)
    }

    fn memory_in(
        &self,
        all: &HashMap<String, Arc<Sandbox>>,
        killed: &HashMap<String, Arc<Sandbox>>,
        tenant: &Arc<str>,
        more: u64,
    ) -> Result<(), ErrorResponse> {
        let budgets = self.accounts.budgets();
        let (mut held, total) = self.held_in(all, killed, tenant);
        let limits = budgets.of(tenant);
        self.add_elsewhere(&mut held, tenant, &limits);
        admit_memory(&self.accounts.of(tenant), &limits, &held, more)?;
        admit_memory(&self.accounts.server, &budgets.server, &total, more)
    }

    /// Fails if the tenant's own budget of memory is used up. That of the server is not asked: the
    /// work of one tenant would stop that of all others.
    fn check_own_memory(&self, tenant: &Arc<str>) -> Result<(), ErrorResponse> {
        let (all, killed) = (lock(&self.all), lock(&self.killed));
        let limits = self.accounts.budgets().of(tenant);
        let (mut held, _) = self.held_in(&all, &killed, tenant);
        self.add_elsewhere(&mut held, tenant, &limits);
        admit_memory(&self.accounts.of(tenant), &limits, &held, 0)
    }

    /// Refuses background work of a sandbox that has added memory while its tenant's budget of
    /// memory is used up. Work that adds none continues.
    pub(crate) fn check_growth(&self, sandbox: &Sandbox) -> Result<(), ErrorResponse> {
        if sandbox.charge.has_grown() {
            self.check_own_memory(&sandbox.tenant)?;
            sandbox.charge.admit_growth();
        }
        Ok(())
    }

    /// Charges the memory of a sandbox that comes back from the store. One that alone is larger
    /// than the budget of its tenant comes back where the tenant has no other, so that a client can
    /// make room.
    pub(crate) fn admit_resume(&self, sandbox: &Sandbox) -> Result<(), ErrorResponse> {
        let (all, killed) = (lock(&self.all), lock(&self.killed));
        let expected = sandbox.charge.expected();
        let limits = self.accounts.budgets().of(&sandbox.tenant);
        let (mut held, _) = self.held_in(&all, &killed, &sandbox.tenant);
        self.add_elsewhere(&mut held, &sandbox.tenant, &limits);
        let most = limits.memory.filter(|_| held.memory == 0).unwrap_or(u64::MAX);
        self.memory_in(&all, &killed, &sandbox.tenant, expected.min(most))?;
        sandbox.charge.resume();
        Ok(())
    }

    /// Charges a restarted sandbox with the memory that it has, in place of the memory that it was
    /// expected to have.
    pub(crate) fn admit_restarted(
        &self,
        sandbox: &Sandbox,
        session: &Session,
    ) -> Result<(), ErrorResponse> {
        let bytes = memory_of(session);
        let (all, killed) = (lock(&self.all), lock(&self.killed));
        let more = bytes.saturating_sub(sandbox.charge.memory());
        if more > 0 {
            self.memory_in(&all, &killed, &sandbox.tenant, more)?;
        }
        sandbox.charge.set(bytes);
        Ok(())
    }

    /// Refuses to save a state of at least `more` bytes, in addition to the present ones.
    /// `replaced` are bytes that the new state replaces.
    pub(crate) fn check_stored(
        &self,
        tenant: &Arc<str>,
        replaced: u64,
        more: u64,
    ) -> Result<(), ErrorResponse> {
        let (all, killed) = (lock(&self.all), lock(&self.killed));
        let budgets = self.accounts.budgets();
        let (mut held, mut total) = self.held_in(&all, &killed, tenant);
        let limits = budgets.of(tenant);
        self.add_elsewhere(&mut held, tenant, &limits);
        held.stored = held.stored.saturating_sub(replaced);
        total.stored = total.stored.saturating_sub(replaced);
        admit_stored(&self.accounts.of(tenant), &limits, &held, more)?;
        admit_stored(&self.accounts.server, &budgets.server, &total, more)
    }
}

impl Sandboxes {
    /// Counts the saved states of a tenant in the fleet before they are checked, if there is a
    /// budget of them and the last count is old.
    pub(crate) async fn count_stored(&self, tenant: &Arc<str>) -> Result<(), ErrorResponse> {
        if !self.ledger.releases() || self.accounts.budgets().of(tenant).stored.is_none() {
            return Ok(());
        }
        let count = self.remote_usage.count(tenant);
        let mut counted = count.reading.lock().await;
        if counted.is_some_and(|at| at.elapsed() < COUNT_LIFETIME) {
            return Ok(());
        }
        self.quota.count(&*self.ledger, tenant).await?;
        let _place = self.list_place(tenant).await?;
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
