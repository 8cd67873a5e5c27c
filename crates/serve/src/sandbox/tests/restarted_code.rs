//! Restarts of the only context of a guest without processes.

use super::*;
use crate::sandbox::catalog::snapshots::SnapshotOptions;

const FILE: &str = "/home/user/kept";

/// Saves a sandbox as the sweep saves an idle one.
async fn save(all: &Arc<Sandboxes>, sandbox: &Arc<Sandbox>) {
    all.save(sandbox, Default::default()).await.unwrap();
    assert!(is_saved(sandbox).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_context_has_the_code_of_the_template_and_keeps_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&config(&dir)).await;
    let sandbox = make(&all, options(HOUR)).await;
    for is_saved in [false, true, true, false] {
        log(&all, &sandbox, "00000001").await.unwrap();
        log(&all, &sandbox, "00000002").await.unwrap();
        write(&all, &sandbox, FILE, "kept").await;
        if is_saved {
            save(&all, &sandbox).await;
        }
        all.restart_code(&sandbox).await.unwrap();
        assert_eq!(log(&all, &sandbox, "00000003").await.unwrap(), "00000003", "{is_saved}");
        assert_eq!(read(&all, &sandbox, FILE).await, "kept", "{is_saved}");
        all.restart_code(&sandbox).await.unwrap();
    }
    // Another server knows the sandbox by its record.
    log(&all, &sandbox, "00000001").await.unwrap();
    save(&all, &sandbox).await;
    all.release();
    drop((all, sandbox));
    let all = open(&config(&dir)).await;
    let sandbox = lock(&all.all).values().next().unwrap().clone();
    let fork = all.fork(&sandbox, 1, HOUR).await.unwrap().remove(0);
    for one in [fork, sandbox] {
        all.restart_code(&one).await.unwrap();
        assert_eq!(log(&all, &one, "00000003").await.unwrap(), "00000003");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_that_would_drop_checkpoints_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&config(&dir)).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    save(&all, &sandbox).await;
    let own = sandbox.clone();
    let kept = all.with(&sandbox, move |session| {
        let kept = session.checkpoint("kept").unwrap();
        own.note_checkpoints(session);
        Ok(kept)
    });
    let kept = kept.await.unwrap();
    let refused = all.restart_code(&sandbox).await.unwrap_err();
    assert_eq!(refused.status.as_u16(), 409);
    assert!(refused.message.contains("drop them first"), "{}", refused.message);
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "0000000100000002");
    let dropping = all.with(&sandbox, move |session| {
        session.drop_checkpoint(kept).unwrap();
        Ok(())
    });
    dropping.await.unwrap();
    all.restart_code(&sandbox).await.unwrap();
    assert_eq!(log(&all, &sandbox, "00000003").await.unwrap(), "00000003");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_context_of_a_copy_has_the_code_of_the_template() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&config(&dir)).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    let kept = SnapshotOptions::of_sandbox(&sandbox, Vec::new());
    let template = all.keep(&sandbox, kept).await.unwrap().id;
    let copy = make(&all, CreateOptions { template, ..options(HOUR) }).await;
    assert_eq!(log(&all, &copy, "00000002").await.unwrap(), "0000000100000002");
    all.restart_code(&copy).await.unwrap();
    assert_eq!(log(&all, &copy, "00000003").await.unwrap(), "00000003");
}
