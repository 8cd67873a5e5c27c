//! A call whose sandbox may be another host's before the call ends.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;

use super::*;
use crate::sandbox::records::directory_store::DirectoryStore;
use crate::sandbox::records::store::{
    SandboxRecord, SavedState, SnapshotRecord, StoredSandbox, StoredSnapshot,
};

/// A store that a host has under a lease.
struct LeasedStore {
    records: DirectoryStore,
    is_lost: Arc<AtomicBool>,
}

#[async_trait]
impl SandboxStore for LeasedStore {
    fn check(&self, _: &dyn StoredSandbox) -> Result<(), ErrorResponse> {
        let why = "the lease is lost";
        match self.is_lost.load(Ordering::Relaxed) {
            true => Err(ErrorResponse::busy(hyper::StatusCode::SERVICE_UNAVAILABLE, why)),
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
        self.records.update(sandbox, record, saved, release).await
    }

    fn has_record(&self, sandbox: &dyn StoredSandbox) -> bool {
        self.records.has_record(sandbox)
    }

    async fn remove(&self, sandbox: &dyn StoredSandbox) -> Result<(), ErrorResponse> {
        self.records.remove(sandbox).await
    }

    fn source(&self, dir: &Path, sandbox: &dyn StoredSandbox) -> Result<String, ErrorResponse> {
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

    async fn snapshots(&self, tenant: &str) -> Result<Vec<SnapshotRecord>, ErrorResponse> {
        self.records.snapshots(tenant).await
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
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_ends_with_the_lease() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let is_lost = Arc::new(AtomicBool::new(false));
    let records = DirectoryStore::open(&config.dir).unwrap();
    let store = Arc::new(LeasedStore { records, is_lost: is_lost.clone() });
    let all = open_with(&config, store).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    let calling = {
        let (all, sandbox) = (all.clone(), sandbox.clone());
        tokio::spawn(async move { log(&all, &sandbox, "?never").await })
    };
    until("the call does not begin", async || sandbox.life.try_lock().is_err()).await;
    // It runs by now, or is refused by the same check.
    tokio::time::sleep(Duration::from_secs(1)).await;
    is_lost.store(true, Ordering::Relaxed);
    let ended = tokio::time::timeout(TEST_TIMEOUT, calling).await.expect("the call runs on");
    assert_eq!(ended.unwrap().unwrap_err().status.as_u16(), 503);
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap_err().status.as_u16(), 503);
    // The lease is back, and the call was undone.
    is_lost.store(false, Ordering::Relaxed);
    assert_eq!(log(&all, &sandbox, "00000003").await.unwrap(), "0000000100000003");
}
