//! The records of sandboxes and snapshots in files of one server.
//!
//! Promises: a change of snapshots is on the disk before a client sees it; one that the disk
//! refuses has no effect. A reader waits for no disk, and a change for no change of another tenant.
//! The record of a killed sandbox is not written again once it was removed.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use tokio::sync::OwnedMutexGuard;

use crate::error_response::ErrorResponse;
use crate::failure::internal;
use crate::lock::lock;
use crate::sandbox::lifecycle::random::random;
use crate::sandbox::lifecycle::tasks::blocking;
use crate::sandbox::records::record::{Records, saved_id, state_reference};
use crate::sandbox::records::store::{
    SandboxRecord, SandboxStore, SavedState, SnapshotRecord, StoredSandbox, StoredSnapshot,
    check_alive,
};

/// Random bytes of an id.
const ID_BYTES: usize = 10;

/// The records of this server alone.
pub(crate) struct DirectoryStore {
    sandboxes: Records,
    snapshots: Records,
    known: Arc<Mutex<KnownRecords>>,
    /// By tenant, whose names are its own: held by the change that is being written, until it is
    /// known.
    changing: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

/// Snapshots by their ids.
type KnownRecords = BTreeMap<String, SnapshotRecord>;

impl DirectoryStore {
    /// The records in `dir`.
    pub(crate) fn open(dir: &Path) -> Result<Self, afresh::Cause> {
        let sandboxes = Records::open(dir.join("sandboxes"))?;
        let snapshots = Records::open(dir.join("records"))?;
        let mut found = snapshots.all::<SnapshotRecord>()?;
        // States after steps belong to the server before, which may have had other templates.
        for layer in found.extract_if(.., |record| record.is_layer()) {
            snapshots.remove(&layer.id)?;
        }
        let known = found.into_iter();
        let known = known.map(|record| (record.id.clone(), record)).collect();
        let known = Arc::new(Mutex::new(known));
        Ok(Self { sandboxes, snapshots, known, changing: Mutex::default() })
    }

    /// Waits until the changes of a tenant before are known.
    async fn begin_change(&self, tenant: &str) -> OwnedMutexGuard<()> {
        let changing = {
            let mut all = lock(&self.changing);
            all.retain(|_, other| Arc::strong_count(other) > 1);
            all.entry(tenant.to_owned()).or_default().clone()
        };
        changing.lock_owned().await
    }

    /// Records a snapshot of `tenant` that `change` makes of those that are known, and whose names
    /// others lose. `false` if it makes none.
    async fn assign(
        &self,
        tenant: &str,
        change: impl FnOnce(&KnownRecords) -> Option<SnapshotRecord>,
    ) -> Result<bool, ErrorResponse> {
        let changing = self.begin_change(tenant).await;
        let new = change(&self.lock_known());
        let Some(changed) = new.map(|new| self.with_losers(new)) else { return Ok(false) };
        let (records, known) = (self.snapshots.clone(), self.known.clone());
        blocking(move || {
            // Also if the client leaves meanwhile.
            let _changing = changing;
            let all: Vec<_> = changed.iter().map(|record| (record.id.as_str(), record)).collect();
            records.store_all(&all).map_err(|error| internal(&error))?;
            lock(&known).extend(changed.into_iter().map(|record| (record.id.clone(), record)));
            Ok(true)
        })
        .await
    }

    /// A snapshot, and those that lose names to it.
    fn with_losers(&self, new: SnapshotRecord) -> Vec<SnapshotRecord> {
        // A record of the same id is an earlier version, which this one replaces.
        let loses = |other: &&SnapshotRecord| {
            other.tenant == new.tenant
                && other.id != new.id
                && other.names.iter().any(|name| new.names.contains(name))
        };
        let mut losers: Vec<SnapshotRecord> =
            self.lock_known().values().filter(loses).cloned().collect();
        for loser in &mut losers {
            loser.names.retain(|name| !new.names.contains(name));
        }
        losers.insert(0, new);
        losers
    }

    fn lock_known(&self) -> MutexGuard<'_, KnownRecords> {
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
        let writing = sandbox.entry().writing.clone().lock_owned().await;
        check_alive(sandbox)?;
        let (records, id) = (self.sandboxes.clone(), sandbox.id().to_owned());
        blocking(move || {
            // Until the file is written, also for a client that leaves.
            let _writing = writing;
            records.store_record(&id, &record).map_err(|error| internal(&error))
        })
        .await
    }

    fn has_record(&self, sandbox: &dyn StoredSandbox) -> bool {
        sandbox.is_saved()
    }

    async fn remove(&self, sandbox: &dyn StoredSandbox) -> Result<(), ErrorResponse> {
        let writing = sandbox.entry().writing.clone().lock_owned().await;
        let (records, id) = (self.sandboxes.clone(), sandbox.id().to_owned());
        blocking(move || {
            let _writing = writing;
            records.remove(&id).map_err(|error| internal(&error))
        })
        .await
    }

    fn source(&self, dir: &Path, sandbox: &dyn StoredSandbox) -> Result<String, ErrorResponse> {
        Ok(state_reference(dir, &sandbox.saved_name()))
    }

    fn known_snapshots(&self) -> Vec<SnapshotRecord> {
        self.lock_known().values().cloned().collect()
    }

    async fn create_snapshot(
        &self,
        snapshot: StoredSnapshot,
    ) -> Result<Vec<String>, ErrorResponse> {
        let record = snapshot.record;
        let (names, tenant) = (record.names.clone(), record.tenant.clone());
        self.assign(&tenant, |_| Some(record)).await?;
        Ok(names)
    }

    async fn add_names(
        &self,
        record: &SnapshotRecord,
        names: &[String],
    ) -> Result<bool, ErrorResponse> {
        let add = |all: &KnownRecords| {
            let mut record = all.get(&record.id).cloned()?;
            for name in names {
                if !record.names.contains(name) {
                    record.names.push(name.clone());
                }
            }
            Some(record)
        };
        self.assign(&record.tenant, add).await
    }

    async fn remove_names(
        &self,
        record: &SnapshotRecord,
        names: &[String],
    ) -> Result<(), ErrorResponse> {
        let remove = |all: &KnownRecords| {
            let mut record = all.get(&record.id).cloned()?;
            record.names.retain(|name| !names.contains(name));
            Some(record)
        };
        self.assign(&record.tenant, remove).await.map(drop)
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

    async fn snapshots(
        &self,
        tenant: &str,
        _: usize,
    ) -> Result<Vec<SnapshotRecord>, ErrorResponse> {
        let all = self.lock_known();
        Ok(all.values().filter(|record| record.tenant == tenant).cloned().collect())
    }

    async fn remove_snapshot(&self, record: &SnapshotRecord) -> Result<(), ErrorResponse> {
        let changing = self.begin_change(&record.tenant).await;
        let (records, known) = (self.snapshots.clone(), self.known.clone());
        let id = record.id.clone();
        blocking(move || {
            let _changing = changing;
            records.remove(&id).map_err(|error| internal(&error))?;
            lock(&known).remove(&id);
            Ok(())
        })
        .await
    }

    fn snapshot_source(
        &self,
        dir: &Path,
        snapshot: &StoredSnapshot,
    ) -> Result<String, ErrorResponse> {
        Ok(state_reference(dir, &format!("snap-{}", snapshot.record.id)))
    }

    fn is_orphan(&self, name: &str) -> bool {
        match (name.strip_prefix("snap-"), saved_id(name)) {
            (Some(id), _) => !self.snapshots.has(id),
            (_, Some((id, second))) => match self.sandboxes.peek::<SandboxRecord>(id) {
                Ok(record) => record.is_none_or(|record| record.second_name != second),
                // It may name either.
                Err(_) => false,
            },
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    fn snapshot(id: &str, names: &[&str]) -> SnapshotRecord {
        SnapshotRecord {
            version: Default::default(),
            id: id.to_owned(),
            tenant: "t".to_owned(),
            template: "x".to_owned(),
            sandbox: "s".to_owned(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            envs: BTreeMap::new(),
            directory: None,
            root: false,
            built: None,
            base: None,
            stored: 0,
            unknown: Default::default(),
        }
    }

    async fn create(store: &DirectoryStore, record: SnapshotRecord) -> Result<(), ErrorResponse> {
        let kept = SavedState::default();
        store.create_snapshot(StoredSnapshot { record, kept }).await.map(drop)
    }

    /// The id of the snapshot with a name: in this server, and in the next.
    async fn named(store: &DirectoryStore, dir: &Path, name: &str) -> [Option<String>; 2] {
        let next = DirectoryStore::open(dir).unwrap();
        let mut ids = [None, None];
        for (store, id) in [store, &next].into_iter().zip(&mut ids) {
            let found = store.snapshot("t", name).await.unwrap();
            *id = found.map(|known| known.record.id);
        }
        ids
    }

    fn both(id: &str) -> [Option<String>; 2] {
        [Some(id.to_owned()), Some(id.to_owned())]
    }

    /// A place that no record can be written at.
    struct BadPlace(PathBuf);

    impl BadPlace {
        fn make(dir: &Path, id: &str) -> Self {
            let path = dir.join("records").join(id).with_extension("part");
            fs::create_dir(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for BadPlace {
        fn drop(&mut self) {
            fs::remove_dir(&self.0).unwrap();
        }
    }

    #[tokio::test]
    async fn a_change_that_the_disk_refuses_has_no_effect() {
        let dir = tempfile::tempdir().unwrap();
        let store = DirectoryStore::open(dir.path()).unwrap();
        create(&store, snapshot("a", &["web", "web:default"])).await.unwrap();
        create(&store, snapshot("c", &["other"])).await.unwrap();
        // The record of the snapshot that would lose its names, and that of the new one.
        for id in ["a", "b"] {
            let bad = BadPlace::make(dir.path(), id);
            assert!(create(&store, snapshot("b", &["web", "web:default"])).await.is_err());
            if id == "a" {
                let more = ["web".to_owned()];
                assert!(store.add_names(&snapshot("c", &[]), &more).await.is_err());
                assert!(store.remove_names(&snapshot("a", &[]), &more).await.is_err());
            }
            drop(bad);
            assert_eq!(named(&store, dir.path(), "web").await, both("a"));
            assert_eq!(named(&store, dir.path(), "other").await, both("c"));
            assert_eq!(named(&store, dir.path(), "b").await, [None, None]);
        }
        create(&store, snapshot("b", &["web"])).await.unwrap();
        assert_eq!(named(&store, dir.path(), "web").await, both("b"));
        assert_eq!(named(&store, dir.path(), "web:default").await, both("a"));
    }

    #[tokio::test]
    async fn a_removal_that_the_disk_refuses_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = DirectoryStore::open(dir.path()).unwrap();
        create(&store, snapshot("a", &["web"])).await.unwrap();
        let file = dir.path().join("records/a.json");
        let aside = dir.path().join("aside");
        fs::rename(&file, &aside).unwrap();
        fs::create_dir(&file).unwrap();
        assert!(store.remove_snapshot(&snapshot("a", &[])).await.is_err());
        fs::remove_dir(&file).unwrap();
        fs::rename(&aside, &file).unwrap();
        assert_eq!(named(&store, dir.path(), "web").await, both("a"));
        store.remove_snapshot(&snapshot("a", &[])).await.unwrap();
        assert_eq!(named(&store, dir.path(), "web").await, [None, None]);
    }

    /// On the one thread of this runtime a wait for the disk would stop everything.
    #[tokio::test]
    async fn a_disk_that_hangs_stops_no_reader_and_no_other_tenant() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(DirectoryStore::open(dir.path()).unwrap());
        create(&store, snapshot("a", &["web"])).await.unwrap();
        // Opening it for writing waits for a reader.
        let pipe = dir.path().join("records/b.part");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        let hanging = tokio::spawn({
            let store = store.clone();
            async move { create(&store, snapshot("b", &["web"])).await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        let waiting = tokio::spawn({
            let store = store.clone();
            async move { create(&store, snapshot("c", &["web"])).await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(store.snapshot("t", "web").await.unwrap().unwrap().record.id, "a");
        assert_eq!(store.snapshots("t", 100).await.unwrap().len(), store.known_snapshots().len());
        let other = SnapshotRecord { tenant: "u".to_owned(), ..snapshot("d", &["web"]) };
        let created = tokio::time::timeout(TEST_TIMEOUT, create(&store, other)).await;
        created.expect("it waits for a change of another tenant").unwrap();
        assert!(!hanging.is_finished() && !waiting.is_finished());
        assert_eq!(lock(&store.changing).len(), 2);
        // A pipe cannot be synced, so the change fails once it is opened.
        let reader = std::thread::spawn(move || fs::read(pipe));
        assert!(hanging.await.unwrap().is_err());
        reader.join().unwrap().unwrap();
        waiting.await.unwrap().unwrap();
        assert_eq!(named(&store, dir.path(), "web").await, both("c"));
    }
}
