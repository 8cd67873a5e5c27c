//! The space that saved states take in the store, and what their tenant is charged for.

use afresh::Store;
use afresh::files::Time;

use super::*;
use crate::sandbox::catalog::snapshots::SnapshotOptions;
use crate::sandbox::lifecycle::random::random;
use crate::sandbox::records::record::SnapshotRecord;

const FILE: &str = "/home/user/data";
/// Half as many after compression.
const FILE_BYTES: usize = 1 << 20;
const ROUNDS: u64 = 4;
/// Manifests, which do not count.
const MANIFESTS: u64 = 64 << 10;

/// The store of a server, with only its templates at first.
struct Disk {
    store: Store,
    templates: u64,
}

impl Disk {
    fn of(dir: &TempDir) -> Self {
        let store = Store::open(dir.path().join("server/snapshots")).unwrap();
        let mut this = Self { store, templates: 0 };
        this.templates = this.states();
        this
    }

    /// Bytes that saved states need.
    fn states(&self) -> u64 {
        self.store.gc().unwrap();
        let blobs = std::fs::read_dir(self.store.root().join("blobs/sha256")).unwrap();
        let bytes: u64 = blobs.map(|blob| blob.unwrap().metadata().unwrap().len()).sum();
        bytes - self.templates
    }

    /// Checks that the tenant is charged for all of it, once.
    fn check(&self, all: &Sandboxes) -> u64 {
        let (kept, charged) = (self.states(), charged(all));
        assert!(charged <= kept && kept <= charged + MANIFESTS, "{charged} of {kept}");
        charged
    }
}

fn charged(all: &Sandboxes) -> u64 {
    all.resource_use().get(TENANT).map_or(0, |held| held.stored)
}

/// Writes other bytes into the file.
async fn fill(all: &Arc<Sandboxes>, sandbox: &Arc<Sandbox>) {
    let bytes = random(FILE_BYTES / 2).unwrap();
    let written = all.files(sandbox, move |tree| {
        tree.write_path(FILE, bytes.as_bytes(), Time::now()).unwrap();
        Ok(())
    });
    written.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_of_snapshots_counts_the_layers_of_those_that_were_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let all = open(&config).await;
    let disk = Disk::of(&dir);
    let mut last = None;
    for round in 1..=ROUNDS {
        let mut wanted = options(HOUR);
        if let Some(SnapshotRecord { id, .. }) = &last {
            wanted.template.clone_from(id);
        }
        let sandbox = make(&all, wanted).await;
        fill(&all, &sandbox).await;
        let kept = SnapshotOptions::of_sandbox(&sandbox, Vec::new());
        let record = all.keep(&sandbox, kept).await.unwrap();
        all.kill(&sandbox).await.unwrap();
        if let Some(before) = last.replace(record) {
            all.forget(before).await.unwrap();
        }
        assert!(disk.check(&all) > round * FILE_BYTES as u64 / 4);
    }
    // A second snapshot of the same state takes no space.
    let before = charged(&all);
    let record = last.unwrap();
    let sandbox = make(&all, CreateOptions { template: record.id.clone(), ..options(HOUR) }).await;
    let kept = SnapshotOptions::of_sandbox(&sandbox, Vec::new());
    let second = all.keep(&sandbox, kept).await.unwrap();
    all.kill(&sandbox).await.unwrap();
    assert!(disk.check(&all) < before + MANIFESTS);
    // Another server counts what it finds.
    all.release();
    drop((all, sandbox));
    let all = open(&config).await;
    disk.check(&all);
    all.forget(second).await.unwrap();
    assert!(disk.check(&all) >= before);
    all.forget(record).await.unwrap();
    assert_eq!(charged(&all), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_is_paused_again_counts_the_layers_below() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let all = open(&config).await;
    let disk = Disk::of(&dir);
    let sandbox = make(&all, options(HOUR)).await;
    for round in 1..=ROUNDS {
        fill(&all, &sandbox).await;
        all.pause(&sandbox, true).await.unwrap();
        assert!(disk.check(&all) > round * FILE_BYTES as u64 / 4);
        all.resume(&sandbox, Some(HOUR)).await.unwrap();
    }
    all.pause(&sandbox, true).await.unwrap();
    let before = disk.check(&all);
    all.release();
    drop((all, sandbox));
    let all = open(&config).await;
    assert_eq!(disk.check(&all), before);
    let sandbox = lock(&all.all).values().next().unwrap().clone();
    all.kill(&sandbox).await.unwrap();
    assert_eq!(charged(&all), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_of_a_template_that_the_server_has_no_more_count() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    let all = open(&config).await;
    let sandbox = make(&all, options(HOUR)).await;
    all.pause(&sandbox, true).await.unwrap();
    let before = charged(&all);
    all.release();
    drop((all, sandbox));
    let other = LOGGER.replace("i32.const 60000", "i32.const 50000");
    std::fs::write(&config.templates[0].reference, wat::parse_str(other).unwrap()).unwrap();
    config.templates[0].name = "other".to_owned();
    let all = open(&config).await;
    assert!(charged(&all) > before, "{} of {before}", charged(&all));
}
