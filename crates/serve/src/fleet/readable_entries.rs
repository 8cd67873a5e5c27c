//! Lists of entries without the unreadable ones: those that another key sealed, and damaged ones.
//!
//! Promises: an unreadable entry keeps no other from a list. It is logged, counted in the metric
//! `afresh_fleet_unreadable_total`, and in the list.

use super::Fleet;
use super::nats::{self, Bucket, BucketEntry, NatsConnection, NatsError};

/// The readable entries of a list.
pub(super) struct ReadableEntries<T> {
    pub(super) entries: Vec<T>,
    /// The number of the others.
    pub(super) unreadable: usize,
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
    /// Every entry whose key matches, at most `most` of them. `read` returns `None` for a damaged
    /// one.
    pub(super) async fn list_readable<T>(
        &self,
        bucket: fn(&NatsConnection) -> &Bucket,
        filter: &str,
        most: usize,
        read: impl Fn(&BucketEntry) -> Option<T>,
    ) -> Result<ReadableEntries<T>, NatsError> {
        let bucket = bucket(&self.links);
        let found = nats::all_stored(&self.links.client, bucket, filter, most).await?;
        let mut list = ReadableEntries { entries: Vec::with_capacity(found.len()), unreadable: 0 };
        for found in found {
            let Some(found) = open(bucket, found) else {
                list.unreadable += 1;
                continue;
            };
            match read(&found) {
                Some(entry) => list.entries.push(entry),
                None => {
                    tracing::error!(key = found.key, "an entry of the ledger is damaged");
                    list.unreadable += 1;
                }
            }
        }
        self.counts.unreadable.inc_by(list.unreadable as u64);
        Ok(list)
    }
}
