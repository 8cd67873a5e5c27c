//! What all hosts of a fleet make sandboxes from: templates that the first host has warmed, and snapshots that clients
//! have made.
//!
//! What it promises: a template is the same on all hosts that serve it, down to its pages, so what a sandbox saves on
//! one host is a difference to what the others hold already.

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::Fleet;
use super::entry::{self, State};
use super::links::{self, LinkError};
use crate::refusal::Refusal;
use crate::sandbox::SnapshotRecord;

/// Most snapshots of a tenant that are listed.
const LISTED: usize = 10_000;

#[derive(serde::Serialize, serde::Deserialize)]
struct Kept {
    record: SnapshotRecord,
    state: State,
}

/// The digest that an entry of the bucket names.
pub(super) fn digest(value: &[u8]) -> Option<String> {
    match serde_json::from_slice::<Kept>(value) {
        Ok(kept) => Some(kept.state.digest),
        // A template's is its digest.
        Err(_) => std::str::from_utf8(value).ok().map(str::to_owned),
    }
}

fn bytes(kept: &Kept) -> Bytes {
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
    /// The template that was made of these parts: the digest under which it is in the store, if another host has it.
    pub(crate) async fn template(&self, parts: &[&[u8]]) -> Result<Option<String>, LinkError> {
        let found = links::find(&self.links.kept, &template(parts)).await?;
        Ok(found.and_then(|found| String::from_utf8(found.value.to_vec()).ok()))
    }

    /// Says that the store has a template; gives the digest of the one that all are to use.
    pub(crate) async fn offer(&self, parts: &[&[u8]], digest: &str) -> Result<String, LinkError> {
        let key = template(parts);
        match links::create(&self.links.kept, &key, Bytes::from(digest.to_owned())).await {
            Err(LinkError::Changed) => {
                Ok(self.template(parts).await?.unwrap_or_else(|| digest.to_owned()))
            }
            other => other.map(|_| digest.to_owned()),
        }
    }

    /// Has all hosts know a snapshot, by its id and its names.
    pub(crate) async fn name(&self, record: &SnapshotRecord, state: &State) -> Result<(), Refusal> {
        let Some(key) = entry::key(&record.id) else { return Err(Refusal::host()) };
        let value = bytes(&Kept { record: record.clone(), state: state.clone() });
        links::put(&self.links.kept, &format!("id.{key}"), value.clone()).await?;
        for name in &record.names {
            let key = entry::named(&record.tenant, name);
            let before = links::find(&self.links.kept, &key).await?;
            links::put(&self.links.kept, &key, value.clone()).await?;
            let before = before.and_then(|found| serde_json::from_slice(&found.value).ok());
            if let Some(before) = before {
                self.lose_names(record, before).await?;
            }
        }
        Ok(())
    }

    /// Has the snapshot that had names before not be listed by them any more.
    async fn lose_names(&self, to: &SnapshotRecord, before: Kept) -> Result<(), Refusal> {
        let Some(key) = entry::key(&before.record.id).filter(|_| before.record.id != to.id) else {
            return Ok(());
        };
        let key = format!("id.{key}");
        // Who changes it meanwhile takes another name away, or removes it: then it is looked at again.
        for _ in 0..3 {
            let Some(found) = links::find(&self.links.kept, &key).await? else { return Ok(()) };
            let Ok(mut kept) = serde_json::from_slice::<Kept>(&found.value) else { return Ok(()) };
            kept.record.names.retain(|name| !to.names.contains(name));
            match links::update(&self.links.kept, &key, bytes(&kept), found.revision).await {
                Err(LinkError::Changed) => {}
                other => return other.map(drop).map_err(Refusal::from),
            }
        }
        Ok(())
    }

    /// A snapshot of a tenant, by its id or name.
    pub(crate) async fn snapshot(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<Option<(SnapshotRecord, State)>, Refusal> {
        let key = match entry::key(name) {
            Some(key) => format!("id.{key}"),
            None => entry::named(tenant, name),
        };
        let Some(found) = links::find(&self.links.kept, &key).await? else { return Ok(None) };
        let kept: Option<Kept> = serde_json::from_slice(&found.value).ok();
        let own = kept.filter(|kept| kept.record.tenant == tenant);
        Ok(own.map(|kept| (kept.record, kept.state)))
    }

    /// The snapshots of a tenant.
    pub(crate) async fn snapshots(&self, tenant: &str) -> Result<Vec<SnapshotRecord>, Refusal> {
        let filter = format!("id.{}.*", entry::whose(tenant));
        let found = links::all(&self.links.client, &self.links.kept, &filter, LISTED).await?;
        let kept =
            found.iter().filter_map(|found| serde_json::from_slice::<Kept>(&found.value).ok());
        Ok(kept.map(|kept| kept.record).filter(|record| record.tenant == tenant).collect())
    }

    /// Forgets a snapshot and the names that still mean it.
    pub(crate) async fn forget(&self, record: &SnapshotRecord) -> Result<(), Refusal> {
        let names = record.names.iter().map(|name| entry::named(&record.tenant, name));
        let own = entry::key(&record.id).map(|key| format!("id.{key}"));
        for key in names.chain(own) {
            let Some(found) = links::find(&self.links.kept, &key).await? else { continue };
            let kept: Option<Kept> = serde_json::from_slice(&found.value).ok();
            if kept.is_none_or(|kept| kept.record.id == record.id) {
                match links::remove(&self.links.kept, &key, found.revision).await {
                    // Another snapshot has the name now.
                    Ok(()) | Err(LinkError::Changed) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }
}
