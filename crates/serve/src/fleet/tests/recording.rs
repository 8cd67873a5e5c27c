//! Sandboxes that end while they are recorded.

use std::sync::Arc;
use std::time::Duration;

use super::NatsServer;
use super::sweep::sandbox;
use crate::fleet::{Fleet, nats};
use crate::sandbox::records::store::{SandboxRecord, SandboxStore, StoreEntry, StoredSandbox};

struct NewSandbox {
    record: SandboxRecord,
    entry: StoreEntry,
}

impl StoredSandbox for NewSandbox {
    fn id(&self) -> &str {
        &self.record.id
    }

    fn is_saved(&self) -> bool {
        false
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
    let sandbox = NewSandbox { record: sandbox(600_000), entry: StoreEntry::default() };
    let sandbox = Arc::new(sandbox);
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
