//! Files of sandboxes in the memory of their tenant.

use afresh::files::Time;

use super::*;

const FILE: &str = "/home/user/data";
const FILE_BYTES: u64 = 4 << 20;
/// Other memory of a sandbox changes by less.
const SLACK: u64 = 1 << 20;

/// Writes a new version of the file.
async fn fill(all: &Arc<Sandboxes>, sandbox: &Arc<Sandbox>, byte: u8) {
    let written = all.files(sandbox, move |tree| {
        tree.write_path(FILE, &vec![byte; FILE_BYTES as usize], Time::now()).unwrap();
        Ok(())
    });
    written.await.unwrap();
}

/// The memory after a call, which is measured unless that was done a moment ago.
async fn memory(all: &Arc<Sandboxes>, sandbox: &Arc<Sandbox>) -> u64 {
    tokio::time::sleep(Duration::from_millis(20)).await;
    all.with(sandbox, |_| Ok(())).await.unwrap();
    sandbox.charge.memory()
}

#[tokio::test(flavor = "multi_thread")]
async fn files_and_their_versions_in_checkpoints_count() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&config(&dir)).await;
    let sandbox = make(&all, options(HOUR)).await;
    let empty = memory(&all, &sandbox).await;
    let mut held = empty;
    for version in 1..4 {
        fill(&all, &sandbox, version).await;
        held += FILE_BYTES;
        until("the files count", async || memory(&all, &sandbox).await >= held).await;
        all.with(&sandbox, |session| Ok(session.checkpoint("kept").unwrap())).await.unwrap();
    }
    assert!(memory(&all, &sandbox).await < held + FILE_BYTES + SLACK);
    // Dropped checkpoints and removed files leave it.
    all.with(&sandbox, |session| {
        let kept: Vec<_> =
            session.checkpoints().into_iter().filter(|one| one.name.is_some()).collect();
        kept.iter().for_each(|state| session.drop_checkpoint(state.id).unwrap());
        Ok(())
    })
    .await
    .unwrap();
    all.files(&sandbox, |tree| {
        tree.write_path(FILE, b"", Time::now()).unwrap();
        Ok(())
    })
    .await
    .unwrap();
    let left = async || memory(&all, &sandbox).await < empty + SLACK;
    until("the memory is charged for ever", left).await;
}
