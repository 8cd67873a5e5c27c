//! Sources of sandboxes on all hosts of a fleet: templates that the first host has warmed, and snapshots that clients
//! have made.
//!
//! Promises: a template is the same on all hosts that serve it, down to its pages, so a sandbox saved on one host is
//! a difference from data that the others have already.

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::Fleet;
use super::nats::{self, NatsError};
use super::record::{self, State};
use crate::error_response::ErrorResponse;
use crate::sandbox::store::SnapshotRecord;

/// Most snapshots of a tenant that are listed.
const MAX_LISTED: usize = 10_000;

#[derive(serde::Serialize, serde::Deserialize)]
struct CatalogEntry {
    record: SnapshotRecord,
    state: State,
}

/// The digest that an entry of the bucket names.
pub(super) fn digest(value: &[u8]) -> Option<String> {
    match serde_json::from_slice::<CatalogEntry>(value) {
        Ok(kept) => Some(kept.state.digest),
        // A template's is its digest.
        Err(_) => std::str::from_utf8(value).ok().map(str::to_owned),
    }
}

fn bytes(kept: &CatalogEntry) -> Bytes {
    Bytes::from(serde_json::to_vec(kept).unwrap_or_default())
}

/// The key of a template: everything that its state comes from.
fn template(parts: &[&[u8]]) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    let digits: String =
        digest.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("template.{digits}")
}

impl Fleet {
    /// The digest of the template made of these parts, if another host has stored it.
    pub(super) async fn shared_template(
        &self,
        parts: &[&[u8]],
    ) -> Result<Option<String>, NatsError> {
        let key = template(parts);
        let found = nats::patiently(async || nats::find(&self.links.kept, &key).await).await?;
        Ok(found.and_then(|found| String::from_utf8(found.value.to_vec()).ok()))
    }

    /// Says that the store has a template; gives the digest that all hosts must use.
    pub(super) async fn offer(&self, parts: &[&[u8]], digest: &str) -> Result<String, NatsError> {
        let key = template(parts);
        let value = Bytes::from(digest.to_owned());
        let made = async || nats::create(&self.links.kept, &key, value.clone()).await;
        match nats::patiently(made).await {
            Err(NatsError::Changed) => {
                Ok(self.shared_template(parts).await?.unwrap_or_else(|| digest.to_owned()))
            }
            other => other.map(|_| digest.to_owned()),
        }
    }

    /// Has all hosts know a snapshot, by its id and its names.
    pub(super) async fn name(
        &self,
        record: &SnapshotRecord,
        state: &State,
    ) -> Result<(), ErrorResponse> {
        let Some(key) = record::key(&record.id) else { return Err(ErrorResponse::host()) };
        let value = bytes(&CatalogEntry { record: record.clone(), state: state.clone() });
        nats::set_entry(&self.links.kept, &format!("id.{key}"), value.clone()).await?;
        for name in &record.names {
            let key = record::named(&record.tenant, name);
            let before = nats::find(&self.links.kept, &key).await?;
            nats::set_entry(&self.links.kept, &key, value.clone()).await?;
            let before = before.and_then(|found| serde_json::from_slice(&found.value).ok());
            if let Some(before) = before {
                self.lose_names(record, before).await?;
            }
        }
        Ok(())
    }

    /// Has the snapshot that had names before not be listed by them any more.
    async fn lose_names(
        &self,
        to: &SnapshotRecord,
        before: CatalogEntry,
    ) -> Result<(), ErrorResponse> {
        let Some(key) = record::key(&before.record.id).filter(|_| before.record.id != to.id) else {
            return Ok(());
        };
        let key = format!("id.{key}");
        // A concurrent change gives the name away or removes it: then it is read again.
        for _ in 0..3 {
            let Some(found) = nats::find(&self.links.kept, &key).await? else { return Ok(()) };
            let Ok(mut kept) = serde_json::from_slice::<CatalogEntry>(&found.value) else {
                return Ok(());
            };
            kept.record.names.retain(|name| !to.names.contains(name));
            match nats::update(&self.links.kept, &key, bytes(&kept), found.revision).await {
                Err(NatsError::Changed) => {}
                other => return other.map(drop).map_err(ErrorResponse::from),
            }
        }
        Ok(())
    }

    /// A snapshot of a tenant, by its id or name.
    pub(super) async fn find_snapshot(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<Option<(SnapshotRecord, State)>, ErrorResponse> {
        let key = match record::key(name) {
            Some(key) => format!("id.{key}"),
            None => record::named(tenant, name),
        };
        let Some(found) = nats::find(&self.links.kept, &key).await? else { return Ok(None) };
        let kept: Option<CatalogEntry> = serde_json::from_slice(&found.value).ok();
        let own = kept.filter(|kept| kept.record.tenant == tenant);
        Ok(own.map(|kept| (kept.record, kept.state)))
    }

    /// The snapshots of a tenant.
    pub(super) async fn snapshots_of(
        &self,
        tenant: &str,
    ) -> Result<Vec<SnapshotRecord>, ErrorResponse> {
        let filter = format!("id.{}.*", record::tenant_prefix(tenant));
        let found = nats::all(&self.links.client, &self.links.kept, &filter, MAX_LISTED).await?;
        let kept = found
            .iter()
            .filter_map(|found| serde_json::from_slice::<CatalogEntry>(&found.value).ok());
        Ok(kept.map(|kept| kept.record).filter(|record| record.tenant == tenant).collect())
    }

    /// Forgets a snapshot and the names that still mean it.
    pub(super) async fn forget(&self, record: &SnapshotRecord) -> Result<(), ErrorResponse> {
        let names = record.names.iter().map(|name| record::named(&record.tenant, name));
        let own = record::key(&record.id).map(|key| format!("id.{key}"));
        for key in names.chain(own) {
            let Some(found) = nats::find(&self.links.kept, &key).await? else { continue };
            let kept: Option<CatalogEntry> = serde_json::from_slice(&found.value).ok();
            if kept.is_none_or(|kept| kept.record.id == record.id) {
                match nats::remove(&self.links.kept, &key, found.revision).await {
                    // Another snapshot has the name now.
                    Ok(()) | Err(NatsError::Changed) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }
}
