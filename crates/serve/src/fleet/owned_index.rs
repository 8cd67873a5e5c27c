//! The sandboxes of each host: keys `own.<host>.<id>` in the bucket of leases, so that the sweep of
//! a lost host reads its sandboxes, and not the whole ledger.
//!
//! Promises: the key is written before an entry of the ledger names the host as its owner, and
//! removed after the entry names it no more. A key that is left costs a sweep one read. Its value
//! has the life of the host, and the sweep of a life leaves the keys of later ones. An entry of
//! that life with such a key is swept once its takeover is interrupted, see
//! [`super::interrupted_takeovers`]. While the host has a lease, it may still settle the sandbox,
//! and the entry is left to it. A sweep changes the revision of an entry that it leaves to another
//! owner, and fences a missing one, so that the write of a host that paused after it wrote the key
//! does not pass. An entry that cannot be read or changed keeps no other from being swept. May
//! break it: a host that pauses between both writes for longer than an hour, makes the sandbox
//! then, and dies before it has settled it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use serde::{Deserialize, Serialize};

use super::clock::now;
use super::nats::{self, BucketEntry, NatsError};
use super::record::{self, Entry};
use super::{Fleet, fencing};
use crate::format_version::FormatVersion;
use crate::lock::lock;

/// The first part of the keys.
const KEY_PREFIX: &str = "own";
/// Entries of a lost host that are swept at the same time.
const MAX_CONCURRENT_ENTRIES: usize = 16;
/// Times that a sweep reads an entry which changes meanwhile.
const MAX_ENTRY_READS: u32 = 3;
/// Failures in a row after which a sweep stops, since NATS is away.
const MAX_FAILURES: usize = 32;
/// Pause before entries that cannot be read are swept again.
pub(super) const UNREADABLE_PAUSE: Duration = Duration::from_secs(600);

/// The value of a key.
#[derive(Default, Serialize, Deserialize)]
struct OwnedNote {
    #[serde(default)]
    version: FormatVersion,
    /// The number of the life that is to own the sandbox.
    #[serde(default)]
    life: u64,
}

/// The outcome of a sweep of one sandbox.
pub(super) enum SweptEntry {
    /// It was that life's, and is released or removed.
    Released,
    /// Another host has it, or it does not exist.
    Other,
    /// A later life of the host has it.
    Later,
    /// A later life of the host is about to have it, unless that takeover is interrupted.
    Waiting,
    /// Its entry cannot be read.
    Unreadable,
    /// An operation failed. It is repeated.
    Failed,
}

/// The outcome of a sweep.
#[derive(Default)]
pub(super) struct Sweep {
    /// Sandboxes that were released or removed.
    released: usize,
    /// Sandboxes whose entries cannot be read.
    unreadable: usize,
    /// Sandboxes that could not be released.
    pub(super) failed: usize,
    /// Sandboxes that are released once their takeover is interrupted.
    pub(super) waiting: usize,
}

/// The host and the number of a life.
fn parts(life: &str) -> Option<(&str, u64)> {
    let (node, number) = life.split_once('-')?;
    Some((node, number.parse().ok()?))
}

impl Fleet {
    /// The key of the note that a sandbox is this host's.
    pub(super) fn note_key(&self, id: &str) -> String {
        format!("{KEY_PREFIX}.{}.{id}", self.node)
    }

    /// Notes that `life` of this host is about to own a sandbox; returns the revision of the note.
    pub(super) async fn note_owned(&self, id: &str, life: &str) -> Result<u64, NatsError> {
        let key = self.note_key(id);
        let note =
            OwnedNote { life: parts(life).map_or(0, |(_, number)| number), ..OwnedNote::default() };
        let value = Bytes::from(serde_json::to_vec(&note).unwrap_or_default());
        // Nothing depends on it yet.
        nats::put(&self.links.hosts, &key, value).await.map_err(NatsError::repeatable)
    }

    /// Removes that note, unless a later one has taken its place.
    pub(super) async fn forget_owned(&self, id: &str, revision: u64) {
        let key = self.note_key(id);
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
        let filter = format!("{KEY_PREFIX}.{node}.*");
        let links = &self.links;
        let mut noted = nats::all(&links.client, &links.hosts, &filter, usize::MAX).await?;
        // The host is back, and notes the sandboxes that it keeps or takes before their entries
        // name its new life.
        let of = |note: &BucketEntry| serde_json::from_slice::<OwnedNote>(&note.value);
        let is_later = |note: &BucketEntry| of(note).unwrap_or_default().life > last;
        let holder = match noted.iter().any(is_later) {
            true => super::lease_renewal::unbroken_life(links, node).await?,
            false => None,
        };
        // Another beginning each time, so that entries which always fail do not come first.
        let first = lock(&self.random).below(noted.len());
        noted.rotate_left(first);
        let in_a_row = AtomicUsize::new(0);
        let swept: Vec<SweptEntry> = futures_util::stream::iter(noted)
            .map(async |note| {
                if in_a_row.load(Ordering::Relaxed) >= MAX_FAILURES {
                    return SweptEntry::Failed;
                }
                let key = note.key.clone();
                let swept = match is_later(&note) {
                    true => self.sweep_torn((node, last), note, holder.as_deref()).await,
                    false => self.sweep_one((node, last), note).await,
                };
                match &swept {
                    Ok(_) => in_a_row.store(0, Ordering::Relaxed),
                    Err(error) => {
                        in_a_row.fetch_add(1, Ordering::Relaxed);
                        tracing::warn!(%error, key, "a sandbox of a lost host is not swept yet");
                    }
                }
                swept.unwrap_or(SweptEntry::Failed)
            })
            .buffer_unordered(MAX_CONCURRENT_ENTRIES)
            .collect()
            .await;
        let mut sweep = Sweep::default();
        for swept in swept {
            match swept {
                SweptEntry::Released => sweep.released += 1,
                SweptEntry::Unreadable => sweep.unreadable += 1,
                SweptEntry::Waiting => sweep.waiting += 1,
                SweptEntry::Failed => sweep.failed += 1,
                SweptEntry::Other | SweptEntry::Later => {}
            }
        }
        let Sweep { released, unreadable, failed, waiting } = sweep;
        self.counts.unswept.inc_by(failed as u64);
        tracing::info!(
            life,
            released,
            unreadable,
            failed,
            waiting,
            "released the sandboxes of a host that has ended"
        );
        Ok(sweep)
    }

    /// Releases the sandbox of a note if a life of the host up to `last` owns it although a later
    /// life has noted it, and neither has changed for a while. The note stays, for the sweep of
    /// that life. `holder` is a life of the host that has a lease: it may take long to settle its
    /// sandboxes.
    async fn sweep_torn(
        &self,
        (node, last): (&str, u64),
        note: BucketEntry,
        holder: Option<&str>,
    ) -> Result<SweptEntry, NatsError> {
        let Some(key) = note.key.rsplit('.').next().and_then(record::key) else {
            return Ok(SweptEntry::Other);
        };
        // That life's sweep reports an unreadable entry.
        let found = match nats::find(&self.links.sandboxes, &key).await {
            Err(NatsError::Sealed { .. }) => return Ok(SweptEntry::Later),
            found => found?,
        };
        let entry = found.and_then(|found| {
            let entry = serde_json::from_slice::<Entry>(&found.value).ok()?;
            let (owner, life) = entry.owner.as_deref().and_then(parts)?;
            (owner == node && life <= last).then_some((found, entry))
        });
        let Some((found, entry)) = entry else {
            lock(&self.interrupted).forget(&key);
            return Ok(SweptEntry::Later);
        };
        if let Some(life) = holder {
            lock(&self.interrupted).forget(&key);
            // It may have ended unnoticed.
            self.suspect(life);
            return Ok(SweptEntry::Waiting);
        }
        let seen = (found.revision, note.revision);
        if !lock(&self.interrupted).observe(&key, seen, now(), self.parameters) {
            return Ok(SweptEntry::Waiting);
        }
        match self.release_entry(&key, found, entry.undone()).await {
            Ok(()) => {
                lock(&self.interrupted).forget(&key);
                Ok(SweptEntry::Released)
            }
            // Its host changed it at this moment.
            Err(NatsError::Changed) => Ok(SweptEntry::Waiting),
            Err(error) => Err(error),
        }
    }

    /// Sweeps the sandbox of one note of this host, whose life is `life`.
    pub(super) async fn sweep_note(
        &self,
        life: &str,
        note: BucketEntry,
    ) -> Result<SweptEntry, NatsError> {
        let Some(of) = parts(life) else { return Ok(SweptEntry::Other) };
        self.sweep_one(of, note).await
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
                match self.release((node, last), &key, attempt > 1).await {
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

    /// Releases the sandbox of a key if a life of the host up to `last` owns it. `has_changed` is
    /// whether its entry got a new revision since the sweep began.
    async fn release(
        &self,
        (node, last): (&str, u64),
        key: &str,
        has_changed: bool,
    ) -> Result<SweptEntry, NatsError> {
        let sandboxes = &self.links.sandboxes;
        let Some(found) = nats::find(sandboxes, key).await? else {
            return match fencing::fence(sandboxes, key).await {
                // The marker of a removed entry fences too.
                Err(NatsError::Changed) if nats::find(sandboxes, key).await?.is_none() => {
                    Ok(SweptEntry::Other)
                }
                fenced => fenced.map(|()| SweptEntry::Other),
            };
        };
        let Ok(entry) = serde_json::from_slice::<Entry>(&found.value) else {
            tracing::error!(key, "an entry of the ledger is damaged");
            return Ok(SweptEntry::Unreadable);
        };
        match entry.owner.as_deref().and_then(parts) {
            Some((owner, life)) if owner == node && life <= last => {}
            Some((owner, _)) if owner == node => return Ok(SweptEntry::Later),
            // No take at the revision before can succeed any more. A busy owner changes it often.
            _ if has_changed => return Ok(SweptEntry::Other),
            // The host may be about to take it at this revision.
            _ => return self.touch(key, found, entry).await.map(|()| SweptEntry::Other),
        }
        // This host never had one whose taking had no answer, and has answered no call of it.
        let is_unfinished = || key.rsplit('.').next().is_some_and(|id| self.is_unfinished(id));
        let was_never_here = node == self.node && is_unfinished();
        let entry = if was_never_here { entry } else { entry.undone() };
        self.release_entry(key, found, entry).await?;
        Ok(SweptEntry::Released)
    }

    /// Releases a sandbox whose entry still has the revision that was found.
    async fn release_entry(
        &self,
        key: &str,
        found: BucketEntry,
        entry: Entry,
    ) -> Result<(), NatsError> {
        let sandboxes = &self.links.sandboxes;
        if entry.state.is_none() {
            return nats::remove(sandboxes, key, found.revision).await;
        }
        let free = Entry { owner: None, ..entry.passed_on(found.time) };
        let lifetime = free.unowned_lifetime(found.time, found.time);
        let value = Bytes::from(serde_json::to_vec(&free).unwrap_or_default());
        nats::update_for(sandboxes, key, value, found.revision, lifetime).await.map(drop)
    }

    /// Gives an entry another revision, and leaves all else as it is.
    async fn touch(&self, key: &str, found: BucketEntry, entry: Entry) -> Result<(), NatsError> {
        // The clock of the NATS servers, as of this host's last renewal.
        let renewal = nats::find(&self.links.hosts, &self.life()).await?;
        let now = renewal.map_or(found.time, |renewal| renewal.time.max(found.time));
        let entry = entry.passed_on(found.time);
        let lifetime = entry.unowned_lifetime(found.time, now);
        let value = Bytes::from(serde_json::to_vec(&entry).unwrap_or_default());
        let sandboxes = &self.links.sandboxes;
        nats::update_for(sandboxes, key, value, found.revision, lifetime).await.map(drop)
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
            let sweep = self.sweep(&life).await?;
            if sweep.failed > 0 {
                return Ok(Some(self.parameters.renewal()));
            }
            if sweep.waiting > 0 {
                return Ok(Some(self.parameters.time));
            }
            if sweep.unreadable > 0 {
                return Ok(Some(UNREADABLE_PAUSE));
            }
            super::lease_renewal::forget_broken(&self.links, &life).await?;
            // A host that broke leases may have died before it swept.
            self.find_unswept().await?;
            Ok::<_, NatsError>(None)
        };
        let swept = sweeping.await;
        let mut unswept = lock(&self.unswept);
        // Others come first.
        let pause = match swept {
            Ok(None) => {
                unswept.remove(&life);
                return;
            }
            Ok(Some(pause)) => pause,
            Err(error) => {
                tracing::warn!(%error, life, "sandboxes of a lost host are not swept yet");
                self.parameters.renewal()
            }
        };
        unswept.insert(life, now() + pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format_version::tests::check_goldens;

    #[test]
    fn notes_of_owners_are_read_and_written_as_they_were() {
        check_goldens("note", &OwnedNote { version: FormatVersion::default(), life: 3 });
    }
}
