//! Sandboxes of hosts that have ended, and the time of sandboxes without a host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;

use super::NatsServer;
use crate::fleet::clock::now;
use crate::fleet::interrupted_takeovers::InterruptedTakeovers;
use crate::fleet::nats::{NatsConnection, NatsError};
use crate::fleet::placement_store::TakeOutcome;
use crate::fleet::record::Entry;
use crate::fleet::record::tests::record as empty_record;
use crate::fleet::unconfirmed_takeovers::TakeGuard;
use crate::fleet::{Fleet, lease_renewal, nats, record, restore};
use crate::lock::lock;
use crate::sandbox::records::store::{MAX_ENTRY, OwnedEntry, SandboxRecord, State};

const TENANT: &str = "acme";
/// Far longer than the servers take to remove an entry.
const EXPIRY_TIMEOUT: Duration = Duration::from_secs(60);

/// A running sandbox with this time left, in milliseconds.
pub(super) fn sandbox(left: u64) -> SandboxRecord {
    SandboxRecord {
        id: Fleet::id(TENANT).unwrap(),
        tenant: TENANT.to_owned(),
        template: "script".to_owned(),
        token: "t".to_owned(),
        ends: 1000 + left,
        noted: 1000,
        ..empty_record()
    }
}

pub(super) fn state() -> Option<State> {
    let digest = format!("sha256:{:064x}", 1);
    Some(State { digest, bytes: 1, by: String::new(), unknown: Default::default() })
}

/// A sandbox of this host, saved.
pub(super) async fn saved(host: &Fleet, record: &SandboxRecord) -> OwnedEntry {
    let mut owned_entry = host.enter(record.clone()).await.unwrap();
    host.change(&mut owned_entry, record.clone(), state(), false).await.unwrap();
    owned_entry
}

/// Notes of the sandboxes of all hosts.
async fn notes(host: &Fleet) -> usize {
    let links = &host.links;
    nats::all(&links.client, &links.hosts, "own.>", usize::MAX).await.unwrap().len()
}

/// Waits until the servers have removed the entry of a sandbox.
pub(super) async fn until_gone(links: &NatsConnection, id: &str) {
    let until = Instant::now() + EXPIRY_TIMEOUT;
    let key = record::key(id).unwrap();
    while nats::find(&links.sandboxes, &key).await.unwrap().is_some() {
        assert!(Instant::now() < until, "the entry stays");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Ends a host as a crash would, and breaks its lease.
pub(super) async fn lose(host: &Fleet, by: &Fleet) -> String {
    for task in lock(&host.tasks).drain(..) {
        task.abort();
    }
    let life = host.life();
    break_lease(&life, by).await;
    life
}

async fn break_lease(life: &str, by: &Fleet) {
    let found = nats::find(&by.links.hosts, life).await.unwrap().unwrap();
    let broken = Bytes::from_static(br#"{"name":"","beat":0,"broken":true}"#);
    nats::update(&by.links.hosts, life, broken, found.revision).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_host_is_swept_by_reading_its_own_sandboxes() {
    let Some(server) = NatsServer::start() else { return };
    let (lost, busy, sweeper) = (server.host().await, server.host().await, server.host().await);
    let (kept, unsaved, gone) = (sandbox(600_000), sandbox(600_000), sandbox(600_000));
    saved(&lost, &kept).await;
    lost.enter(unsaved.clone()).await.unwrap();
    let ended = saved(&lost, &gone).await;
    lost.erase(&gone.id, &ended).await.unwrap();
    assert_eq!(notes(&sweeper).await, 2);
    for _ in 0..100 {
        busy.enter(sandbox(600_000)).await.unwrap();
    }
    let life = lose(&lost, &sweeper).await;
    // The host that broke the lease died before it swept.
    sweeper.find_unswept().await.unwrap();
    let before =
        sweeper.links.client.statistics().in_messages.load(std::sync::atomic::Ordering::Relaxed);
    sweeper.sweep_next().await;
    let after =
        sweeper.links.client.statistics().in_messages.load(std::sync::atomic::Ordering::Relaxed);
    assert!(after - before < 50, "{} messages for two sandboxes", after - before);
    assert!(lock(&sweeper.unswept).is_empty());
    let entry = sweeper.look_up(&kept.id).await.unwrap().unwrap();
    assert_eq!((entry.owner, entry.record.generation, entry.state), (None, 1, state()));
    assert!(sweeper.look_up(&unsaved.id).await.unwrap().is_none());
    assert_eq!(notes(&sweeper).await, 100, "those of the busy host");
    assert!(nats::find(&sweeper.links.hosts, &life).await.unwrap().is_none());
    // The host that takes it notes it again, and removes the note at its end.
    let taken = sweeper.take(&kept.id, |_| Ok(())).await.unwrap();
    let TakeOutcome::Ours(owned) = taken else { panic!("it is free") };
    assert_eq!(notes(&sweeper).await, 101);
    sweeper.erase(&kept.id, &owned.owned_entry).await.unwrap();
    assert_eq!(notes(&sweeper).await, 100);
    // A host that leaves releases the rest, too.
    busy.leave().await;
    assert_eq!(notes(&sweeper).await, 0);
    let left = nats::every(&sweeper.links.client, &sweeper.links.sandboxes).await.unwrap();
    assert!(left.is_empty(), "{}", left.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_back_keeps_the_sandboxes_of_its_new_life() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other) = (server.host().await, server.host().await);
    let kept = sandbox(600_000);
    let mut owned_entry = saved(&host, &kept).await;
    let old = host.life();
    let next = format!("{}-2", old.split_once('-').unwrap().0);
    lock(&host.own).life = next.clone();
    assert_eq!(host.keep(&mut owned_entry, kept.clone()).await.unwrap(), Some(next.clone()));
    other.sweep(&old).await.unwrap();
    let entry = other.look_up(&kept.id).await.unwrap().unwrap();
    assert_eq!((entry.owner, notes(&other).await), (Some(next.clone()), 1));
    other.sweep(&next).await.unwrap();
    let entry = other.look_up(&kept.id).await.unwrap().unwrap();
    assert_eq!((entry.owner, notes(&other).await), (None, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_of_an_earlier_life_leaves_the_notes_of_a_later_one() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other) = (server.host().await, server.host().await);
    let (kept, taken) = (sandbox(600_000), sandbox(600_000));
    let mut owned_entry = saved(&host, &kept).await;
    let mut free = host.enter(taken.clone()).await.unwrap();
    host.change(&mut free, taken.clone(), state(), true).await.unwrap();
    let old = host.life();
    let node = old.split_once('-').unwrap().0;
    let next = format!("{node}-2");
    lock(&host.own).life = next.clone();
    // The host is about to keep one sandbox, and to take the other.
    for one in [&kept, &taken] {
        let key = format!("own.{node}.{}", one.id);
        nats::put(&host.links.hosts, &key, Bytes::from_static(br#"{"life":2}"#)).await.unwrap();
    }
    other.sweep(&old).await.unwrap();
    assert_eq!(notes(&other).await, 2);
    assert_eq!(host.keep(&mut owned_entry, kept.clone()).await.unwrap(), Some(next.clone()));
    let outcome = host.take(&taken.id, |_| Ok(())).await.unwrap();
    assert!(matches!(outcome, TakeOutcome::Ours(_)));
    other.sweep(&old).await.unwrap();
    assert_eq!(notes(&other).await, 2);
    other.sweep(&next).await.unwrap();
    for one in [&kept, &taken] {
        assert_eq!(other.look_up(&one.id).await.unwrap().unwrap().owner, None);
    }
    assert_eq!(notes(&other).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_time_of_a_sandbox_without_a_host_ends() {
    let Some(server) = NatsServer::start() else { return };
    let (lost, host): (Arc<Fleet>, Arc<Fleet>) = (server.host().await, server.host().await);
    let short = sandbox(900);
    let released = sandbox(900);
    let paused = SandboxRecord { paused: true, ..sandbox(900) };
    let mut pauses = SandboxRecord { pause_at_end: true, ..sandbox(900) };
    pauses.settings.files_only = true;
    let long = sandbox(600_000);
    for one in [&short, &pauses, &long] {
        saved(&lost, one).await;
    }
    for one in [&released, &paused] {
        let mut owned_entry = host.enter(one.clone()).await.unwrap();
        host.change(&mut owned_entry, one.clone(), state(), true).await.unwrap();
    }
    let life = lose(&lost, &host).await;
    host.sweep(&life).await.unwrap();
    for one in [&short, &released] {
        until_gone(&host.links, &one.id).await;
    }
    for one in [&paused, &pauses, &long] {
        let taken = host.take(&one.id, |_| Ok(())).await.unwrap();
        let TakeOutcome::Ours(owned) = taken else { panic!("{one:?} is lost") };
        assert_eq!(owned.record.paused, one.id != long.id);
        assert_eq!(owned.record.restarts, one.id == pauses.id, "its memory is to be dropped");
        // Once a host has it, the servers do not end it.
        let entry = host.look_up(&one.id).await.unwrap().unwrap();
        assert_eq!(entry.record.paused, one.id != long.id);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_sandbox_that_no_client_uses_ends() {
    let Some(server) = NatsServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut config = server.config();
    config.store = Some(dir.path().join("store").to_string_lossy().into_owned());
    let short = sandbox(900);
    let key = record::key(&short.id).unwrap();
    let entry = Entry::new(None, short.clone(), None);
    let value = STANDARD.encode(serde_json::to_vec(&entry).unwrap());
    let head = serde_json::json!({
        "format": "afresh fleet backup", "version": 1, "fleet": "default", "made": 1, "key": "",
    });
    let line = serde_json::json!({ "bucket": "sandboxes", "key": key, "value": value });
    std::fs::write(dir.path().join("ledger.jsonl"), format!("{head}\n{line}\n")).unwrap();
    assert_eq!(restore(&config, dir.path()).await.unwrap().sandboxes, 1);
    let host = server.host().await;
    until_gone(&host.links, &short.id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_pauses_before_it_takes_a_sandbox_does_not_take_it_after_its_sweep() {
    let Some(server) = NatsServer::start() else { return };
    let (lost, other) = (server.host().await, server.host().await);
    let (free, new, erased) = (sandbox(600_000), sandbox(600_000), sandbox(600_000));
    let mut owned_entry = other.enter(free.clone()).await.unwrap();
    other.change(&mut owned_entry, free.clone(), state(), true).await.unwrap();
    let ended = other.enter(erased.clone()).await.unwrap();
    other.erase(&erased.id, &ended).await.unwrap();
    // The host has read the entry and written its notes, and pauses.
    let (life, key) = (lost.life(), record::key(&free.id).unwrap());
    let found = nats::find(&lost.links.sandboxes, &key).await.unwrap().unwrap();
    for one in [&free, &new, &erased] {
        lost.note_owned(&one.id, &life).await.unwrap();
    }
    assert_eq!(lose(&lost, &other).await, life);
    other.sweep(&life).await.unwrap();
    assert_eq!(notes(&other).await, 0);
    // It continues where it was.
    let entry: Entry = serde_json::from_slice(&found.value).unwrap();
    let taken = entry.taken_by(&life, false, found.time);
    let value = Bytes::from(serde_json::to_vec(&taken).unwrap());
    let update = nats::update(&lost.links.sandboxes, &key, value, found.revision).await;
    assert!(matches!(update, Err(NatsError::Changed)), "{update:?}");
    for one in [&new, &erased] {
        let key = record::key(&one.id).unwrap();
        let made = lost.create_entry(&key, one.clone(), life.clone()).await;
        assert!(matches!(made, Err(NatsError::Changed)), "{made:?}");
        assert!(other.look_up(&one.id).await.unwrap().is_none());
    }
    // The sandbox is as it was.
    let entry = other.look_up(&free.id).await.unwrap().unwrap();
    assert_eq!((entry.owner, entry.record.generation, entry.state), (None, 0, state()));
    assert!(matches!(other.take(&free.id, |_| Ok(())).await.unwrap(), TakeOutcome::Ours(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_whose_host_noted_it_for_its_next_life_and_died_is_released() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other) = (server.host().await, server.host().await);
    let kept = sandbox(600_000);
    saved(&host, &kept).await;
    let old = host.life();
    let next = format!("{}-2", old.split_once('-').unwrap().0);
    // It noted the sandbox for its next life, and the change of the entry was lost.
    host.note_owned(&kept.id, &next).await.unwrap();
    lose(&host, &other).await;
    let owner = async || other.look_up(&kept.id).await.unwrap().unwrap().owner;
    assert_eq!(other.sweep(&old).await.unwrap().waiting, 1);
    let age = || lock(&other.interrupted).age(InterruptedTakeovers::timeout(other.parameters));
    // It tries again.
    age();
    host.note_owned(&kept.id, &next).await.unwrap();
    assert_eq!(other.sweep(&old).await.unwrap().waiting, 1);
    assert_eq!(other.sweep(&old).await.unwrap().waiting, 1);
    assert_eq!((owner().await, notes(&other).await), (Some(old.clone()), 1));
    // It does not try again.
    age();
    assert_eq!(other.sweep(&old).await.unwrap().waiting, 0);
    assert_eq!((owner().await, notes(&other).await), (None, 1));
    other.sweep(&next).await.unwrap();
    assert_eq!((owner().await, notes(&other).await), (None, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_a_lease_settles_its_sandboxes_for_as_long_as_it_takes() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other) = (server.host().await, server.host().await);
    let kept = sandbox(600_000);
    let mut owned_entry = saved(&host, &kept).await;
    let old = lose(&host, &other).await;
    let next = format!("{}-2", old.split_once('-').unwrap().0);
    lease_renewal::enter(&other.links, &next, "host", other.parameters).await.unwrap();
    host.note_owned(&kept.id, &next).await.unwrap();
    let owner = async || other.look_up(&kept.id).await.unwrap().unwrap().owner;
    for _ in 0..3 {
        assert_eq!(other.sweep(&old).await.unwrap().waiting, 1);
        lock(&other.interrupted).age(InterruptedTakeovers::timeout(other.parameters));
    }
    assert_eq!(owner().await, Some(old.clone()));
    // The sweeper watches the lease.
    assert!(lock(&other.suspects).contains_key(&next));
    lock(&host.own).life = next.clone();
    assert_eq!(host.keep(&mut owned_entry, kept.clone()).await.unwrap(), Some(next.clone()));
    assert_eq!(other.sweep(&old).await.unwrap().waiting, 0);
    assert_eq!(owner().await, Some(next));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_entry_that_cannot_be_changed_keeps_no_other_from_being_swept() {
    let Some(server) = NatsServer::start() else { return };
    let (lost, sweeper) = (server.host().await, server.host().await);
    let bad = sandbox(600_000);
    saved(&lost, &bad).await;
    let good: Vec<_> = (0..40).map(|_| sandbox(600_000)).collect();
    for one in &good {
        saved(&lost, one).await;
    }
    // With the head of a change it is longer than the servers accept.
    let key = record::key(&bad.id).unwrap();
    let mut entry = sweeper.look_up(&bad.id).await.unwrap().unwrap();
    let length = |entry: &Entry| serde_json::to_vec(entry).unwrap().len();
    entry.record.token = "t".repeat(MAX_ENTRY - length(&entry) + 1);
    assert_eq!(length(&entry), MAX_ENTRY);
    let value = Bytes::from(serde_json::to_vec(&entry).unwrap());
    nats::put(&lost.links.sandboxes, &key, value).await.unwrap();
    let life = lose(&lost, &sweeper).await;
    sweeper.find_unswept().await.unwrap();
    sweeper.sweep_next().await;
    for one in &good {
        assert_eq!(sweeper.look_up(&one.id).await.unwrap().unwrap().owner, None);
    }
    // It is counted, and tried again.
    assert_eq!(sweeper.look_up(&bad.id).await.unwrap().unwrap().owner, Some(life.clone()));
    assert_eq!(sweeper.counts.unswept.get(), 1);
    assert!(lock(&sweeper.unswept).contains_key(&life));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_whose_entry_is_unreadable_stays_in_doubt_until_it_is_read() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let (bad, good) = (sandbox(600_000), sandbox(600_000));
    for one in [&bad, &good] {
        saved(&host, one).await;
        drop(TakeGuard::new(&host, &one.id));
    }
    let key = record::key(&bad.id).unwrap();
    let whole = nats::find(&host.links.sandboxes, &key).await.unwrap().unwrap().value;
    nats::put(&host.links.sandboxes, &key, Bytes::from_static(b"{")).await.unwrap();
    host.release_unfinished().await;
    assert_eq!(host.look_up(&good.id).await.unwrap().unwrap().owner, None);
    assert_eq!(lock(&host.unfinished).keys().collect::<Vec<_>>(), [&bad.id]);
    nats::put(&host.links.sandboxes, &key, whole).await.unwrap();
    lock(&host.unfinished).insert(bad.id.clone(), now());
    host.release_unfinished().await;
    assert!(lock(&host.unfinished).is_empty());
    let entry = host.look_up(&bad.id).await.unwrap().unwrap();
    assert_eq!((entry.owner, entry.record.generation), (None, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_releases_sandboxes_whose_taking_had_no_answer() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let (taken, made) = (sandbox(600_000), sandbox(600_000));
    saved(&host, &taken).await;
    host.enter(made.clone()).await.unwrap();
    for one in [&taken, &made] {
        drop(TakeGuard::new(&host, &one.id));
    }
    // A later take succeeds, and is kept.
    let outcome = host.take(&taken.id, |_| Ok(())).await.unwrap();
    assert!(matches!(outcome, TakeOutcome::Ours(_)));
    host.release_unfinished().await;
    assert!(host.look_up(&made.id).await.unwrap().is_none());
    let owner = async || host.look_up(&taken.id).await.unwrap().unwrap().owner;
    assert_eq!((owner().await, notes(&host).await), (Some(host.life()), 1));
    drop(TakeGuard::new(&host, &taken.id));
    host.release_unfinished().await;
    assert_eq!((owner().await, notes(&host).await), (None, 0));
    assert!(lock(&host.unfinished).is_empty());
    // It was never called here, so nothing of it was undone.
    assert_eq!(host.look_up(&taken.id).await.unwrap().unwrap().record.generation, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_has_the_sandboxes_beside_an_unreadable_entry() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let (good, damaged) = (sandbox(600_000), sandbox(600_000));
    saved(&host, &good).await;
    let key = record::key(&damaged.id).unwrap();
    nats::put(&host.links.sandboxes, &key, Bytes::from_static(b"{")).await.unwrap();
    let list = host.entries_of(TENANT, 100).await.unwrap();
    assert_eq!((list.records.len(), list.unreadable), (1, 1));
    assert_eq!((&list.records[0].id, host.counts.unreadable.get()), (&good.id, 1));
    // A snapshot as well.
    nats::put(&host.links.kept, &format!("id.{key}"), Bytes::from_static(b"{")).await.unwrap();
    assert!(host.snapshots_of(TENANT, 100).await.unwrap().is_empty());
    assert_eq!(host.counts.unreadable.get(), 2);
}
