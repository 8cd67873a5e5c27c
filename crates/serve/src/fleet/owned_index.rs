//! The sandboxes of each host: keys `own.<host>.<id>` in the bucket of leases, so that the sweep of a lost host reads its
//! sandboxes, and not the whole ledger.
//!
//! Promises: the key is written before an entry of the ledger names the host as its owner, and removed after the entry
//! names it no more. A key that is left costs a sweep one read.
//! May break it: a host that pauses between both writes for longer than its lease, and dies after that before it has
//! settled the sandbox.

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};

use super::nats::{self, BucketEntry, NatsError};
use super::record::{self, Entry};
use super::{Fleet, lock};

/// The first part of the keys.
const OWN: &str = "own";
/// Entries of a lost host that are swept at the same time.
const MAX_CONCURRENT_ENTRIES: usize = 16;

/// The host and the number of a life.
fn parts(life: &str) -> Option<(&str, u64)> {
    let (node, number) = life.split_once('-')?;
    Some((node, number.parse().ok()?))
}

impl Fleet {
    /// Notes that this host is about to own a sandbox; returns the revision of the note.
    pub(super) async fn note_owned(&self, id: &str) -> Result<u64, NatsError> {
        let key = format!("{OWN}.{}.{id}", self.node);
        nats::put(&self.links.hosts, &key, Bytes::from_static(b"{}")).await
    }

    /// Removes that note, unless a later one has taken its place.
    pub(super) async fn forget_owned(&self, id: &str, revision: u64) {
        let key = format!("{OWN}.{}.{id}", self.node);
        match nats::remove(&self.links.hosts, &key, revision).await {
            Ok(()) | Err(NatsError::Changed) => {}
            Err(error) => tracing::debug!(%error, id, "a note of a sandbox is left to a sweep"),
        }
    }

    /// Releases the sandboxes of a life that is over, and of the earlier lives of its host, and removes those that were
    /// never saved. Otherwise they would be listed as running until a client uses each.
    pub(super) async fn sweep(&self, life: &str) -> Result<usize, NatsError> {
        let Some((node, _)) = parts(life) else { return Ok(0) };
        let filter = format!("{OWN}.{node}.*");
        let links = &self.links;
        let noted = nats::all(&links.client, &links.hosts, &filter, usize::MAX).await?;
        let swept: Vec<bool> = futures_util::stream::iter(noted)
            .map(|note| self.sweep_one(life, note))
            .buffer_unordered(MAX_CONCURRENT_ENTRIES)
            .try_collect()
            .await?;
        let released = swept.into_iter().filter(|swept| *swept).count();
        tracing::info!(life, released, "released the sandboxes of a host that has ended");
        Ok(released)
    }

    /// Whether the sandbox was that life's.
    async fn sweep_one(&self, life: &str, note: BucketEntry) -> Result<bool, NatsError> {
        let sandboxes = &self.links.sandboxes;
        let key = note.key.rsplit('.').next().and_then(record::key);
        let found = match &key {
            Some(key) => nats::find(sandboxes, key).await?,
            None => None,
        };
        let mut released = false;
        if let Some(found) = found {
            let Ok(entry) = serde_json::from_slice::<Entry>(&found.value) else {
                tracing::error!(key = found.key, "an entry of the ledger is damaged");
                return Ok(false);
            };
            let (owner, swept) = (entry.owner.as_deref().and_then(parts), parts(life));
            if let (Some((owner, of)), Some((node, last))) = (owner, swept)
                && owner == node
            {
                if of > last {
                    // The host is back, in another life.
                    return Ok(false);
                }
                let done = match entry.state {
                    Some(_) => {
                        let free = Entry { owner: None, ..entry.passed_on(found.time).undone() };
                        let lifetime = free.unowned_lifetime(found.time, found.time);
                        let value = Bytes::from(serde_json::to_vec(&free).unwrap_or_default());
                        nats::update_for(sandboxes, &found.key, value, found.revision, lifetime)
                            .await
                            .map(drop)
                    }
                    None => nats::remove(sandboxes, &found.key, found.revision).await,
                };
                match done {
                    Ok(()) => released = true,
                    // Another host took it first.
                    Err(NatsError::Changed) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        match nats::remove(&self.links.hosts, &note.key, note.revision).await {
            Ok(()) | Err(NatsError::Changed) => Ok(released),
            Err(error) => Err(error),
        }
    }

    /// Finds lives whose leases other hosts broke, and did not live to sweep.
    pub(super) async fn find_unswept(&self) -> Result<(), NatsError> {
        let broken = super::lease_renewal::broken(&self.links).await?;
        // This process settles its own sandboxes.
        let others = broken.into_iter().filter(|life| !self.ours(life));
        lock(&self.unswept).extend(others);
        Ok(())
    }

    /// Sweeps the next life that is over.
    pub(super) async fn sweep_next(&self) {
        let Some(life) = lock(&self.unswept).first().cloned() else { return };
        let sweeping = async {
            self.sweep(&life).await?;
            super::lease_renewal::forget_broken(&self.links, &life).await?;
            // A host that broke leases may have died before it swept.
            self.find_unswept().await?;
            lock(&self.unswept).remove(&life);
            Ok::<_, NatsError>(())
        };
        if let Err(error) = sweeping.await {
            tracing::warn!(%error, life, "sandboxes of a lost host are not swept yet");
        }
    }
}
