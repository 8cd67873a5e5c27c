//! Keeping this host's lease, and looking after those of others.
//!
//! Promises: a lease that was broken is never renewed. This host then begins a new life and keeps
//! those of its sandboxes that no other host has taken, by compare-and-set in the ledger. Their
//! state is unchanged.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::Fleet;
use super::clock::now;
use super::nats::{self, BucketEntry, NatsConnection, NatsError};
use super::policy::{Lease, LeaseParameters, MonotonicTime, Verdict};
use crate::format_version::FormatVersion;
use crate::lock::lock;
use crate::sandbox::records::store::UnknownFields;

/// Neighbours that each host watches.
const WATCHED_NEIGHBOURS: usize = 2;
/// How long a host that a request waited for is watched.
const SUSPECT_TIMEOUT: Duration = Duration::from_secs(60);
/// No entry has this number.
const NO_REVISION: u64 = 0;
/// The keys of lives. Those of the sandboxes of hosts have more parts.
const LIVES: &str = "*";
/// Entries of the bucket of leases that are read.
const MAX_LIVES: usize = 200_000;
/// Lives that are over and remembered.
const MAX_ENDED_LIVES: usize = 10_000;

/// A host's entry in the bucket of leases.
#[derive(Debug, Default, Serialize, Deserialize)]
struct LeaseEntry {
    #[serde(default)]
    version: FormatVersion,
    name: String,
    /// Renewals, so that every entry differs from the one before.
    beat: u64,
    /// Another host broke its lease.
    broken: bool,
    /// Its length, which is the same on all hosts.
    #[serde(default)]
    lease_ms: u64,
    /// The fingerprint of the key that the host seals entries by.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    key: String,
    #[serde(flatten)]
    unknown: UnknownFields,
}

impl LeaseEntry {
    /// The entry once another host has broken the lease.
    fn broken(self) -> Self {
        let Self { version, unknown, .. } = self;
        Self { version, broken: true, unknown, ..Self::default() }
    }
}

fn milliseconds(parameters: LeaseParameters) -> u64 {
    u64::try_from(parameters.time.as_millis()).unwrap_or(u64::MAX)
}

fn bytes(life: &LeaseEntry) -> Bytes {
    // Text and numbers.
    Bytes::from(serde_json::to_vec(life).unwrap_or_default())
}

/// Makes the entry of a new life. It may be there already: by an earlier attempt of this host,
/// which had no answer.
pub(super) async fn enter(
    links: &NatsConnection,
    life: &str,
    name: &str,
    parameters: LeaseParameters,
) -> Result<u64, NatsError> {
    let lease_ms = milliseconds(parameters);
    let key = links.fingerprint.clone();
    let entry = LeaseEntry { name: name.to_owned(), lease_ms, key, ..LeaseEntry::default() };
    let entry = bytes(&entry);
    match nats::create(&links.hosts, life, entry.clone()).await {
        Err(NatsError::Changed) => match nats::find(&links.hosts, life).await? {
            Some(found) if found.value == entry => Ok(found.revision),
            _ => Err(NatsError::Changed),
        },
        made => made,
    }
}

/// Refuses a lease of another length, or another key, than that of the hosts that renew theirs: one
/// host would give up entries that another still relies on, or could not read them. The entry of
/// `life` is removed then.
pub(super) async fn check_parameters(
    links: &NatsConnection,
    life: &str,
    parameters: LeaseParameters,
) -> Result<(), afresh::Cause> {
    let own = nats::patiently(async || nats::find(&links.hosts, life).await).await?;
    let own = own.ok_or("the lease has already expired")?;
    let lease_ms = milliseconds(parameters);
    let all = async || nats::all(&links.client, &links.hosts, LIVES, MAX_LIVES).await;
    for found in nats::patiently(all).await? {
        let Ok(other) = serde_json::from_slice::<LeaseEntry>(&found.value) else { continue };
        let renews = own.time < found.time.saturating_add(other.lease_ms.saturating_mul(2));
        if other.broken || !renews {
            continue;
        }
        if other.key != links.fingerprint {
            let _ = nats::remove(&links.hosts, life, own.revision).await;
            let name = &other.name;
            return Err(format!(
                "the host `{name}` seals entries of the ledger by another key than this host, or by none; all hosts of a fleet need the same `entry-key`"
            )
            .into());
        }
        if other.lease_ms != lease_ms && other.lease_ms != 0 {
            let _ = nats::remove(&links.hosts, life, own.revision).await;
            let (name, theirs) = (&other.name, other.lease_ms);
            return Err(format!(
                "the host `{name}` has a lease of {theirs} ms, and {lease_ms} ms are configured here; all hosts of a fleet need the same"
            )
            .into());
        }
    }
    Ok(())
}

/// Lives and names of the hosts whose leases hold, one for each host: of two entries that hold, the
/// times of the last renewals differ by at most twice the lease.
pub(super) async fn list_lives(links: &NatsConnection) -> Result<Vec<(String, String)>, NatsError> {
    let found = nats::all(&links.client, &links.hosts, LIVES, MAX_LIVES).await?;
    let newest = found.iter().map(|entry| entry.time).max().unwrap_or_default();
    let lives = found.into_iter().filter_map(|found| {
        let entry = serde_json::from_slice::<LeaseEntry>(&found.value).ok()?;
        let renews = newest <= found.time.saturating_add(entry.lease_ms.saturating_mul(2));
        (!entry.broken && renews).then_some((found.key, entry.name))
    });
    Ok(lives.collect())
}

/// Lives whose leases were broken, and whose sandboxes may not be swept yet.
pub(super) async fn broken(links: &NatsConnection) -> Result<Vec<String>, NatsError> {
    let found = nats::all(&links.client, &links.hosts, LIVES, MAX_LIVES).await?;
    let is_broken = |found: &BucketEntry| {
        serde_json::from_slice::<LeaseEntry>(&found.value).is_ok_and(|entry| entry.broken)
    };
    Ok(found.into_iter().filter(is_broken).map(|found| found.key).collect())
}

/// A life of a host whose lease is not broken, if it has one.
pub(super) async fn unbroken_life(
    links: &NatsConnection,
    node: &str,
) -> Result<Option<String>, NatsError> {
    let found = nats::all(&links.client, &links.hosts, LIVES, MAX_LIVES).await?;
    let is_unbroken = |found: &BucketEntry| {
        found.key.split_once('-').is_some_and(|(host, _)| host == node)
            && serde_json::from_slice::<LeaseEntry>(&found.value).is_ok_and(|entry| !entry.broken)
    };
    Ok(found.into_iter().find(is_unbroken).map(|found| found.key))
}

/// Removes the entry of a broken life, whose sandboxes are swept. A host that comes back finds no
/// lease.
pub(super) async fn forget_broken(links: &NatsConnection, life: &str) -> Result<(), NatsError> {
    let Some(found) = nats::find(&links.hosts, life).await? else { return Ok(()) };
    if !serde_json::from_slice::<LeaseEntry>(&found.value).is_ok_and(|entry| entry.broken) {
        return Ok(());
    }
    match nats::remove(&links.hosts, life, found.revision).await {
        Err(NatsError::Changed) => Ok(()),
        done => done,
    }
}

/// The names of [`lives`].
pub(super) async fn names(links: &NatsConnection) -> Result<Vec<String>, NatsError> {
    Ok(list_lives(links).await?.into_iter().map(|(_, name)| name).collect())
}

/// Renews the lease until the fleet is dropped.
pub(super) async fn renewing(fleet: Weak<Fleet>) {
    let mut beat = 0;
    loop {
        let Some(fleet) = fleet.upgrade() else { return };
        let renewal = fleet.parameters.renewal();
        let begun = tokio::time::Instant::now();
        beat += 1;
        renew(&fleet, beat, renewal * 2).await;
        drop(fleet);
        tokio::time::sleep_until(begun + renewal).await;
    }
}

async fn renew(fleet: &Arc<Fleet>, beat: u64, patience: Duration) {
    let (life, revision) = {
        let own = lock(&fleet.own);
        (own.life.clone(), own.lease.revision())
    };
    let lease_ms = milliseconds(fleet.parameters);
    let key = fleet.links.fingerprint.clone();
    let entry =
        LeaseEntry { name: fleet.name.clone(), beat, lease_ms, key, ..LeaseEntry::default() };
    let sent = now();
    let renewing = nats::update(&fleet.links.hosts, &life, bytes(&entry), revision);
    match tokio::time::timeout(patience, renewing).await {
        Ok(Ok(revision)) => {
            {
                let mut own = lock(&fleet.own);
                if !own.lease.safe(sent) {
                    // Entries that could not change in that time prove nothing.
                    lock(&fleet.suspicion).reset();
                    lock(&fleet.interrupted).reset();
                    tracing::warn!(life, "the lease is back");
                }
                own.lease.renewed(revision, sent);
            }
            settle(fleet);
        }
        Ok(Err(NatsError::Changed)) => match read_life(fleet, &life).await {
            Ok(Some((revision, entry))) if !entry.broken => {
                lock(&fleet.own).lease.read_back(revision);
            }
            Ok(_) => begin_again(fleet).await,
            Err(error) => tracing::warn!(%error, "the lease cannot be read"),
        },
        Ok(Err(error)) => tracing::warn!(%error, "the lease was not renewed"),
        Err(_) => tracing::warn!("the lease was not renewed in time"),
    }
}

/// Settles doubtful sandboxes in a task, so that renewals come first. The rest is tried after the
/// next renewal.
fn settle(fleet: &Arc<Fleet>) {
    let fleet = fleet.clone();
    tokio::spawn(async move {
        let Ok(_turn) = fleet.settling.try_lock() else { return };
        if let Some(sandboxes) = fleet.host().and_then(|host| host.sandboxes()) {
            fleet.settle(&*sandboxes).await;
        }
    });
}

/// The revision and the entry of a life; `None` without an entry. One that cannot be read is
/// broken.
async fn read_life(fleet: &Fleet, life: &str) -> Result<Option<(u64, LeaseEntry)>, NatsError> {
    let Some(found) = nats::find(&fleet.links.hosts, life).await? else { return Ok(None) };
    let entry = serde_json::from_slice(&found.value);
    Ok(Some((found.revision, entry.unwrap_or_else(|_| LeaseEntry::default().broken()))))
}

/// Begins a new life after a lease that was broken.
async fn begin_again(fleet: &Arc<Fleet>) {
    let sandboxes = fleet.host().and_then(|host| host.sandboxes());
    let (old, life, lives) = {
        let mut own = lock(&fleet.own);
        own.lease.broken();
        (own.life.clone(), format!("{}-{}", fleet.node, own.lives + 1), own.lives + 1)
    };
    tracing::warn!(old, life, "the lease was broken; beginning anew");
    // Before the new lease makes anything safe: none of them is this host's until the ledger
    // confirms it.
    if let Some(sandboxes) = &sandboxes {
        sandboxes.doubt_all();
    }
    let sent = now();
    match enter(&fleet.links, &life, &fleet.name, fleet.parameters).await {
        Ok(revision) => {
            let lease = Lease::from_request(fleet.parameters, revision, sent);
            *lock(&fleet.own) = super::OwnLease { life, lease, lives };
            lock(&fleet.suspicion).reset();
            lock(&fleet.interrupted).reset();
            lock(&fleet.locations).clear();
            fleet.drain.notify_one();
            settle(fleet);
        }
        Err(error) => {
            // The number of a life that may have begun is never used again.
            lock(&fleet.own).lives = lives;
            tracing::warn!(%error, "no new lease yet");
        }
    }
}

/// Watches the leases of other hosts, and breaks those that are over.
pub(super) async fn watching(fleet: Weak<Fleet>) {
    loop {
        let Some(this) = fleet.upgrade() else { return };
        let now = now();
        lock(&this.members).expire(now);
        lock(&this.suspects).retain(|_, since| now < *since + SUSPECT_TIMEOUT);
        let own = this.life();
        let mut lives: Vec<String> = lock(&this.suspicion).hosts().map(str::to_owned).collect();
        lives.extend(this.neighbours(WATCHED_NEIGHBOURS));
        lives.extend(lock(&this.suspects).keys().cloned());
        lives.sort_unstable();
        lives.dedup();
        for life in lives.into_iter().filter(|life| *life != own) {
            // A host without a safe lease breaks none.
            if this.safe() {
                look(&this, &life).await;
            }
        }
        if this.safe() {
            this.sweep_next().await;
            this.release_unfinished().await;
        }
        let pause = this.parameters.renewal();
        drop(this);
        tokio::time::sleep(pause).await;
    }
}

/// Whether a life is over; breaks its lease if it may.
pub(super) async fn look(fleet: &Fleet, life: &str) -> Option<MonotonicTime> {
    if fleet.is_over(life) {
        return None;
    }
    let (revision, entry) = match read_life(fleet, life).await {
        Ok(Some(seen)) => seen,
        // It left, unless a server that lags behind its neighbours says so: that is waited for, and
        // then found out.
        Ok(None) => (NO_REVISION, LeaseEntry::default()),
        Err(_) => return Some(fleet.parameters.time),
    };
    let verdict = lock(&fleet.suspicion).observe(life, revision, now());
    match verdict {
        _ if entry.broken => over(fleet, life),
        Verdict::Holds(left) => {
            // Only neighbours watch a host that renews in time.
            let asked = lock(&fleet.suspects).contains_key(life);
            let near = fleet.watches(life, WATCHED_NEIGHBOURS);
            if left == fleet.parameters.time && !asked && !near {
                lock(&fleet.suspicion).forget(life);
            }
            return Some(left);
        }
        Verdict::Over => {
            let entry = bytes(&entry.broken());
            if !fleet.safe() {
                return Some(fleet.parameters.time);
            }
            let hosts = &fleet.links.hosts;
            let broken = match revision {
                // Only a server with all entries can create one, so this life has none.
                NO_REVISION => nats::mark(hosts, life, entry).await,
                revision => nats::update(hosts, life, entry, revision).await,
            };
            match broken {
                Ok(_) => {
                    match revision {
                        NO_REVISION => tracing::info!(life, "a host has left"),
                        _ => tracing::warn!(
                            life,
                            "a host gave no sign for the time of a lease, and is given up"
                        ),
                    }
                    over(fleet, life);
                    fleet.sweep_later(life.to_owned());
                }
                // It lives, or another was faster.
                Err(_) => return Some(fleet.parameters.renewal()),
            }
        }
    }
    None
}

fn over(fleet: &Fleet, life: &str) {
    let mut over = lock(&fleet.over);
    if over.len() >= MAX_ENDED_LIVES {
        over.pop_first();
    }
    over.insert(life.to_owned());
    drop(over);
    lock(&fleet.members).remove(life);
    lock(&fleet.suspicion).forget(life);
    lock(&fleet.suspects).remove(life);
    lock(&fleet.locations).remove_life(life);
}

/// Gives the lease back.
pub(super) async fn leave(fleet: &Fleet) {
    let (life, revision) = {
        let mut own = lock(&fleet.own);
        own.lease.broken();
        (own.life.clone(), own.lease.revision())
    };
    // Those that could not be saved, and those of requests whose answers were lost.
    match fleet.sweep(&life).await {
        Ok(sweep) if sweep.failed == 0 => {}
        Ok(sweep) => {
            tracing::warn!(failed = sweep.failed, "sandboxes of this host are left to other hosts");
        }
        Err(error) => tracing::warn!(%error, "sandboxes of this host are left to other hosts"),
    }
    if let Err(error) = nats::remove(&fleet.links.hosts, &life, revision).await {
        tracing::warn!(%error, "the lease was not released; it expires by itself");
    }
}

impl Fleet {
    /// Watches a life that a request waits for.
    pub(super) fn suspect(&self, life: &str) {
        let mut suspects = lock(&self.suspects);
        if suspects.len() < MAX_ENDED_LIVES {
            suspects.insert(life.to_owned(), now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format_version::tests::{check_goldens, check_unknown_fields};

    #[test]
    fn entries_of_hosts_are_read_and_written_as_they_were() {
        let entry = LeaseEntry {
            version: FormatVersion::default(),
            name: "one".to_owned(),
            beat: 3,
            broken: true,
            lease_ms: 9000,
            key: "fingerprint".to_owned(),
            unknown: UnknownFields::default(),
        };
        check_goldens("lease", &entry);
        check_unknown_fields::<LeaseEntry>("lease", 1);
    }

    #[test]
    fn a_broken_lease_keeps_the_fields_of_a_later_version() {
        let stored = r#"{"version":2,"name":"one","beat":3,"broken":false,"later":1}"#;
        let entry: LeaseEntry = serde_json::from_str(stored).unwrap();
        let broken = serde_json::to_value(entry.broken()).unwrap();
        let expected = serde_json::json!({
            "version": 2, "name": "", "beat": 0, "broken": true, "lease_ms": 0, "later": 1,
        });
        assert_eq!(broken, expected);
    }
}
