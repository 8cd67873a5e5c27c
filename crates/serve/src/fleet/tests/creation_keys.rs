//! Keys of requests for new sandboxes: of two hosts, and of hosts that die.

use std::time::Duration;

use hyper::HeaderMap;

use super::NatsServer;
use super::sweep::{lose, sandbox, state};
use crate::fleet::backup::read_ledger;
use crate::fleet::{BackupReport, Fleet, creation_keys, lease_renewal, nats, record};
use crate::lock::lock;
use crate::sandbox::records::store::{CreationKey, KeyState, SandboxRecord};

/// A sandbox that a request with this key makes.
fn keyed(name: &str) -> (SandboxRecord, CreationKey) {
    let mut headers = HeaderMap::new();
    headers.insert("idempotency-key", name.parse().unwrap());
    let record = sandbox(600_000);
    let key = CreationKey::read(&headers, &record.tenant, b"{}").unwrap().unwrap();
    (SandboxRecord { key: Some(key.clone()), ..record }, key)
}

/// Makes a sandbox as a host does.
async fn make(host: &Fleet, record: &SandboxRecord, key: &CreationKey) -> bool {
    let Ok(revision) = host.claim(record, key).await else { return false };
    host.enter(record.clone()).await.unwrap();
    host.confirm_claim(record, key, revision).await.unwrap();
    true
}

async fn sandbox_of_key(host: &Fleet, key: &CreationKey) -> Option<String> {
    match host.state_of_key("acme", key).await.unwrap() {
        KeyState::Made(record) => Some(record.id),
        KeyState::Free | KeyState::Pending => None,
    }
}

async fn is_free(host: &Fleet, key: &CreationKey) -> bool {
    matches!(host.state_of_key("acme", key).await.unwrap(), KeyState::Free)
}

async fn claims(host: &Fleet) -> usize {
    let found = nats::every(&host.links.client, &host.links.kept).await.unwrap();
    found.iter().filter(|found| creation_keys::is_claim(&found.key)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hosts_at_once_make_one_sandbox_of_a_key() {
    let Some(server) = NatsServer::start() else { return };
    let (one, two) = (server.host().await, server.host().await);
    for round in 0..20 {
        let name = format!("claim-{round}");
        let ((first, key), (second, _)) = (keyed(&name), keyed(&name));
        let both = tokio::join!(make(&one, &first, &key), make(&two, &second, &key));
        assert_ne!(both.0, both.1, "one of them");
        let winner = if both.0 { &first.id } else { &second.id };
        let loser = if both.0 { &second.id } else { &first.id };
        assert!(one.look_up(loser).await.unwrap().is_none());
        for host in [&one, &two] {
            assert_eq!(sandbox_of_key(host, &key).await.as_ref(), Some(winner));
        }
    }
    assert_eq!(claims(&one).await, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_dies_before_its_answer_leaves_its_sandbox_or_a_free_key() {
    let Some(server) = NatsServer::start() else { return };
    let (dead, other) = (server.host().await, server.host().await);
    let (claimed, claimed_key) = keyed("claimed");
    dead.claim(&claimed, &claimed_key).await.unwrap();
    let (entered, entered_key) = keyed("entered");
    let entered_revision = dead.claim(&entered, &entered_key).await.unwrap();
    dead.enter(entered.clone()).await.unwrap();
    let (unsaved, unsaved_key) = keyed("unsaved");
    assert!(make(&dead, &unsaved, &unsaved_key).await);
    let (saved, saved_key) = keyed("saved");
    let revision = dead.claim(&saved, &saved_key).await.unwrap();
    let mut owned_entry = dead.enter(saved.clone()).await.unwrap();
    dead.confirm_claim(&saved, &saved_key, revision).await.unwrap();
    dead.change(&mut owned_entry, saved.clone(), state(), false).await.unwrap();

    // It may still be alive: no other sandbox of these keys is made.
    for (record, key) in [(&claimed, &claimed_key), (&entered, &entered_key)] {
        assert!(matches!(other.state_of_key("acme", key).await.unwrap(), KeyState::Pending));
        assert!(other.claim(record, key).await.is_err());
    }
    assert_eq!(sandbox_of_key(&other, &unsaved_key).await, Some(unsaved.id));
    lose(&dead, &other).await;
    for key in [&claimed_key, &entered_key, &unsaved_key] {
        assert!(is_free(&other, key).await);
    }
    assert_eq!(sandbox_of_key(&other, &saved_key).await, Some(saved.id));
    let (again, key) = keyed("entered");
    assert!(make(&other, &again, &key).await);
    assert_eq!(sandbox_of_key(&other, &key).await, Some(again.id.clone()));
    // A change of the dead host that arrives late confirms nothing.
    assert!(dead.confirm_claim(&entered, &entered_key, entered_revision).await.is_err());
    assert_eq!(sandbox_of_key(&other, &key).await, Some(again.id));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_back_does_not_keep_a_sandbox_whose_key_another_host_has_claimed() {
    let Some(server) = NatsServer::start() else { return };
    let (one, two) = (server.host().await, server.host().await);
    let (first, key) = keyed("back");
    let revision = one.claim(&first, &key).await.unwrap();
    let mut owned_entry = one.enter(first.clone()).await.unwrap();
    one.confirm_claim(&first, &key, revision).await.unwrap();
    let old = lose(&one, &two).await;
    // A sweep waits for a host that has a lease again.
    let next = format!("{}-2", old.split_once('-').unwrap().0);
    lease_renewal::enter(&two.links, &next, "host", two.parameters).await.unwrap();
    one.note_owned(&first.id, &next).await.unwrap();
    let (second, _) = keyed("back");
    assert!(make(&two, &second, &key).await);
    lock(&one.own).life = next;
    assert_eq!(one.keep(&mut owned_entry, first.clone()).await.unwrap(), None);
    assert!(two.look_up(&first.id).await.unwrap().is_none());
    for host in [&one, &two] {
        assert_eq!(sandbox_of_key(host, &key).await.as_ref(), Some(&second.id));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_of_a_sandbox_that_its_host_is_removing_waits_for_its_end() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let (record, key) = keyed("unfinished");
    assert!(make(&host, &record, &key).await);
    // The answer to the confirmation was lost, and the entry could not be removed.
    host.note_unfinished(&record.id);
    assert!(matches!(host.state_of_key("acme", &key).await.unwrap(), KeyState::Pending));
    let (again, _) = keyed("unfinished");
    assert!(host.claim(&again, &key).await.is_err());
    host.release_unfinished().await;
    assert!(is_free(&host, &key).await);
    assert!(make(&host, &again, &key).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_without_an_answer_does_not_block_its_key_on_its_host() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other) = (server.host().await, server.host().await);
    let (first, key) = keyed("unanswered");
    // The answer is lost, so the request makes no sandbox.
    host.claim(&first, &key).await.unwrap();
    assert!(matches!(other.state_of_key("acme", &key).await.unwrap(), KeyState::Pending));
    assert!(is_free(&host, &key).await);
    let (second, _) = keyed("unanswered");
    assert!(make(&host, &second, &key).await);
    for host in [&host, &other] {
        assert_eq!(sandbox_of_key(host, &key).await.as_ref(), Some(&second.id));
    }
    // Its sandbox may have an entry, which this host is to remove.
    let (third, key) = keyed("entered");
    host.claim(&third, &key).await.unwrap();
    host.note_unfinished(&third.id);
    assert!(matches!(host.state_of_key("acme", &key).await.unwrap(), KeyState::Pending));
    host.release_unfinished().await;
    assert!(is_free(&host, &key).await);
}

/// A saved sandbox without an owner ends when its entry expires, and no host removes its claim.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_has_a_limit_of_keys_and_those_of_expired_sandboxes_make_room() {
    const LIMIT: usize = 3;
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let mut made = Vec::new();
    for name in ["one", "two", "three"] {
        let (record, key) = keyed(name);
        assert!(make(&host, &record, &key).await);
        made.push((record, key));
    }
    let refused = host.admit_claim("acme", LIMIT).await.unwrap_err();
    let excess = refused.budget.expect("it names the budget");
    assert_eq!((excess.name, excess.limit, excess.used), ("creation-keys", 3, 3));
    assert!(refused.status.as_u16() == 429 && excess.retry_after >= 1, "{excess:?}");
    host.admit_claim("other", LIMIT).await.unwrap();
    for (record, _) in &made[..2] {
        let entry = record::key(&record.id).unwrap();
        let (revision, _) = host.entry(&entry).await.unwrap().unwrap();
        nats::remove(&host.links.sandboxes, &entry, revision).await.unwrap();
    }
    // The count is still valid.
    assert!(host.admit_claim("acme", LIMIT).await.is_err());
    *host.claims.of("acme").counted.lock().await = None;
    host.admit_claim("acme", LIMIT).await.unwrap();
    assert_eq!(claims(&host).await, 1);
    assert_eq!(sandbox_of_key(&host, &made[2].1).await, Some(made[2].0.id.clone()));
    // A released claim makes room at once.
    host.admit_claim("acme", LIMIT).await.unwrap();
    assert!(host.admit_claim("acme", LIMIT).await.is_err());
    host.release_claim(&made[2].0).await;
    host.admit_claim("acme", LIMIT).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_has_no_keys_of_requests() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let (record, key) = keyed("backup");
    assert!(make(&host, &record, &key).await);
    assert_eq!(claims(&host).await, 1);
    let mut report = BackupReport::default();
    let entries = read_ledger(&host.links, &mut report).await.unwrap();
    assert!(entries.is_empty() && report.unsaved == [record.id]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_free_once_its_sandbox_has_ended() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other) = (server.host().await, server.host().await);
    let (first, key) = keyed("one");
    let revision = host.claim(&first, &key).await.unwrap();
    let owned_entry = host.enter(first.clone()).await.unwrap();
    host.confirm_claim(&first, &key, revision).await.unwrap();
    host.erase(&first.id, &owned_entry).await.unwrap();
    // Also where its claim could not be removed.
    assert!(is_free(&other, &key).await);
    let (second, _) = keyed("one");
    assert!(make(&other, &second, &key).await);
    // The end of an earlier sandbox takes nothing from a later one.
    host.release_claim(&first).await;
    assert_eq!(sandbox_of_key(&host, &key).await, Some(second.id.clone()));
    let entry = host.look_up(&second.id).await.unwrap().unwrap();
    assert_eq!(entry.record.key, Some(key.clone()));
    other.release_claim(&second).await;
    assert_eq!(claims(&host).await, 0);
    // A marker is no obstacle.
    let (third, _) = keyed("one");
    assert!(make(&host, &third, &key).await);
}

/// The count of the process before is not lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_starts_again_counts_the_keys_that_are_in_the_ledger() {
    const LIMIT: usize = 2;
    let Some(server) = NatsServer::start() else { return };
    let before = server.host().await;
    for name in ["one", "two"] {
        let (record, key) = keyed(name);
        assert!(make(&before, &record, &key).await);
    }
    let host = server.host().await;
    let refused = host.admit_claim("acme", LIMIT).await.unwrap_err();
    assert_eq!(refused.budget.expect("it names the budget").used, 2);
    host.admit_claim("acme", LIMIT + 1).await.unwrap();
}

/// Another host may have read the confirmation by then, and have acknowledged the sandbox.
#[tokio::test(flavor = "multi_thread")]
async fn a_confirmation_without_an_answer_is_read_back_before_its_sandbox_is_given_up() {
    let Some(mut server) = NatsServer::start() else { return };
    let host = server.host().await;
    let (record, key) = keyed("lost");
    let revision = host.claim(&record, &key).await.unwrap();
    host.enter(record.clone()).await.unwrap();
    host.confirm_claim(&record, &key, revision).await.unwrap();
    // The answer to that is lost, and then the lease.
    server.kill();
    lock(&host.own).lease.broken();
    let confirming = tokio::spawn({
        let (host, record, key) = (host.clone(), record.clone(), key.clone());
        async move { host.confirm_claim(&record, &key, revision).await.is_ok() }
    });
    // Longer than two requests wait for their answers.
    tokio::time::sleep(Duration::from_secs(12)).await;
    server.start_again();
    assert!(confirming.await.unwrap());
    assert_eq!(sandbox_of_key(&host, &key).await, Some(record.id));
}
