//! Access to NATS: nkeys, JWTs, passwords, a private authority with client certificates, and the
//! least permissions of `deploy/nats/fleet.conf`.
//!
//! The certificates and keys in this folder are for 127.0.0.1, and for nothing else.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::hosts::{Fleet, RunResult, Sandbox};
use crate::servers::Nats;

fn file(name: &str) -> String {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fleet/access");
    dir.join(name).display().to_string()
}

/// The example of the documentation, with the files of this folder.
fn example() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/nats/fleet.conf");
    let text = std::fs::read_to_string(path).unwrap();
    // The server's arguments name its store.
    let text: String = text
        .lines()
        .filter(|line| !line.starts_with("jetstream"))
        .map(|line| format!("{line}\n"))
        .collect();
    text.replace("/etc/nats/", &file("")).replace("_PASSWORD", "-password")
}

/// Options of a command with this user's password.
fn options(dir: &Path, user: &str) -> Vec<String> {
    let credentials: PathBuf = dir.join(user);
    std::fs::write(&credentials, format!("{user} {}-password\n", user.to_uppercase())).unwrap();
    let mut options = vec!["--nats-credentials".to_owned(), credentials.display().to_string()];
    for (option, name) in [
        ("--nats-ca", "ca.pem"),
        ("--nats-certificate", "client.pem"),
        ("--nats-certificate-key", "client-key.pem"),
    ] {
        options.extend([option.to_owned(), file(name)]);
    }
    options
}

#[test]
fn each_client_of_nats_can_do_its_own_work_only() {
    let Some(nats) = Nats::start_with_file(&example()) else { return };
    let more = format!(
        "[fleet]\nnats = 'nats://127.0.0.1:1'\ncredentials = '{}'\nca = '{}'\ncertificate = '{}'\ncertificate-key = '{}'\n",
        file("host.seed"),
        file("ca.pem"),
        file("client.pem"),
        file("client-key.pem"),
    );
    let mut fleet = Fleet::prepare_on(nats, "", &more, &[]);
    let dir = fleet.dir.path().to_owned();
    let run = |fleet: &Fleet, arguments: &[&str], options: &[String], store: bool| {
        let all = arguments.iter().copied().chain(options.iter().map(String::as_str));
        fleet.try_command(&all.collect::<Vec<_>>(), store)
    };
    let operator = options(&dir, "operator");
    // Hosts may not make buckets, and neither may operators.
    let why = run(&fleet, &["nodes"], &operator, false).unwrap_err();
    assert!(why.contains("no fleet `default`"), "{why}");
    run(&fleet, &["fleet", "init"], &options(&dir, "admin"), false).unwrap();
    for name in ["two", "three"] {
        fleet.add(name);
    }
    fleet.settle(2);
    let sandbox = Sandbox::new(&fleet.hosts[0]);
    for (call, host) in [(1, 0), (2, 1)] {
        assert_eq!(sandbox.run_soon(&fleet.hosts[host]), RunResult::Count(call));
    }
    sandbox.save(&fleet.hosts[0]);
    let backup = dir.join("backup").display().to_string();
    let reader = options(&dir, "reader");
    run(&fleet, &["fleet", "backup", &backup], &reader, true).unwrap();
    let why = run(&fleet, &["drain", "two"], &reader, false).unwrap_err();
    assert!(!why.is_empty());
    // The key of a host drains no host.
    let mut host = operator.clone();
    host[1] = file("host.seed");
    let why = run(&fleet, &["drain", "two"], &host, false).unwrap_err();
    assert!(why.contains("ermission") && why.contains("_INBOX.afresh-default.operator"), "{why}");
    let listed = run(&fleet, &["nodes"], &operator, false).unwrap();
    let names: Vec<Value> =
        listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(names.iter().all(|host| host["draining"] == false) && names.len() == 2, "{listed}");
    // Without a certificate, or with the system's authorities, there is no connection.
    for cut in [4, 2] {
        assert!(run(&fleet, &["nodes"], &operator[..cut], false).is_err());
    }
    run(&fleet, &["drain", "two"], &operator, false).unwrap();
    fleet.hosts[0].wait();
    assert_eq!(sandbox.run_soon(&fleet.hosts[1]), RunResult::Count(3));
}

#[test]
fn hosts_join_with_the_jwt_of_an_account() {
    let text = std::fs::read_to_string(file("operator.conf")).unwrap();
    let Some(nats) = Nats::start_with_file(&text) else { return };
    let creds = file("host.creds");
    let more = format!("[fleet]\nnats = 'nats://127.0.0.1:1'\ncredentials = '{creds}'\n");
    let mut fleet = Fleet::prepare_on(nats, "", &more, &[]);
    fleet.add("two");
    fleet.settle(1);
    assert_eq!(Sandbox::new(&fleet.hosts[0]).run_soon(&fleet.hosts[0]), RunResult::Count(1));
    let listed = fleet.try_command(&["nodes", "--nats-credentials", &creds], false).unwrap();
    assert!(listed.contains("\"two\""), "{listed}");
    let why = fleet.try_command(&["nodes"], false).unwrap_err();
    assert!(why.contains("refuses this client: authorization violation"), "{why}");
}
