//! The records of sandboxes and snapshots in files of one server.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use async_trait::async_trait;

use super::random::random;
use super::record::{Records, state_reference};
use super::store::{
    SandboxRecord, SandboxStore, SavedState, SnapshotRecord, StoredSandbox, StoredSnapshot,
};
use super::tasks::blocking;
use crate::error_response::ErrorResponse;
use crate::failure::internal;
use crate::lock::lock;

/// Random bytes of an id.
const ID_BYTES: usize = 10;

/// The records of this server alone.
pub(super) struct DirectoryStore {
    sandboxes: Records,
    snapshots: Records,
    known: Mutex<BTreeMap<String, SnapshotRecord>>,
}

impl DirectoryStore {
    /// The records in `dir`.
    pub(super) fn open(dir: &Path) -> Result<Self, afresh::Cause> {
        let sandboxes = Records::open(dir.join("sandboxes"))?;
        let snapshots = Records::open(dir.join("records"))?;
        let mut found = snapshots.all::<SnapshotRecord>()?;
        // States after steps belong to the server before, which may have had other templates.
        for layer in found.extract_if(.., |record| record.is_layer()) {
            snapshots.remove(&layer.id)?;
        }
        let known = found.into_iter();
        let known = Mutex::new(known.map(|record| (record.id.clone(), record)).collect());
        Ok(Self { sandboxes, snapshots, known })
    }

    /// Records a snapshot whose names others lose.
    fn assign(
        &self,
        all: &mut BTreeMap<String, SnapshotRecord>,
        record: SnapshotRecord,
    ) -> Result<(), ErrorResponse> {
        let store = |record: &SnapshotRecord| {
            self.snapshots.store_record(&record.id, record).map_err(|error| internal(&error))
        };
        store(&record)?;
        // A record of the same id is an earlier version, which this one replaces.
        let is_other =
            |other: &&mut SnapshotRecord| other.tenant == record.tenant && other.id != record.id;
        for other in all.values_mut().filter(is_other) {
            let had = other.names.len();
            other.names.retain(|name| !record.names.contains(name));
            if other.names.len() != had {
                store(other)?;
            }
        }
        all.insert(record.id.clone(), record);
        Ok(())
    }

    fn lock_known(&self) -> MutexGuard<'_, BTreeMap<String, SnapshotRecord>> {
        lock(&self.known)
    }
}

#[async_trait]
impl SandboxStore for DirectoryStore {
    fn records(&self, _: &Path) -> Result<Vec<SandboxRecord>, afresh::Cause> {
        Ok(self.sandboxes.all()?)
    }

    fn new_id(&self, _: &str) -> Result<String, ErrorResponse> {
        random(ID_BYTES)
    }

    async fn update(
        &self,
        sandbox: &dyn StoredSandbox,
        record: SandboxRecord,
        _: Option<SavedState>,
        _: bool,
    ) -> Result<(), ErrorResponse> {
        let (records, id) = (self.sandboxes.clone(), sandbox.id().to_owned());
        blocking(move || records.store_record(&id, &record).map_err(|error| internal(&error))).await
    }

    fn has_record(&self, sandbox: &dyn StoredSandbox) -> bool {
        sandbox.is_saved()
    }

    async fn remove(&self, sandbox: &dyn StoredSandbox) -> Result<(), ErrorResponse> {
        let (records, id) = (self.sandboxes.clone(), sandbox.id().to_owned());
        blocking(move || records.remove(&id).map_err(|error| internal(&error))).await
    }

    fn source(&self, dir: &Path, sandbox: &dyn StoredSandbox) -> Result<String, ErrorResponse> {
        Ok(state_reference(dir, &format!("sandbox-{}", sandbox.id())))
    }

    fn known_snapshots(&self) -> Vec<SnapshotRecord> {
        self.lock_known().values().cloned().collect()
    }

    async fn create_snapshot(
        &self,
        snapshot: StoredSnapshot,
    ) -> Result<Vec<String>, ErrorResponse> {
        let record = snapshot.record;
        let names = record.names.clone();
        self.assign(&mut self.lock_known(), record)?;
        Ok(names)
    }

    async fn add_names(
        &self,
        record: &SnapshotRecord,
        names: &[String],
    ) -> Result<bool, ErrorResponse> {
        let mut all = self.lock_known();
        let Some(mut record) = all.get(&record.id).cloned() else { return Ok(false) };
        for name in names {
            if !record.names.contains(name) {
                record.names.push(name.clone());
            }
        }
        self.assign(&mut all, record)?;
        Ok(true)
    }

    async fn remove_names(
        &self,
        record: &SnapshotRecord,
        names: &[String],
    ) -> Result<(), ErrorResponse> {
        let mut all = self.lock_known();
        let Some(mut record) = all.get(&record.id).cloned() else { return Ok(()) };
        record.names.retain(|name| !names.contains(name));
        self.assign(&mut all, record)
    }

    async fn snapshot(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<Option<StoredSnapshot>, ErrorResponse> {
        let all = self.lock_known();
        let own = |record: &&SnapshotRecord| record.tenant == tenant;
        let named = |record: &&SnapshotRecord| record.names.iter().any(|own| own == name);
        let by_id = all.get(name).filter(own);
        let found = by_id.or_else(|| all.values().filter(own).find(named)).cloned();
        Ok(found.map(|record| StoredSnapshot { record, kept: SavedState::default() }))
    }

    async fn snapshots(&self, tenant: &str) -> Result<Vec<SnapshotRecord>, ErrorResponse> {
        let all = self.lock_known();
        Ok(all.values().filter(|record| record.tenant == tenant).cloned().collect())
    }

    async fn remove_snapshot(&self, record: &SnapshotRecord) -> Result<(), ErrorResponse> {
        self.lock_known().remove(&record.id);
        let (records, id) = (self.snapshots.clone(), record.id.clone());
        blocking(move || records.remove(&id).map_err(|error| internal(&error))).await
    }

    fn snapshot_source(
        &self,
        dir: &Path,
        snapshot: &StoredSnapshot,
    ) -> Result<String, ErrorResponse> {
        Ok(state_reference(dir, &format!("snap-{}", snapshot.record.id)))
    }

    fn is_orphan(&self, name: &str) -> bool {
        match name.split_once('-') {
            Some(("snap", id)) => !self.snapshots.has(id),
            Some(("sandbox", id)) => !self.sandboxes.has(id),
            _ => false,
        }
    }
}
