//! The part of an object store for collections and concurrent writers; `remote::collect` describes
//! their protocol.

use std::collections::HashSet;
use std::sync::PoisonError;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use afresh_sys::crash::point;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt, PutMode};

use super::super::RemoteError;
use super::super::stored_object::{StoredObject, TRUSTED};
use super::Objects;
use crate::format::descriptor::{JOURNALS, KEEPERS, is_journal};
use crate::format::digest::from_hex;
use crate::local::store::BLOB_LOCK;
use crate::turn::new_journal_id;

/// Where blobs are.
const BLOBS: &str = "blobs/sha256";
/// Where collectors leave their marks.
const MARKS: &str = "collecting";
/// Time limit of removals under one mark.
const REMOVING: Duration = Duration::from_secs(20);
/// A mark that stays for longer was left by a collector that was killed.
const DEAD: Duration = Duration::from_secs(40);
/// Interval at which a writer checks whether a mark was removed.
const LOOKING: Duration = Duration::from_millis(500);
/// Maximum objects that a collection lists.
const MAX_COLLECTED: usize = 1 << 24;
/// Maximum marks and names of keepers that are read.
const MAX_MARKS: usize = 1 << 12;
/// Requests of a collection under way at the same time.
const MAX_CONCURRENT_REQUESTS: usize = 16;

/// How old an object is, by this host's clock; one from the future is new.
fn age(meta: &ObjectMeta) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let written = u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0);
    now.saturating_sub(Duration::from_millis(written))
}

/// Whether an object that is there may be relied on.
pub(super) fn trusted(meta: &ObjectMeta) -> bool {
    age(meta) < TRUSTED
}

/// Whether objects of this name are blobs or turns.
fn is_collected(name: &str) -> bool {
    if let Some(digest) = name.strip_prefix("blobs/sha256/") {
        return from_hex(digest).is_some();
    }
    let turn = name.strip_prefix(JOURNALS).and_then(|rest| rest.strip_prefix('/')?.split_once('/'));
    turn.is_some_and(|(journal, number)| {
        is_journal(journal) && number.len() == 8 && number.bytes().all(|b| b.is_ascii_digit())
    })
}

impl Objects {
    async fn list(
        &self,
        below: &str,
        most: usize,
    ) -> Result<Vec<(String, ObjectMeta)>, RemoteError> {
        let found = self.list_at_most(below, &self.path(below), most).await?;
        let named = |meta: ObjectMeta| {
            let rest: Vec<String> = meta
                .location
                .prefix_match(&self.prefix)?
                .map(|part| part.as_ref().to_owned())
                .collect();
            Some((rest.join("/"), meta))
        };
        Ok(found.into_iter().filter_map(named).collect())
    }

    pub(super) async fn all_stored(&self) -> Result<Vec<StoredObject>, RemoteError> {
        let lock = self.path(BLOB_LOCK);
        match self.attempt(BLOB_LOCK, || self.objects.head(&lock)).await {
            // Programs that save there hold locks of files, and know nothing of ages and marks.
            Ok(_) => return Err(RemoteError::Kept { by: "a local store's files".to_owned() }),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        let mut all = self.list(BLOBS, MAX_COLLECTED).await?;
        all.extend(self.list(JOURNALS, MAX_COLLECTED).await?);
        let stored = all.into_iter().filter(|(name, _)| is_collected(name));
        Ok(stored
            .map(|(name, meta)| StoredObject { name, size: meta.size, age: age(&meta) })
            .collect())
    }

    /// Removes what still is of that age, under a mark.
    pub(super) async fn sweep_marked(
        &self,
        batch: &[StoredObject],
        grace: Duration,
    ) -> Result<Vec<StoredObject>, RemoteError> {
        self.clear_marks().await?;
        let mark = self.path(&format!("{MARKS}/{}", new_journal_id()?));
        self.put_object(&mark, Vec::new(), PutMode::Overwrite).await?;
        let removing = batch.iter().map(|object| self.remove_old(object, grace));
        let removing = stream::iter(removing)
            .buffer_unordered(MAX_CONCURRENT_REQUESTS)
            .try_collect::<Vec<_>>();
        // Where this fails the mark stays, for some of the requests may be under way still. It is
        // cleared away later.
        let removed = tokio::time::timeout(REMOVING, removing).await.map_err(|_| {
            RemoteError::Timeout { what: "removing objects".to_owned(), after: REMOVING }
        })??;
        point();
        self.attempt(mark.as_ref(), || self.objects.delete(&mark)).await?;
        point();
        Ok(removed.into_iter().flatten().collect())
    }

    async fn remove_old(
        &self,
        object: &StoredObject,
        grace: Duration,
    ) -> Result<Option<StoredObject>, RemoteError> {
        let path = self.path(&object.name);
        match self.attempt(&object.name, || self.objects.head(&path)).await {
            Ok(meta) if age(&meta) >= grace => {}
            Err(error) if !error.is_not_found() => return Err(error),
            // It is young again, or removed.
            _ => return Ok(None),
        }
        point();
        match self.attempt(&object.name, || self.objects.delete(&path)).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(Some(object.clone())),
        }
    }

    /// Removes marks of collectors that were killed.
    async fn clear_marks(&self) -> Result<(), RemoteError> {
        // Also more marks than writers read.
        for (name, meta) in self.list(MARKS, MAX_COLLECTED).await? {
            if age(&meta) >= TRUSTED {
                let path = self.path(&name);
                point();
                self.attempt(&name, || self.objects.delete(&path)).await?;
            }
        }
        Ok(())
    }

    /// Marks that are not known to be dead ones'.
    async fn marks(&self) -> Result<HashSet<Path>, RemoteError> {
        let all = self.list(MARKS, MAX_MARKS).await?.into_iter().map(|(_, meta)| meta.location);
        let dead = self.dead_marks.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(all.filter(|mark| !dead.contains(mark)).collect())
    }

    pub(super) async fn wait_for_marks(&self) -> Result<bool, RemoteError> {
        let mut waited = self.marks().await?;
        if waited.is_empty() {
            return Ok(true);
        }
        let begun = tokio::time::Instant::now();
        while begun.elapsed() < DEAD {
            tokio::time::sleep(LOOKING).await;
            let there = self.marks().await?;
            waited.retain(|mark| there.contains(mark));
            if waited.is_empty() {
                return Ok(false);
            }
        }
        self.dead_marks.lock().unwrap_or_else(PoisonError::into_inner).extend(waited);
        Ok(false)
    }

    pub(super) async fn put_keeper(&self, keeper: &str) -> Result<(), RemoteError> {
        let path = self.path(&format!("{KEEPERS}/{keeper}"));
        self.put_object(&path, Vec::new(), PutMode::Overwrite).await
    }

    pub(super) async fn all_keepers(&self) -> Result<Vec<String>, RemoteError> {
        let all = self.list(KEEPERS, MAX_MARKS).await?.into_iter();
        Ok(all.filter_map(|(name, _)| Some(name.split_once('/')?.1.to_owned())).collect())
    }
}
