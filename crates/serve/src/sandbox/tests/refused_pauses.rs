//! Pauses that the ledger refuses.

use std::sync::atomic::Ordering;

use super::faulty_store::FaultyStore;
use super::*;
use crate::sandbox::lifecycle::saving::SaveMode;

const FILE: &str = "/home/user/kept";

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_pause_without_memory_changes_neither_the_guest_nor_its_saved_state() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let store = FaultyStore::open(&config.dir);
    let all = open_with(&config, store.clone()).await;
    let sandbox = make(&all, options(HOUR)).await;
    let refuse = async || {
        store.refuses_updates.store(true, Ordering::Relaxed);
        let refused = all.pause(&sandbox, false).await.unwrap_err();
        store.refuses_updates.store(false, Ordering::Relaxed);
        assert_eq!(refused.status.as_u16(), 503);
        assert!(!sandbox.lifetime().paused);
        assert!(matches!(*sandbox.life.lock().await, Residency::Live(_)), "the guest is dropped");
    };
    // Before any save, after one, and after a restart.
    log(&all, &sandbox, "00000001").await.unwrap();
    refuse().await;
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "0000000100000002");
    all.pause(&sandbox, true).await.unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    let logged = log(&all, &sandbox, "00000003").await.unwrap();
    write(&all, &sandbox, FILE, "unsaved").await;
    let charged = sandbox.charge.memory();
    refuse().await;
    assert_eq!((sandbox.charge.memory(), sandbox.restarts()), (charged, false));
    assert_eq!(log(&all, &sandbox, "00000004").await.unwrap(), format!("{logged}00000004"));
    // Another server opens the state of the last pause that was acknowledged.
    all.release();
    let all = open(&config).await;
    let sandbox = lock(&all.all).values().next().unwrap().clone();
    assert_eq!(log(&all, &sandbox, "00000005").await.unwrap(), "000000010000000200000005");
    // The next pauses take effect, each under another name than the state before.
    for round in ["00000006", "00000007"] {
        write(&all, &sandbox, FILE, round).await;
        all.pause(&sandbox, false).await.unwrap();
        assert!(is_saved(&sandbox).await && sandbox.lifetime().paused);
        let states = state_names(dir.path());
        assert_eq!(states.len(), 1, "{states:?}");
        all.resume(&sandbox, Some(HOUR)).await.unwrap();
        assert_eq!(log(&all, &sandbox, round).await.unwrap(), round);
        assert_eq!(read(&all, &sandbox, FILE).await, round);
    }
    all.pause(&sandbox, true).await.unwrap();
    all.release();
    drop((all, sandbox));
    // Its name is no orphan.
    let all = open(&config).await;
    let sandbox = lock(&all.all).values().next().unwrap().clone();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &sandbox, "00000008").await.unwrap(), "0000000700000008");
    all.kill(&sandbox).await.unwrap();
    let is_empty = async || state_names(dir.path()).is_empty();
    until("a killed sandbox leaves a state", is_empty).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_fails_after_its_record_was_written_leaves_the_state_before() {
    for is_saved_before in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let config = config(&dir);
        let store = FaultyStore::open(&config.dir);
        let all = open_with(&config, store.clone()).await;
        let sandbox = make(&all, options(HOUR)).await;
        log(&all, &sandbox, "00000001").await.unwrap();
        if is_saved_before {
            all.pause(&sandbox, true).await.unwrap();
            all.resume(&sandbox, Some(HOUR)).await.unwrap();
            log(&all, &sandbox, "00000002").await.unwrap();
        }
        store.hides_update.store(true, Ordering::Relaxed);
        all.pause(&sandbox, false).await.unwrap_err();
        assert_eq!(state_names(dir.path()).len(), usize::from(is_saved_before));
        // The server ends before it writes another record.
        all.release();
        drop((all, sandbox));
        let all = open(&config).await;
        let found = lock(&all.all).values().next().cloned();
        assert_eq!(found.is_some(), is_saved_before);
        if let Some(sandbox) = found {
            assert_eq!(log(&all, &sandbox, "00000003").await.unwrap(), "0000000100000003");
        }
    }
}

/// A saved sandbox needs no save: the record alone says that the next resume drops the memory.
#[tokio::test(flavor = "multi_thread")]
async fn a_pause_of_a_saved_sandbox_that_fails_late_does_not_drop_its_memory() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let store = FaultyStore::open(&config.dir);
    let all = open_with(&config, store.clone()).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    all.save(&sandbox, SaveMode::default()).await.unwrap();
    assert!(is_saved(&sandbox).await);
    store.hides_update.store(true, Ordering::Relaxed);
    all.pause(&sandbox, false).await.unwrap_err();
    assert!(!sandbox.restarts());
    // The server ends before it writes another record.
    all.release();
    drop((all, sandbox));
    let all = open(&config).await;
    let sandbox = lock(&all.all).values().next().unwrap().clone();
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "0000000100000002");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_pause_with_memory_leaves_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let store = FaultyStore::open(&config.dir);
    let all = open_with(&config, store.clone()).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "00000001").await.unwrap();
    let charged = sandbox.charge.memory();
    store.refuses_updates.store(true, Ordering::Relaxed);
    let refused = all.pause(&sandbox, true).await.unwrap_err();
    store.refuses_updates.store(false, Ordering::Relaxed);
    assert_eq!(refused.status.as_u16(), 503);
    assert!(!sandbox.lifetime().paused);
    assert!(matches!(*sandbox.life.lock().await, Residency::Live(_)), "the guest is dropped");
    assert_eq!(sandbox.charge.memory(), charged);
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "0000000100000002");
    // The next pause takes effect.
    all.pause(&sandbox, true).await.unwrap();
    assert!(is_saved(&sandbox).await && sandbox.lifetime().paused);
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &sandbox, "00000003").await.unwrap(), "000000010000000200000003");
}

/// Of the server's death after a pause that its client was refused, with faults before and after
/// the record is written.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_pause_with_memory_leaves_the_state_that_the_record_names() {
    for is_late in [false, true] {
        for is_saved_before in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let config = config(&dir);
            let store = FaultyStore::open(&config.dir);
            let all = open_with(&config, store.clone()).await;
            let sandbox = make(&all, options(HOUR)).await;
            log(&all, &sandbox, "00000001").await.unwrap();
            if is_saved_before {
                all.pause(&sandbox, true).await.unwrap();
                all.resume(&sandbox, Some(HOUR)).await.unwrap();
                log(&all, &sandbox, "00000002").await.unwrap();
            }
            let stored = sandbox.charge.stored();
            match is_late {
                true => store.hides_update.store(true, Ordering::Relaxed),
                false => store.refuses_updates.store(true, Ordering::Relaxed),
            }
            all.pause(&sandbox, true).await.unwrap_err();
            assert_eq!(sandbox.charge.stored(), stored);
            all.release();
            drop((all, sandbox));
            let all = open(&config).await;
            assert_eq!(state_names(dir.path()).len(), usize::from(is_saved_before));
            let found = lock(&all.all).values().next().cloned();
            assert_eq!(found.is_some(), is_saved_before);
            if let Some(sandbox) = found {
                assert!(!sandbox.lifetime().paused);
                assert_eq!(log(&all, &sandbox, "00000003").await.unwrap(), "0000000100000003");
            }
        }
    }
}

/// The memory that a pause has dropped must not come back with the state before.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_pause_of_a_restarted_sandbox_does_not_bring_dropped_memory_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir);
    let store = FaultyStore::open(&config.dir);
    let all = open_with(&config, store.clone()).await;
    let sandbox = make(&all, options(HOUR)).await;
    log(&all, &sandbox, "dropped!").await.unwrap();
    all.save(&sandbox, SaveMode::default()).await.unwrap();
    all.pause(&sandbox, false).await.unwrap();
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    assert_eq!(log(&all, &sandbox, "00000001").await.unwrap(), "00000001");
    store.refuses_updates.store(true, Ordering::Relaxed);
    all.pause(&sandbox, true).await.unwrap_err();
    store.refuses_updates.store(false, Ordering::Relaxed);
    // Another change of the record.
    all.resume(&sandbox, Some(HOUR)).await.unwrap();
    all.release();
    drop((all, sandbox));
    let all = open(&config).await;
    let sandbox = lock(&all.all).values().next().unwrap().clone();
    assert_eq!(log(&all, &sandbox, "00000002").await.unwrap(), "00000002");
}
