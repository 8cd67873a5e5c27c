//! The sandboxes of each host: keys `own.<host>.<id>` in the bucket of leases, so that the sweep of
//! a lost host reads its sandboxes, and not the whole ledger.
//!
//! Promises: the key is written before an entry of the ledger names the host as its owner, and
//! removed after the entry names it no more. A key that is left costs a sweep one read. Its value
//! has the life of the host, and the sweep of a life leaves the keys of later ones. An entry that
//! cannot be read keeps no other from being swept. May break it: a host that pauses between both
//! writes for longer than its lease, and dies after that before it has settled the sandbox.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};

use super::clock::now;
use super::nats::{self, BucketEntry, NatsError};
use super::record::{self, Entry};
use super::{Fleet, lock};

/// The first part of the keys.
const OWN: &str = "own";
/// Entries of a lost host that are swept at the same time.
const MAX_CONCURRENT_ENTRIES: usize = 16;
/// Times that a sweep reads an entry which changes meanwhile.
const MAX_ENTRY_READS: u32 = 3;
/// Pause before a life with entries that cannot be read is swept again.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(600);

/// The value of a key.
#[derive(Default, Serialize, Deserialize)]
struct OwnedNote {
    /// The number of the life that is to own the sandbox.
    #[serde(default)]
    life: u64,
}

/// The outcome of a sweep of one sandbox.
enum SweptEntry {
    /// It was that life's, and is released or removed.
    Released,
    /// Another host has it, or it does not exist.
    Other,
    /// A later life of the host has it.
    Later,
    /// Its entry cannot be read.
    Unreadable,
}

/// The outcome of a sweep.
#[derive(Default)]
pub(super) struct Sweep {
    /// Sandboxes that were released or removed.
    released: usize,
    /// Sandboxes whose entries cannot be read.
    unreadable: usize,
}

/// The host and the number of a life.
fn parts(life: &str) -> Option<(&str, u64)> {
    let (node, number) = life.split_once('-')?;
    Some((node, number.parse().ok()?))
}

impl Fleet {
    /// Notes that `life` of this host is about to own a sandbox; returns the revision of the note.
    pub(super) async fn note_owned(&self, id: &str, life: &str) -> Result<u64, NatsError> {
        let key = format!("{OWN}.{}.{id}", self.node);
        let note = OwnedNote { life: parts(life).map_or(0, |(_, number)| number) };
        let value = Bytes::from(serde_json::to_vec(&note).unwrap_or_default());
        nats::put(&self.links.hosts, &key, value).await
    }

    /// Removes that note, unless a later one has taken its place.
    pub(super) async fn forget_owned(&self, id: &str, revision: u64) {
        let key = format!("{OWN}.{}.{id}", self.node);
        match nats::remove(&self.links.hosts, &key, revision).await {
            Ok(()) | Err(NatsError::Changed) => {}
            Err(error) => tracing::debug!(%error, id, "a note of a sandbox is left to a sweep"),
        }
    }

    /// Releases the sandboxes of a life that is over, and of the earlier lives of its host, and
    /// removes those that were never saved. Otherwise they would be listed as running until a
    /// client uses each.
    pub(super) async fn sweep(&self, life: &str) -> Result<Sweep, NatsError> {
        let Some((node, last)) = parts(life) else { return Ok(Sweep::default()) };
        let filter = format!("{OWN}.{node}.*");
        let links = &self.links;
        let mut noted = nats::all(&links.client, &links.hosts, &filter, usize::MAX).await?;
        // The host is back, and notes the sandboxes that it keeps or takes before their entries
        // name its new life.
        let of = |note: &BucketEntry| serde_json::from_slice::<OwnedNote>(&note.value);
        noted.retain(|note| of(note).unwrap_or_default().life <= last);
        let swept: Vec<SweptEntry> = futures_util::stream::iter(noted)
            .map(|note| self.sweep_one((node, last), note))
            .buffer_unordered(MAX_CONCURRENT_ENTRIES)
            .try_collect()
            .await?;
        let mut sweep = Sweep::default();
        for swept in swept {
            match swept {
                SweptEntry::Released => sweep.released += 1,
                SweptEntry::Unreadable => sweep.unreadable += 1,
                SweptEntry::Other | SweptEntry::Later => {}
            }
        }
        let Sweep { released, unreadable } = sweep;
        tracing::info!(
            life,
            released,
            unreadable,
            "released the sandboxes of a host that has ended"
        );
        Ok(sweep)
    }

    /// Sweeps a sandbox of the lives of a host up to `last`, and removes its note.
    async fn sweep_one(
        &self,
        (node, last): (&str, u64),
        note: BucketEntry,
    ) -> Result<SweptEntry, NatsError> {
        let mut swept = SweptEntry::Other;
        if let Some(key) = note.key.rsplit('.').next().and_then(record::key) {
            for attempt in 1.. {
                match self.release((node, last), &key).await {
                    // Another host took it first, or it is this host's again, or its entry was
                    // sealed.
                    Err(NatsError::Changed) if attempt < MAX_ENTRY_READS => {}
                    Err(error @ NatsError::Sealed { .. }) => {
                        tracing::error!(%error, "an entry of the ledger is unreadable");
                        return Ok(SweptEntry::Unreadable);
                    }
                    released => {
                        swept = released?;
                        break;
                    }
                }
            }
        }
        if matches!(swept, SweptEntry::Unreadable | SweptEntry::Later) {
            return Ok(swept);
        }
        match nats::remove(&self.links.hosts, &note.key, note.revision).await {
            Ok(()) | Err(NatsError::Changed) => Ok(swept),
            Err(error) => Err(error),
        }
    }

    /// Releases the sandbox of a key if a life of the host up to `last` owns it.
    async fn release(&self, (node, last): (&str, u64), key: &str) -> Result<SweptEntry, NatsError> {
        let sandboxes = &self.links.sandboxes;
        let Some(found) = nats::find(sandboxes, key).await? else { return Ok(SweptEntry::Other) };
        let Ok(entry) = serde_json::from_slice::<Entry>(&found.value) else {
            tracing::error!(key, "an entry of the ledger is damaged");
            return Ok(SweptEntry::Unreadable);
        };
        match entry.owner.as_deref().and_then(parts) {
            Some((owner, life)) if owner == node && life <= last => {}
            Some((owner, _)) if owner == node => return Ok(SweptEntry::Later),
            _ => return Ok(SweptEntry::Other),
        }
        match entry.state {
            Some(_) => {
                let free = Entry { owner: None, ..entry.passed_on(found.time).undone() };
                let lifetime = free.unowned_lifetime(found.time, found.time);
                let value = Bytes::from(serde_json::to_vec(&free).unwrap_or_default());
                nats::update_for(sandboxes, key, value, found.revision, lifetime).await?;
            }
            None => nats::remove(sandboxes, key, found.revision).await?,
        }
        Ok(SweptEntry::Released)
    }

    /// Finds lives whose leases other hosts broke, and did not live to sweep.
    pub(super) async fn find_unswept(&self) -> Result<(), NatsError> {
        let broken = super::lease_renewal::broken(&self.links).await?;
        // This process settles its own sandboxes.
        for life in broken.into_iter().filter(|life| !self.ours(life)) {
            self.sweep_later(life);
        }
        Ok(())
    }

    /// Has a life that is over swept, by this host.
    pub(super) fn sweep_later(&self, life: String) {
        lock(&self.unswept).entry(life).or_insert_with(now);
    }

    /// Sweeps the life that is over and due first.
    pub(super) async fn sweep_next(&self) {
        let life = {
            let unswept = lock(&self.unswept);
            let next =
                unswept.iter().min_by_key(|(_, due)| **due).filter(|(_, due)| **due <= now());
            let Some((life, _)) = next else { return };
            life.clone()
        };
        let sweeping = async {
            if self.sweep(&life).await?.unreadable > 0 {
                return Ok(false);
            }
            super::lease_renewal::forget_broken(&self.links, &life).await?;
            // A host that broke leases may have died before it swept.
            self.find_unswept().await?;
            Ok::<_, NatsError>(true)
        };
        let swept = sweeping.await;
        let mut unswept = lock(&self.unswept);
        // Others come first.
        let pause = match swept {
            Ok(true) => {
                unswept.remove(&life);
                return;
            }
            Ok(false) => UNREADABLE_PAUSE,
            Err(error) => {
                tracing::warn!(%error, life, "sandboxes of a lost host are not swept yet");
                self.terms.renewal()
            }
        };
        unswept.insert(life, now() + pause);
    }
}
