//! Hosts of two versions in one fleet: fields that a later version has added.

use serde_json::{Value, json};

use super::NatsServer;
use super::catalog::{TENANT, build};
use super::sweep::{lose, sandbox, saved, state};
use crate::fleet::catalog::at_rest;
use crate::fleet::nats::Bucket;
use crate::fleet::placement_store::TakeOutcome;
use crate::fleet::{Fleet, nats, record};
use crate::sandbox::records::store::SandboxStore;

/// Paths of the objects in an entry of a sandbox, and in one of a snapshot.
const SANDBOX: [&str; 4] = ["", "/record", "/record/network", "/state"];
const SNAPSHOT: [&str; 4] = ["", "/record", "/record/built", "/state"];
/// The path of the only object in other entries.
const TOP_LEVEL: [&str; 1] = [""];

/// Changes an entry as a host of a later version does.
async fn add_fields(bucket: &Bucket, key: &str, objects: &[&str]) {
    let found = nats::find(bucket, key).await.unwrap().unwrap();
    let mut entry: Value = serde_json::from_slice(&found.value).unwrap();
    if objects.contains(&"/record/network") {
        entry["record"]["network"] = json!({"internet": true});
    }
    for object in objects {
        entry.pointer_mut(object).unwrap()["later"] = json!({"at": object, "more": [1, null]});
    }
    let value = serde_json::to_vec(&entry).unwrap().into();
    nats::update(bucket, key, value, found.revision).await.unwrap();
}

/// Checks that an entry has them.
async fn check(bucket: &Bucket, key: &str, objects: &[&str], after: &str) {
    let found = nats::find(bucket, key).await.unwrap().unwrap();
    let entry: Value = serde_json::from_slice(&found.value).unwrap();
    for object in objects {
        let has = entry.pointer(object).and_then(|object| object.get("later"));
        let expected = json!({"at": object, "more": [1, null]});
        assert_eq!(has, Some(&expected), "after {after}, `{object}`: {entry}");
    }
}

async fn take(host: &Fleet, id: &str) -> Box<crate::fleet::placement_store::OwnedSandbox> {
    match host.take(id, |_| Ok(())).await.unwrap() {
        TakeOutcome::Ours(owned) => owned,
        _ => panic!("it is not taken"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_of_a_sandbox_keeps_the_fields_of_a_later_version() {
    let Some(server) = NatsServer::start() else { return };
    let (one, two) = (server.host().await, server.host().await);
    let own = sandbox(600_000);
    let key = record::key(&own.id).unwrap();
    let mut owned_entry = saved(&one, &own).await;
    one.change(&mut owned_entry, own.clone(), state(), true).await.unwrap();
    let bucket = &two.links.sandboxes;
    add_fields(bucket, &key, &SANDBOX).await;
    let check = async |after| check(bucket, &key, &SANDBOX, after).await;
    let mut owned = take(&one, &own.id).await;
    check("a take").await;
    let state = owned.owned_entry.state.clone();
    one.change(&mut owned.owned_entry, owned.record.clone(), state.clone(), false).await.unwrap();
    check("a change of the record").await;
    // A sweep of another host gives the entry a new revision.
    let life = two.life();
    two.note_owned(&own.id, &life).await.unwrap();
    two.sweep(&life).await.unwrap();
    check("a new revision").await;
    assert!(one.keep(&mut owned.owned_entry, owned.record.clone()).await.unwrap().is_some());
    check("a new life of its host").await;
    one.change(&mut owned.owned_entry, owned.record.clone(), state, true).await.unwrap();
    check("a release").await;
    take(&one, &own.id).await;
    let life = lose(&one, &two).await;
    two.sweep(&life).await.unwrap();
    assert_eq!(two.look_up(&own.id).await.unwrap().unwrap().owner, None);
    check("a sweep").await;
    take(&two, &own.id).await;
    check("a take after that").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_of_a_snapshot_keeps_the_fields_of_a_later_version() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let (own, other) = (build(1, &["web"]), build(2, &["web"]));
    let key = format!("id.{}", record::key(&own.record.id).unwrap());
    host.create_snapshot(own.clone()).await.unwrap();
    let bucket = &host.links.kept;
    add_fields(bucket, &key, &SNAPSHOT).await;
    let check = async |after| check(bucket, &key, &SNAPSHOT, after).await;
    host.add_names(&own.record, &["web:v1".to_owned()]).await.unwrap();
    check("another name").await;
    host.remove_names(&own.record, &["web:v1".to_owned()]).await.unwrap();
    check("one name less").await;
    host.create_snapshot(other).await.unwrap();
    check("a name that another snapshot has now").await;
    assert_eq!(host.snapshots(TENANT, 100).await.unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_a_snapshot_gets_again_keeps_the_fields_of_a_later_version() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let own = build(1, &["web"]);
    let key = record::named(TENANT, "web");
    host.create_snapshot(own.clone()).await.unwrap();
    let bucket = &host.links.kept;
    let before = nats::find(bucket, &key).await.unwrap().unwrap();
    add_fields(bucket, &key, &TOP_LEVEL).await;
    host.add_names(&own.record, &["web".to_owned()]).await.unwrap();
    check(bucket, &key, &TOP_LEVEL, "a later claim of the name").await;
    let after = nats::find(bucket, &key).await.unwrap().unwrap();
    let claimed =
        |value: &[u8]| serde_json::from_slice::<Value>(value).unwrap()["claimed"].as_u64().unwrap();
    assert!(claimed(&after.value) > claimed(&before.value), "it was rewritten");
    // A backup has them as well.
    let rest: Value = serde_json::from_slice(&at_rest(&key, after.value)).unwrap();
    assert_eq!((&rest["claimed"], &rest["later"]["at"]), (&json!(0), &json!("")), "{rest}");
}
