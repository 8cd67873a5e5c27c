//! Backup and restoring: everything is destroyed, and every saved sandbox opens on other servers.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use crate::hosts::{Fleet, RunResult, Sandbox, until};

/// Lines of a configuration with the key of the fleet.
const KEYED: &str = "[fleet]\nnats = 'nats://127.0.0.1:1'\nentry-key = 'DIR/entry.key'\n";

/// A fleet whose entries are sealed.
fn keyed() -> Option<Fleet> {
    let fleet = Fleet::prepare("", KEYED, &[])?;
    let key = fleet.dir.path().join("entry.key");
    fs::write(&key, format!("afresh-seal-key-v1:{}\n", "5a".repeat(32))).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    Some(fleet)
}

fn one_host(fleet: &mut Fleet) {
    fleet.add("two");
    fleet.settle(1);
}

fn report(fleet: &Fleet, verb: &str, dir: &str) -> Result<Value, String> {
    let key = fleet.dir.path().join("entry.key").display().to_string();
    let output = fleet.try_command(&["fleet", verb, dir, "--entry-key", &key], true)?;
    Ok(serde_json::from_str(output.trim()).unwrap())
}

#[test]
fn after_ledger_and_store_are_destroyed_a_backup_opens_every_saved_sandbox() {
    let Some(mut fleet) = keyed() else { return };
    let kept = tempfile::tempdir().unwrap();
    let dir = kept.path().join("backup").display().to_string();
    one_host(&mut fleet);
    let saved: Vec<Sandbox> = (0..3).map(|_| Sandbox::new(&fleet.hosts[0])).collect();
    let unsaved = Sandbox::new(&fleet.hosts[0]);
    for (calls, sandbox) in saved.iter().enumerate() {
        for call in 0..=calls as u64 {
            assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(call + 1));
        }
        sandbox.save(&fleet.hosts[0]);
    }
    // A paused one, a running one with a call after its save, and one that gave a named snapshot.
    assert_eq!(saved[0].ask_soon(&fleet.hosts[0], "POST", "/pause"), 204);
    assert_eq!(saved[1].run_soon(&fleet.hosts[0]), RunResult::Count(3));
    let key = "X-API-Key: key-of-acme\r\n";
    let path = format!("/sandboxes/{}/snapshots", saved[2].id());
    let (status, made) = fleet.hosts[0].ask("POST", &path, key, br#"{"name": "kept"}"#).unwrap();
    assert_eq!(status, 201, "{made}");
    // Neither tokens nor names are readable in the files of NATS.
    for secret in [saved[0].token(), "counter", "\"acme\""] {
        assert!(!fleet.nats.stores(secret.as_bytes()), "{secret}");
    }
    assert!(fleet.nats.stores(b"AFENTRY1"));

    let first = report(&fleet, "backup", &dir).unwrap();
    assert_eq!((&first["sandboxes"], &first["missing"]), (&json!(3), &json!([])), "{first}");
    assert_eq!(first["unsaved"], json!([unsaved.id()]));
    let ledger = fs::read(kept.path().join("backup/ledger.jsonl")).unwrap();
    assert!(!ledger.windows(8).any(|part| part == &saved[0].token().as_bytes()[..8]));
    // The second one has what changed since.
    assert_eq!(saved[1].run_soon(&fleet.hosts[0]), RunResult::Count(4));
    saved[1].save(&fleet.hosts[0]);
    assert_eq!(report(&fleet, "backup", &dir).unwrap()["sandboxes"], 3);
    let why = report(&fleet, "restore", &dir).unwrap_err();
    assert!(why.contains("hosts of the fleet are running (two)"), "{why}");
    drop(fleet);

    let Some(mut fleet) = keyed() else { return };
    let restored = report(&fleet, "restore", &dir).unwrap();
    assert_eq!((&restored["sandboxes"], &restored["missing"]), (&json!(3), &json!([])));
    assert_eq!(report(&fleet, "restore", &dir).unwrap(), restored, "it continues");
    one_host(&mut fleet);
    assert_eq!(saved[1].run_soon(&fleet.hosts[0]), RunResult::Count(5));
    assert_eq!(saved[2].run_soon(&fleet.hosts[0]), RunResult::Count(4));
    assert!(matches!(saved[0].ask_soon(&fleet.hosts[0], "POST", "/connect"), 200 | 201));
    assert_eq!(saved[0].run_soon(&fleet.hosts[0]), RunResult::Count(2));
    assert_eq!(unsaved.ask_soon(&fleet.hosts[0], "GET", ""), 404);
    until("a sandbox is made from the snapshot", || {
        let body = br#"{"templateID": "kept"}"#;
        let made = fleet.hosts[0].ask("POST", "/sandboxes", key, body);
        made.is_some_and(|(status, _)| status == 201)
    });
}
