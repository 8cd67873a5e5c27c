//! Sources of sandboxes on all hosts of a fleet: templates that the first host has warmed, and
//! snapshots that clients have made.
//!
//! Promises: a template is the same on all hosts that serve it, down to its pages, so a sandbox
//! saved on one host is a difference from data that the others have already. A snapshot has one
//! entry, `id.*`, and only that counts; an entry `name.*` only points to it. Both are changed by
//! compare-and-set. A lookup that began after a change of a name was acknowledged sees that change,
//! and of two builds of a template the one whose entry NATS took first never takes a name from the
//! other.

use std::collections::{BTreeSet, HashMap, HashSet};

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::Fleet;
use super::nats::{self, BucketEntry, NatsError};
use super::record::{self, State};
use crate::error_response::ErrorResponse;
use crate::format_version::FormatVersion;
use crate::sandbox::records::store::{SnapshotRecord, UnknownFields};

/// The first part of the keys of names.
const NAME: &str = "name.";
/// Attempts at a change that other hosts keep changing.
const MAX_ATTEMPTS: usize = 32;
/// Names that are listed for each listed snapshot of a tenant.
const LISTED_NAMES_PER_SNAPSHOT: usize = 4;

/// The entry `id.*` of a snapshot: the one truth about it.
#[derive(serde::Serialize, serde::Deserialize)]
struct CatalogEntry {
    #[serde(default)]
    version: FormatVersion,
    record: SnapshotRecord,
    state: State,
    #[serde(flatten)]
    unknown: UnknownFields,
}

impl CatalogEntry {
    fn claims(&self, name: &str) -> bool {
        self.record.names.iter().any(|own| own == name)
    }
}

/// The entry `name.*` of a name. It counts only where the entry of the snapshot claims the name.
#[derive(Clone, serde::Serialize, serde::Deserialize)]
struct NamePointer {
    #[serde(default)]
    version: FormatVersion,
    /// The snapshot.
    id: String,
    /// The revision at which the entry of the snapshot claimed the name. Of two claims the one with
    /// the greater revision is the later one, without any clock of a host.
    #[serde(default)]
    claimed: u64,
    #[serde(flatten)]
    unknown: UnknownFields,
}

impl NamePointer {
    fn new(id: String, claimed: u64) -> Self {
        let (version, unknown) = (FormatVersion::default(), UnknownFields::default());
        Self { version, id, claimed, unknown }
    }
}

/// A pointer, or the whole record that earlier builds stored in its place.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum NameEntry {
    Pointer(NamePointer),
    Copy { record: CopiedRecord },
}

#[derive(serde::Deserialize)]
struct CopiedRecord {
    id: String,
}

/// The digest that an entry of the bucket names.
pub(super) fn digest(key: &str, value: &[u8]) -> Option<String> {
    if key.starts_with(NAME) {
        return None;
    }
    match serde_json::from_slice::<CatalogEntry>(value) {
        Ok(kept) => Some(kept.state.digest),
        // A template's is its digest.
        Err(_) => std::str::from_utf8(value).ok().map(str::to_owned),
    }
}

/// An entry of the bucket as a backup has it. Revisions of another ledger mean nothing.
pub(super) fn at_rest(key: &str, value: Bytes) -> Bytes {
    match pointer(&value).filter(|_| key.starts_with(NAME)) {
        Some(pointer) => bytes(&NamePointer { claimed: 0, ..pointer }),
        None => value,
    }
}

fn pointer(value: &[u8]) -> Option<NamePointer> {
    Some(match serde_json::from_slice(value).ok()? {
        NameEntry::Pointer(pointer) => pointer,
        NameEntry::Copy { record } => NamePointer::new(record.id, 0),
    })
}

fn bytes(value: &impl serde::Serialize) -> Bytes {
    // Text and numbers.
    Bytes::from(serde_json::to_vec(value).unwrap_or_default())
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
    /// The digest of the template made of these parts, if another host has stored it, and when, in
    /// milliseconds since 1970.
    pub(super) async fn shared_template(
        &self,
        parts: &[&[u8]],
    ) -> Result<Option<(String, u64)>, NatsError> {
        let key = template(parts);
        let found = nats::patiently(async || nats::find(&self.links.kept, &key).await).await?;
        Ok(found
            .and_then(|found| Some((String::from_utf8(found.value.to_vec()).ok()?, found.time))))
    }

    /// Says that the store has a template; gives the digest that all hosts must use.
    pub(super) async fn offer(&self, parts: &[&[u8]], digest: &str) -> Result<String, NatsError> {
        let key = template(parts);
        let value = Bytes::from(digest.to_owned());
        let made = async || nats::create(&self.links.kept, &key, value.clone()).await;
        match nats::patiently(made).await {
            Err(NatsError::Changed) => {
                let other = self.shared_template(parts).await?;
                Ok(other.map_or_else(|| digest.to_owned(), |(digest, _)| digest))
            }
            other => other.map(|_| digest.to_owned()),
        }
    }

    /// The entry of a snapshot, and its revision.
    async fn catalog_entry(&self, id: &str) -> Result<Option<(u64, CatalogEntry)>, NatsError> {
        let Some(key) = record::key(id) else { return Ok(None) };
        let Some(found) = nats::find(&self.links.kept, &format!("id.{key}")).await? else {
            return Ok(None);
        };
        let entry = serde_json::from_slice(&found.value).ok();
        Ok(entry.map(|entry| (found.revision, entry)))
    }

    /// Changes the names of a snapshot and returns the revision; `None` if it does not exist, or if
    /// `change` returns `false`.
    async fn change_claims(
        &self,
        id: &str,
        mut change: impl FnMut(&mut Vec<String>) -> bool,
    ) -> Result<Option<u64>, NatsError> {
        let Some(key) = record::key(id) else { return Ok(None) };
        let key = format!("id.{key}");
        for _ in 0..MAX_ATTEMPTS {
            let Some((revision, mut entry)) = self.catalog_entry(id).await? else {
                return Ok(None);
            };
            if !change(&mut entry.record.names) {
                return Ok(None);
            }
            match nats::update(&self.links.kept, &key, bytes(&entry), revision).await {
                Err(NatsError::Changed) => {}
                changed => return changed.map(Some),
            }
        }
        Err(NatsError::Changed)
    }

    /// Has a snapshot lose a name; returns the revision of the entry without it, or `None` if it
    /// did not have the name.
    async fn drop_claim(&self, id: &str, name: &str) -> Result<Option<u64>, NatsError> {
        let dropping = self.change_claims(id, |names| {
            let before = names.len();
            names.retain(|own| own != name);
            names.len() != before
        });
        dropping.await
    }

    /// Has a name mean the snapshot whose entry claimed it at the revision `claimed`, unless a
    /// later claim has it. `false` if the snapshot does not have the name afterwards.
    async fn set_name(
        &self,
        tenant: &str,
        name: &str,
        id: &str,
        claimed: u64,
    ) -> Result<bool, NatsError> {
        let (kept, key) = (&self.links.kept, record::named(tenant, name));
        for _ in 0..MAX_ATTEMPTS {
            let found = nats::find(kept, &key).await?;
            let before = found.as_ref().and_then(|found| pointer(&found.value));
            let (own, other): (Option<NamePointer>, _) = match before {
                Some(before) if before.id == id => (Some(before), None),
                other => (None, other),
            };
            let holder = match &other {
                Some(other) => self.catalog_entry(&other.id).await?,
                None => None,
            };
            let holds = holder.is_some_and(|(_, holder)| holder.claims(name));
            if let Some(other) = other.as_ref().filter(|_| holds)
                && other.claimed > claimed
            {
                self.drop_claim(id, name).await?;
                return Ok(false);
            }
            let value = match &own {
                Some(own) => bytes(&NamePointer { claimed, ..own.clone() }),
                None => bytes(&NamePointer::new(id.to_owned(), claimed)),
            };
            let pointed = match found {
                // Another request gave the same snapshot the name, later.
                Some(found) if own.is_some_and(|own| own.claimed >= claimed) => Ok(found.revision),
                None => nats::create(kept, &key, value).await,
                Some(found) => nats::update(kept, &key, value, found.revision).await,
            };
            let revision = match pointed {
                Err(NatsError::Changed) => continue,
                pointed => pointed?,
            };
            if let Some(other) = other.filter(|_| holds) {
                self.drop_claim(&other.id, name).await?;
            }
            // The claim may have been dropped since it was made, by a host that could not see the
            // pointer yet.
            let own = self.catalog_entry(id).await?;
            if own.is_some_and(|(_, own)| own.claims(name)) {
                return Ok(true);
            }
            match nats::remove(kept, &key, revision).await {
                Ok(()) | Err(NatsError::Changed) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Err(NatsError::Changed)
    }

    /// Removes a name if it means this snapshot by a claim before the revision `before`.
    async fn unset_name(
        &self,
        tenant: &str,
        name: &str,
        id: &str,
        before: u64,
    ) -> Result<(), NatsError> {
        let key = record::named(tenant, name);
        for _ in 0..MAX_ATTEMPTS {
            let Some(found) = nats::find(&self.links.kept, &key).await? else { return Ok(()) };
            let other = |at: NamePointer| at.id != id || at.claimed >= before;
            if pointer(&found.value).is_some_and(other) {
                return Ok(());
            }
            match nats::remove(&self.links.kept, &key, found.revision).await {
                Err(NatsError::Changed) => {}
                done => return done,
            }
        }
        Err(NatsError::Changed)
    }

    /// Makes a snapshot known to all hosts, by its id and its names, and returns the names that it
    /// has.
    pub(super) async fn enter_snapshot(
        &self,
        record: &SnapshotRecord,
        state: &State,
    ) -> Result<Vec<String>, ErrorResponse> {
        let claimed = self.claim_first(record, state).await?;
        self.set_names(record, claimed).await
    }

    /// Makes the entry of a snapshot, and returns its revision: the place of the snapshot among all
    /// that claim its names.
    pub(super) async fn claim_first(
        &self,
        record: &SnapshotRecord,
        state: &State,
    ) -> Result<u64, ErrorResponse> {
        let Some(key) = record::key(&record.id) else { return Err(ErrorResponse::host()) };
        let value = bytes(&CatalogEntry {
            version: FormatVersion::default(),
            record: record.clone(),
            state: state.clone(),
            unknown: UnknownFields::default(),
        });
        let made = nats::create(&self.links.kept, &format!("id.{key}"), value).await;
        // A refused snapshot is removed, and its client has no id of it to look at.
        Ok(made.map_err(NatsError::repeatable)?)
    }

    /// Has the names of a new snapshot mean it, and returns those that do.
    pub(super) async fn set_names(
        &self,
        record: &SnapshotRecord,
        claimed: u64,
    ) -> Result<Vec<String>, ErrorResponse> {
        let mut names = Vec::with_capacity(record.names.len());
        for name in &record.names {
            if self.set_name(&record.tenant, name, &record.id, claimed).await? {
                names.push(name.clone());
            }
        }
        Ok(names)
    }

    /// Gives a snapshot a name. `false` if it does not exist any more.
    pub(super) async fn add_name(
        &self,
        record: &SnapshotRecord,
        name: &str,
    ) -> Result<bool, ErrorResponse> {
        for _ in 0..MAX_ATTEMPTS {
            // Also where it claims the name already: a new revision is a later claim than those of
            // others.
            let claimed = self.change_claims(&record.id, |names| {
                if !names.iter().any(|own| own == name) {
                    names.push(name.to_owned());
                }
                true
            });
            let Some(claimed) = claimed.await? else { return Ok(false) };
            let tenant = &record.tenant;
            if self.set_name(tenant, name, &record.id, claimed).await? {
                return Ok(true);
            }
            // A later claim won, or one of before dropped this one: the client who asked now is the
            // last.
        }
        Err(NatsError::Changed.into())
    }

    /// Takes a name from a snapshot.
    pub(super) async fn drop_name(
        &self,
        record: &SnapshotRecord,
        name: &str,
    ) -> Result<(), ErrorResponse> {
        match self.drop_claim(&record.id, name).await? {
            Some(dropped) => Ok(self.unset_name(&record.tenant, name, &record.id, dropped).await?),
            None => Ok(()),
        }
    }

    /// A snapshot of a tenant, by its id or name.
    pub(super) async fn find_snapshot(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<Option<(SnapshotRecord, State)>, ErrorResponse> {
        let own = |entry: CatalogEntry| {
            (entry.record.tenant == tenant).then_some((entry.record, entry.state))
        };
        if record::key(name).is_some() {
            return Ok(self.catalog_entry(name).await?.and_then(|(_, entry)| own(entry)));
        }
        let (kept, key) = (&self.links.kept, record::named(tenant, name));
        let mut stale = None;
        for _ in 0..MAX_ATTEMPTS {
            let Some(found) = nats::find(kept, &key).await? else { return Ok(None) };
            if stale == Some(found.revision) {
                // A host died before it removed the name. It is removed unless another host uses it
                // now.
                let _ = nats::remove(kept, &key, found.revision).await;
                return Ok(None);
            }
            let Some(pointer) = pointer(&found.value) else { return Ok(None) };
            match self.catalog_entry(&pointer.id).await? {
                Some((_, entry)) if entry.claims(name) => return Ok(own(entry)),
                // The name may have moved between both reads.
                _ => stale = Some(found.revision),
            }
        }
        Err(NatsError::Changed.into())
    }

    /// The snapshots of a tenant, at most `most`, each with the names that mean it.
    pub(super) async fn snapshots_of(
        &self,
        tenant: &str,
        most: usize,
    ) -> Result<Vec<SnapshotRecord>, ErrorResponse> {
        let prefix = record::tenant_prefix(tenant);
        let parse = |found: &BucketEntry| serde_json::from_slice::<CatalogEntry>(&found.value).ok();
        let filter = format!("id.{prefix}.*");
        let own = |entry: &CatalogEntry| entry.record.tenant == tenant;
        let list = self.list_readable(|links| &links.kept, &filter, most, parse, own).await?;
        if list.omitted > 0 {
            tracing::warn!(tenant, most, "a list of snapshots ends at its maximum");
        }
        let entries = list.entries.into_iter();
        let mut records: Vec<SnapshotRecord> = entries.map(|entry| entry.record).collect();
        if records.iter().all(|record| record.names.is_empty()) {
            return Ok(records);
        }
        let filter = format!("{NAME}{prefix}.*");
        let parse = |found: &BucketEntry| Some((found.key.clone(), pointer(&found.value)?.id));
        let names = records.iter().flat_map(|record| &record.names);
        let names: HashSet<String> = names.map(|name| record::named(tenant, name)).collect();
        let own = |(key, _): &(String, String)| names.contains(key);
        let most = most.saturating_mul(LISTED_NAMES_PER_SNAPSHOT);
        let list = self.list_readable(|links| &links.kept, &filter, most, parse, own).await?;
        // An unreadable name may mean the snapshot.
        let whole = list.omitted == 0 && list.unreadable == 0;
        let pointers: HashMap<String, String> = list.entries.into_iter().collect();
        let claims: HashSet<(String, String)> = records
            .iter()
            .flat_map(|record| record.names.iter().map(|name| (record.id.clone(), name.clone())))
            .collect();
        for record in &mut records {
            let own = &record.id;
            record.names.retain(|name| match pointers.get(&record::named(tenant, name)) {
                // The claim of a host that died before the name meant the snapshot.
                None => !whole,
                // The name may have moved after the snapshots were read.
                Some(id) => id == own || !claims.contains(&(id.clone(), name.clone())),
            });
        }
        Ok(records)
    }

    /// Removes a snapshot and its names.
    pub(super) async fn forget(&self, record: &SnapshotRecord) -> Result<(), ErrorResponse> {
        let Some(key) = record::key(&record.id) else { return Ok(()) };
        let key = format!("id.{key}");
        let mut names: BTreeSet<String> = record.names.iter().cloned().collect();
        let mut left = MAX_ATTEMPTS;
        while let Some((revision, entry)) = self.catalog_entry(&record.id).await? {
            names.extend(entry.record.names);
            match nats::remove(&self.links.kept, &key, revision).await {
                Ok(()) => break,
                // Its names were changed at the same time.
                Err(NatsError::Changed) if left > 0 => left -= 1,
                Err(error) => return Err(error.into()),
            }
        }
        for name in names {
            self.unset_name(&record.tenant, &name, &record.id, u64::MAX).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format_version::tests::{check_goldens, check_unknown_fields};

    #[test]
    fn entries_of_snapshots_and_names_are_read_and_written_as_they_were() {
        let record = serde_json::json!({
            "id": "id", "tenant": "acme", "template": "script", "sandbox": "source",
            "names": ["web"],
        });
        let state = State {
            digest: "digest".to_owned(),
            bytes: 1,
            by: "a-1".to_owned(),
            unknown: UnknownFields::default(),
        };
        let entry = CatalogEntry {
            version: FormatVersion::default(),
            record: serde_json::from_value(record).unwrap(),
            state,
            unknown: serde_json::from_value(serde_json::json!({"later": 1})).unwrap(),
        };
        check_goldens("catalog", &entry);
        check_unknown_fields::<CatalogEntry>("catalog", 3);
        check_goldens("name", &NamePointer::new("id".to_owned(), 7));
        check_unknown_fields::<NamePointer>("name", 1);
    }
}
