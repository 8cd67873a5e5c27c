//! Keeping this host's lease, and looking after those of others.
//!
//! What it promises: a lease that was broken is never renewed. This host then begins a new life, and goes on with
//! those of its sandboxes that nobody has taken: they are as they were, and the ledger says so by compare-and-set.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::clock::now;
use super::links::{self, LinkError, Links};
use super::policy::{Lease, Moment, Verdict};
use super::{Fleet, lock};

/// Hosts that each host looks after.
const AFTER: usize = 2;
/// How long somebody who was waited for is looked after.
const SUSPECT: Duration = Duration::from_secs(60);
/// No entry has this number.
const NONE: u64 = 0;
/// Lives that are over and remembered.
const OVER: usize = 10_000;

/// The entry of a host's life.
#[derive(Debug, Serialize, Deserialize)]
struct Life {
    name: String,
    /// Renewals, so that every entry differs from the one before.
    beat: u64,
    /// Somebody broke its lease.
    broken: bool,
}

fn bytes(life: &Life) -> Bytes {
    // Text and numbers.
    Bytes::from(serde_json::to_vec(life).unwrap_or_default())
}

/// Makes the entry of a new life.
pub(super) async fn enter(links: &Links, life: &str, name: &str) -> Result<u64, LinkError> {
    let entry = Life { name: name.to_owned(), beat: 0, broken: false };
    links::create(&links.hosts, life, bytes(&entry)).await
}

/// Renews the lease for as long as there is a fleet.
pub(super) async fn renewing(fleet: Weak<Fleet>) {
    let mut beat = 0;
    loop {
        let Some(fleet) = fleet.upgrade() else { return };
        let renewal = fleet.terms.renewal();
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
    let entry = Life { name: fleet.name.clone(), beat, broken: false };
    let sent = now();
    let renewing = links::update(&fleet.links.hosts, &life, bytes(&entry), revision);
    match tokio::time::timeout(patience, renewing).await {
        Ok(Ok(revision)) => {
            {
                let mut own = lock(&fleet.own);
                if !own.lease.safe(sent) {
                    // What did not change while nobody could change it says nothing.
                    lock(&fleet.suspicion).reset();
                    tracing::warn!(life, "the lease is back");
                }
                own.lease.renewed(revision, sent);
            }
            settle(fleet);
        }
        Ok(Err(LinkError::Changed)) => match seen(fleet, &life).await {
            Ok(Some((revision, false))) => lock(&fleet.own).lease.learnt(revision),
            Ok(_) => begin_again(fleet).await,
            Err(error) => tracing::warn!(%error, "the lease cannot be read"),
        },
        Ok(Err(error)) => tracing::warn!(%error, "the lease was not renewed"),
        Err(_) => tracing::warn!("the lease was not renewed in time"),
    }
}

/// Has what is in doubt settled, beside the renewals: these come first. Whatever is left is tried after the next one.
fn settle(fleet: &Arc<Fleet>) {
    let fleet = fleet.clone();
    tokio::spawn(async move {
        let Ok(_turn) = fleet.settling.try_lock() else { return };
        if let Some(shared) = fleet.shared()
            && let Some(routes) = &shared.sandboxes
        {
            routes.sandboxes.settle(&fleet).await;
        }
    });
}

/// The number of a life's entry, and whether it is broken; nothing where there is none.
async fn seen(fleet: &Fleet, life: &str) -> Result<Option<(u64, bool)>, LinkError> {
    let Some(found) = links::find(&fleet.links.hosts, life).await? else { return Ok(None) };
    let entry: Option<Life> = serde_json::from_slice(&found.value).ok();
    Ok(Some((found.revision, entry.is_none_or(|entry| entry.broken))))
}

/// Begins a new life after a lease that was broken.
async fn begin_again(fleet: &Arc<Fleet>) {
    let sandboxes =
        fleet.shared().and_then(|shared| shared.sandboxes.as_ref().map(|r| r.sandboxes.clone()));
    let (old, life, lives) = {
        let mut own = lock(&fleet.own);
        own.lease.broken();
        (own.life.clone(), format!("{}-{}", fleet.node, own.lives + 1), own.lives + 1)
    };
    tracing::warn!(old, life, "the lease was broken; beginning anew");
    // Before the new lease makes anything safe: none of them is this host's until the ledger says so.
    if let Some(sandboxes) = &sandboxes {
        sandboxes.doubt_all();
    }
    let sent = now();
    match enter(&fleet.links, &life, &fleet.name).await {
        Ok(revision) => {
            let lease = Lease::taken(fleet.terms, revision, sent);
            *lock(&fleet.own) = super::Own { life, lease, lives };
            lock(&fleet.suspicion).reset();
            lock(&fleet.ways).clear();
            fleet.drain.notify_one();
            settle(fleet);
        }
        Err(error) => {
            // Of a life that may have begun and never will be used: nobody ever names it.
            lock(&fleet.own).lives = lives;
            tracing::warn!(%error, "no new lease yet");
        }
    }
}

/// Looks after the leases of others, and breaks those that are over.
pub(super) async fn watching(fleet: Weak<Fleet>) {
    loop {
        let Some(this) = fleet.upgrade() else { return };
        let now = now();
        lock(&this.members).expire(now);
        lock(&this.suspects).retain(|_, since| now < *since + SUSPECT);
        let own = this.life();
        let mut lives: Vec<String> = lock(&this.suspicion).hosts().map(str::to_owned).collect();
        lives.extend(lock(&this.members).after(&own, AFTER));
        lives.extend(lock(&this.suspects).keys().cloned());
        lives.sort_unstable();
        lives.dedup();
        for life in lives.into_iter().filter(|life| *life != own) {
            // A host that may be over itself judges nobody.
            if this.safe() {
                look(&this, &life).await;
            }
        }
        let pause = this.terms.renewal();
        drop(this);
        tokio::time::sleep(pause).await;
    }
}

/// Whether a life is over; breaks its lease if it may.
pub(super) async fn look(fleet: &Fleet, life: &str) -> Option<Moment> {
    if fleet.is_over(life) {
        return None;
    }
    let (revision, broken) = match seen(fleet, life).await {
        Ok(Some(seen)) => seen,
        // It left, unless a server that lags behind its neighbours says so: that is waited for, and then found out.
        Ok(None) => (NONE, false),
        Err(_) => return Some(fleet.terms.time),
    };
    let verdict = lock(&fleet.suspicion).saw(life, revision, now());
    match verdict {
        _ if broken => over(fleet, life),
        Verdict::Holds(left) => {
            // Those that renew in time are looked after by their neighbours, and by nobody else.
            let asked = lock(&fleet.suspects).contains_key(life);
            let near =
                lock(&fleet.members).after(&fleet.life(), AFTER).iter().any(|near| near == life);
            if left == fleet.terms.time && !asked && !near {
                lock(&fleet.suspicion).forget(life);
            }
            return Some(left);
        }
        Verdict::Over => {
            let entry = bytes(&Life { name: String::new(), beat: 0, broken: true });
            if !fleet.safe() {
                return Some(fleet.terms.time);
            }
            let hosts = &fleet.links.hosts;
            let broken = match revision {
                // Only a server that has all entries makes one where there is none, so this life has none.
                NONE => links::mark(hosts, life, entry).await,
                revision => links::update(hosts, life, entry, revision).await,
            };
            match broken {
                Ok(_) => {
                    tracing::warn!(
                        life,
                        "a host gave no sign for the time of a lease, and is given up"
                    );
                    over(fleet, life);
                }
                // It lives, or another was faster.
                Err(_) => return Some(fleet.terms.renewal()),
            }
        }
    }
    None
}

fn over(fleet: &Fleet, life: &str) {
    let mut over = lock(&fleet.over);
    if over.len() >= OVER {
        over.pop_first();
    }
    over.insert(life.to_owned());
    drop(over);
    lock(&fleet.members).remove(life);
    lock(&fleet.suspicion).forget(life);
    lock(&fleet.suspects).remove(life);
    lock(&fleet.ways).retain(|_, at| at != life);
}

/// Gives the lease back.
pub(super) async fn leave(fleet: &Fleet) {
    let (life, revision) = {
        let mut own = lock(&fleet.own);
        own.lease.broken();
        (own.life.clone(), own.lease.revision())
    };
    if let Err(error) = links::remove(&fleet.links.hosts, &life, revision).await {
        tracing::warn!(%error, "the lease was not given back; it ends by itself");
    }
}

impl Fleet {
    /// Looks after a life that somebody waits for.
    pub(super) fn suspect(&self, life: &str) {
        let mut suspects = lock(&self.suspects);
        if suspects.len() < OVER {
            suspects.insert(life.to_owned(), now());
        }
    }
}
