//! Sandboxes that end while they are recorded.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::NatsServer;
use super::sweep::sandbox;
use crate::fleet::{Fleet, nats};
use crate::sandbox::records::store::{
    SandboxRecord, SandboxStore, SavedState, State, StoreEntry, StoredSandbox,
};

struct NewSandbox {
    record: SandboxRecord,
    entry: StoreEntry,
    killed: AtomicBool,
}

impl NewSandbox {
    fn new() -> Self {
        let (record, entry) = (sandbox(600_000), StoreEntry::default());
        Self { record, entry, killed: AtomicBool::new(false) }
    }
}

impl StoredSandbox for NewSandbox {
    fn id(&self) -> &str {
        &self.record.id
    }

    fn is_saved(&self) -> bool {
        false
    }

    fn is_killed(&self) -> bool {
        self.killed.load(Ordering::Acquire)
    }

    fn saved_name(&self) -> String {
        format!("sandbox-{}", self.record.id)
    }

    fn record(&self) -> SandboxRecord {
        self.record.clone()
    }

    fn entry(&self) -> &StoreEntry {
        &self.entry
    }
}

/// Notes of the sandboxes of all hosts.
async fn notes(host: &Fleet) -> usize {
    let links = &host.links;
    nats::all(&links.client, &links.hosts, "own.>", usize::MAX).await.unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_is_killed_while_it_is_recorded_leaves_no_entry() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let sandbox = Arc::new(NewSandbox::new());
    let entry = sandbox.entry.begin().unwrap();
    assert!(sandbox.entry.begin().is_none());
    // A client finds it in a list, and kills it.
    let removing = tokio::spawn({
        let (host, sandbox) = (host.clone(), sandbox.clone());
        async move { host.remove(&*sandbox).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!removing.is_finished());
    host.create(&*sandbox, entry).await.unwrap();
    removing.await.unwrap().unwrap();
    assert!(host.look_up(sandbox.id()).await.unwrap().is_none());
    assert_eq!(notes(&host).await, 0);
}

/// The state of a sandbox in its entry.
async fn entry_state(host: &Fleet, id: &str) -> Option<State> {
    host.look_up(id).await.unwrap().and_then(|entry| entry.state)
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_change_itself_names_a_state_that_replaces_a_guest() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let sandbox = NewSandbox::new();
    let entry = sandbox.entry.begin().unwrap();
    host.create(&sandbox, entry).await.unwrap();
    let update = async |saved: Option<SavedState>| {
        host.update(&sandbox, sandbox.record.clone(), saved, false).await.is_ok()
    };
    let kept = |digit: u64| {
        let digest = format!("sha256:{digit:064x}");
        let state = State { digest, bytes: 1, by: String::new(), unknown: Default::default() };
        SavedState { state: Some(state), ..SavedState::default() }
    };
    assert!(update(Some(kept(1))).await);
    for (saved, named) in [(kept(2).replacing_guest(), kept(1)), (kept(3), kept(3))] {
        sandbox.entry.doubt.store(true, Ordering::Release);
        assert!(!update(Some(saved)).await, "it is refused in doubt");
        sandbox.entry.doubt.store(false, Ordering::Release);
        assert_eq!(entry_state(&host, sandbox.id()).await, kept(1).state);
        assert!(update(None).await);
        assert_eq!(entry_state(&host, sandbox.id()).await, named.state);
    }
    assert!(update(Some(kept(4).replacing_guest())).await);
    assert_eq!(entry_state(&host, sandbox.id()).await, kept(4).state);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_that_ends_after_a_kill_changes_no_entry() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let sandbox = NewSandbox::new();
    let entry = sandbox.entry.begin().unwrap();
    host.create(&sandbox, entry).await.unwrap();
    sandbox.killed.store(true, Ordering::Release);
    let saved = SavedState { state: super::sweep::state(), ..SavedState::default() };
    // Before the entry is removed, and after it.
    for _ in 0..2 {
        let saved = Some(saved.clone());
        let late = host.update(&sandbox, sandbox.record.clone(), saved, true).await;
        assert_eq!(late.unwrap_err().status.as_u16(), 404);
        host.remove(&sandbox).await.unwrap();
        assert!(host.look_up(sandbox.id()).await.unwrap().is_none());
    }
}
