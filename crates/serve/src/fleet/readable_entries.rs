//! Lists of entries without the unreadable ones: those that another key sealed, and damaged ones.
//!
//! Promises: an unreadable entry keeps no other from a list. It is logged, counted in the metric
//! `afresh_fleet_unreadable_total`, and in the list. A list that ends before its last entry
//! reports the number of the others.

use super::Fleet;
use super::nats::{self, Bucket, BucketEntry, NatsConnection, NatsError};

/// The readable entries of a list.
pub(super) struct ReadableEntries<T> {
    pub(super) entries: Vec<T>,
    /// The number of the others.
    pub(super) unreadable: usize,
    /// The number of entries behind the last one that was read, which may be those of others.
    pub(super) omitted: usize,
}

/// An entry as it was before it was sealed; `None` if that fails.
pub(super) fn open(bucket: &Bucket, found: BucketEntry) -> Option<BucketEntry> {
    match bucket.open(&found.key, found.value) {
        Ok(value) => Some(BucketEntry { value, ..found }),
        Err(error) => {
            tracing::error!(%error, key = found.key, "an entry of the ledger is unreadable");
            None
        }
    }
}

impl Fleet {
    /// Every entry whose key matches and that is `own`, at most `most` of them. `read` returns
    /// `None` for a damaged one. Tenants may share the keys that match, and others of them take no
    /// part of `most`.
    pub(super) async fn list_readable<T: Send>(
        &self,
        bucket: fn(&NatsConnection) -> &Bucket,
        filter: &str,
        most: usize,
        read: impl Fn(&BucketEntry) -> Option<T> + Send,
        own: impl Fn(&T) -> bool + Send,
    ) -> Result<ReadableEntries<T>, NatsError> {
        let bucket = bucket(&self.links);
        let mut list = ReadableEntries { entries: Vec::new(), unreadable: 0, omitted: 0 };
        let adding = &mut list;
        let add = move |found: BucketEntry| {
            let Some(found) = open(bucket, found) else {
                adding.unreadable += 1;
                return false;
            };
            let Some(entry) = read(&found) else {
                tracing::error!(key = found.key, "an entry of the ledger is damaged");
                adding.unreadable += 1;
                return false;
            };
            let is_own = own(&entry);
            if is_own {
                adding.entries.push(entry);
            }
            is_own
        };
        let left = nats::each_stored(&self.links.client, bucket, filter, most, add).await?;
        list.omitted = usize::try_from(left).unwrap_or(usize::MAX);
        self.counts.unreadable.inc_by(list.unreadable as u64);
        Ok(list)
    }
}
