//! Plain entries in a fleet that requires sealed ones.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use bytes::Bytes;

use super::NatsServer;
use super::catalog::{TENANT, build, opens};
use super::sweep::{lose, sandbox, saved, state, until_gone};
use crate::fleet::credentials::Role;
use crate::fleet::nats::NatsConnection;
use crate::fleet::record::Entry;
use crate::fleet::{BackupError, Fleet, FleetConfig, nats, record, restore, seal};
use crate::sandbox::records::store::SandboxStore;

fn keyed(server: &NatsServer, dir: &Path) -> FleetConfig {
    let file = dir.join("entry.key");
    std::fs::write(&file, format!("afresh-seal-key-v1:{}\n", "5a".repeat(32))).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let mut config = server.config();
    config.entry_key = Some(file);
    config
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_entry_is_refused_once_all_are_sealed() {
    let Some(server) = NatsServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let plain = server.host().await;
    plain.create_snapshot(build(1, &["web"])).await.unwrap();
    let forged = build(2, &["web:forged"]);
    plain.create_snapshot(forged.clone()).await.unwrap();
    let id = format!("id.{}", record::key(&forged.record.id).unwrap());
    let entry = nats::find(&plain.links.kept, &id).await.unwrap().unwrap();
    plain.remove_snapshot(&forged.record).await.unwrap();
    plain.leave().await;

    let mut config = keyed(&server, dir.path());
    let host = Fleet::join(&config).await.unwrap();
    assert_eq!(opens(&host, "web").await, Some(1));
    let report = seal(&config, true).await.unwrap();
    assert_eq!((report.sealed, report.changed, report.plain.len()), (0, 0, 2), "{report:?}");
    config.require_sealed = true;
    let strict = Fleet::join(&config).await.unwrap();
    assert!(strict.snapshot(TENANT, "web").await.is_err());
    let report = seal(&config, false).await.unwrap();
    assert_eq!((report.sealed, report.changed, report.plain.len()), (0, 2, 0), "{report:?}");
    assert_eq!(opens(&strict, "web").await, Some(1));
    let report = seal(&config, true).await.unwrap();
    assert_eq!((report.sealed, report.plain.len()), (2, 0), "{report:?}");

    // Another client of NATS, which has no key, writes a plain entry.
    let client = async_nats::connect(server.address.to_string()).await.unwrap();
    let subject = format!("$KV.afresh-default-kept.{id}");
    client.request(subject, Bytes::from(entry.value.to_vec())).await.unwrap();
    assert_eq!(opens(&host, &forged.record.id).await, Some(2), "the host without the option");
    assert!(strict.snapshot(TENANT, &forged.record.id).await.is_err());
    assert_eq!(seal(&config, true).await.unwrap().plain, [id]);
    // The rest of the fleet is served.
    assert_eq!(opens(&strict, "web").await, Some(1));
    config.entry_key = None;
    let why = Fleet::join(&config).await.err().unwrap();
    assert!(crate::failure::describe(&why).contains("needs `entry-key`"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sealing_adds_no_time_to_a_sandbox_and_keeps_its_end() {
    let Some(server) = NatsServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let plain = server.host().await;
    let (running, free, short) = (sandbox(600_000), sandbox(600_000), sandbox(3000));
    saved(&plain, &running).await;
    for one in [&free, &short] {
        let mut owned_entry = plain.enter(one.clone()).await.unwrap();
        plain.change(&mut owned_entry, one.clone(), state(), true).await.unwrap();
    }
    let mut before = Vec::new();
    for one in [&running, &free] {
        let key = record::key(&one.id).unwrap();
        before.push(nats::find(&plain.links.sandboxes, &key).await.unwrap().unwrap());
    }
    let damaged = record::key(&sandbox(1).id).unwrap();
    nats::put(&plain.links.sandboxes, &damaged, Bytes::from_static(b"nonsense")).await.unwrap();

    let config = keyed(&server, dir.path());
    let report = seal(&config, false).await.unwrap();
    assert_eq!((&report.plain, &report.unreadable), (&vec![], &vec![damaged]), "{report:?}");
    let links = NatsConnection::open(&config, "test", Role::Admin).await.unwrap();
    for found in before {
        let old: Entry = serde_json::from_slice(&found.value).unwrap();
        let now = nats::find(&links.sandboxes, &found.key).await.unwrap().unwrap();
        let entry: Entry = serde_json::from_slice(&now.value).unwrap();
        assert_eq!((entry.owner, entry.written), (old.owner, Some(found.time)));
    }
    until_gone(&links, &short.id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_keeps_its_sandbox_while_its_entry_is_sealed() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other) = (server.host().await, server.host().await);
    let kept = sandbox(600_000);
    let mut owned_entry = saved(&host, &kept).await;
    let key = record::key(&kept.id).unwrap();
    // As `seal` does, again and again.
    let sealing = tokio::spawn(async move {
        for _ in 0..30 {
            let found = nats::find(&other.links.sandboxes, &key).await.unwrap().unwrap();
            let _ = nats::update(&other.links.sandboxes, &key, found.value, found.revision).await;
        }
    });
    for _ in 0..30 {
        let outcome = host.keep(&mut owned_entry, kept.clone()).await;
        assert!(!matches!(outcome, Ok(None)), "the sandbox is given up");
    }
    sealing.await.unwrap();
    assert_eq!(host.keep(&mut owned_entry, kept.clone()).await.unwrap(), Some(host.life()));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_entry_keeps_no_other_sandbox_of_lost_hosts_from_a_sweep() {
    let Some(server) = NatsServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut config = keyed(&server, dir.path());
    config.require_sealed = true;
    let sweeper = Fleet::join(&config).await.unwrap();
    let mut lost = [Fleet::join(&config).await.unwrap(), Fleet::join(&config).await.unwrap()];
    // Lives are swept in this order.
    lost.sort_by_key(|host| host.life());
    let (forged, first, second) = (sandbox(600_000), sandbox(600_000), sandbox(600_000));
    for (host, one) in [(&lost[0], &forged), (&lost[0], &first), (&lost[1], &second)] {
        saved(host, one).await;
    }
    let key = record::key(&forged.id).unwrap();
    let found = nats::find(&sweeper.links.sandboxes, &key).await.unwrap().unwrap();
    let client = async_nats::connect(server.address.to_string()).await.unwrap();
    let subject = format!("$KV.afresh-default-sandboxes.{key}");
    client.request(subject, Bytes::from(found.value.to_vec())).await.unwrap();
    let life = lose(&lost[0], &sweeper).await;
    lose(&lost[1], &sweeper).await;
    sweeper.find_unswept().await.unwrap();
    for _ in 0..3 {
        sweeper.sweep_next().await;
    }
    for one in [&first, &second] {
        assert_eq!(sweeper.look_up(&one.id).await.unwrap().unwrap().owner, None);
    }
    // Once the entry is sealed, its sandbox is swept, too.
    assert!(nats::find(&sweeper.links.hosts, &life).await.unwrap().is_some());
    seal(&config, false).await.unwrap();
    sweeper.sweep(&life).await.unwrap();
    assert_eq!(sweeper.look_up(&forged.id).await.unwrap().unwrap().owner, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_with_another_key_or_none_is_refused_with_the_way_out() {
    let Some(server) = NatsServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut sealed = keyed(&server, dir.path());
    let mut plain = server.config();
    for config in [&mut sealed, &mut plain] {
        config.store = Some(dir.path().join("store").to_string_lossy().into_owned());
    }
    for (key, config, way_out) in [
        ("0123456789abcdef", &plain, "name the file of their key as `entry-key`"),
        ("0123456789abcdef", &sealed, "by another key"),
        ("", &sealed, "restore it without `entry-key`"),
    ] {
        let head = serde_json::json!({
            "format": "afresh fleet backup", "version": 1, "fleet": "default", "made": 1,
            "key": key,
        });
        std::fs::write(dir.path().join("ledger.jsonl"), format!("{head}\n")).unwrap();
        let refusal = restore(config, dir.path()).await.unwrap_err();
        assert!(matches!(refusal, BackupError::Key { .. }), "{refusal}");
        assert!(refusal.to_string().contains(way_out), "{refusal}");
    }
}
