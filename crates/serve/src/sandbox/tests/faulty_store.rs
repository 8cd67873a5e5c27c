//! A store of sandboxes that fails when a test wants it to.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::records::directory_store::DirectoryStore;
use crate::sandbox::records::store::{
    SandboxRecord, SandboxStore, SavedState, SnapshotRecord, StoredSandbox, StoredSnapshot,
};

/// The records of a directory, with faults.
pub(crate) struct FaultyStore {
    records: DirectoryStore,
    /// The lease of this host is lost.
    pub(crate) has_lost_lease: AtomicBool,
    /// Changes of records fail.
    pub(crate) refuses_updates: AtomicBool,
    /// The next change of a record is made, and fails.
    pub(crate) hides_update: AtomicBool,
    /// Runs while the state of a sandbox is fetched.
    pub(crate) on_fetch: Mutex<Option<Box<dyn Fn() + Send>>>,
}

impl FaultyStore {
    /// The store of a directory, without faults yet.
    pub(crate) fn open(dir: &Path) -> Arc<Self> {
        Arc::new(Self {
            records: DirectoryStore::open(dir).unwrap(),
            has_lost_lease: AtomicBool::new(false),
            refuses_updates: AtomicBool::new(false),
            hides_update: AtomicBool::new(false),
            on_fetch: Mutex::default(),
        })
    }
}

#[async_trait]
impl SandboxStore for FaultyStore {
    fn check(&self, _: &dyn StoredSandbox) -> Result<(), ErrorResponse> {
        let why = "the lease is lost";
        match self.has_lost_lease.load(Ordering::Relaxed) {
            true => Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why)),
            false => Ok(()),
        }
    }

    fn records(&self, dir: &Path) -> Result<Vec<SandboxRecord>, afresh::Cause> {
        self.records.records(dir)
    }

    fn new_id(&self, tenant: &str) -> Result<String, ErrorResponse> {
        self.records.new_id(tenant)
    }

    async fn update(
        &self,
        sandbox: &dyn StoredSandbox,
        record: SandboxRecord,
        saved: Option<SavedState>,
        release: bool,
    ) -> Result<(), ErrorResponse> {
        let why = "the ledger does not answer";
        let fault = || Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why));
        if self.refuses_updates.load(Ordering::Relaxed) {
            return fault();
        }
        self.records.update(sandbox, record, saved, release).await?;
        if self.hides_update.swap(false, Ordering::Relaxed) { fault() } else { Ok(()) }
    }

    fn has_record(&self, sandbox: &dyn StoredSandbox) -> bool {
        self.records.has_record(sandbox)
    }

    async fn remove(&self, sandbox: &dyn StoredSandbox) -> Result<(), ErrorResponse> {
        self.records.remove(sandbox).await
    }

    fn source(&self, dir: &Path, sandbox: &dyn StoredSandbox) -> Result<String, ErrorResponse> {
        if let Some(on_fetch) = &*lock(&self.on_fetch) {
            on_fetch();
        }
        self.records.source(dir, sandbox)
    }

    async fn create_snapshot(
        &self,
        snapshot: StoredSnapshot,
    ) -> Result<Vec<String>, ErrorResponse> {
        self.records.create_snapshot(snapshot).await
    }

    async fn add_names(
        &self,
        record: &SnapshotRecord,
        names: &[String],
    ) -> Result<bool, ErrorResponse> {
        self.records.add_names(record, names).await
    }

    async fn remove_names(
        &self,
        record: &SnapshotRecord,
        names: &[String],
    ) -> Result<(), ErrorResponse> {
        self.records.remove_names(record, names).await
    }

    async fn snapshot(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<Option<StoredSnapshot>, ErrorResponse> {
        self.records.snapshot(tenant, name).await
    }

    async fn snapshots(
        &self,
        tenant: &str,
        most: usize,
    ) -> Result<Vec<SnapshotRecord>, ErrorResponse> {
        self.records.snapshots(tenant, most).await
    }

    async fn remove_snapshot(&self, record: &SnapshotRecord) -> Result<(), ErrorResponse> {
        self.records.remove_snapshot(record).await
    }

    fn snapshot_source(
        &self,
        dir: &Path,
        snapshot: &StoredSnapshot,
    ) -> Result<String, ErrorResponse> {
        self.records.snapshot_source(dir, snapshot)
    }
    fn is_orphan(&self, name: &str) -> bool {
        self.records.is_orphan(name)
    }
}
