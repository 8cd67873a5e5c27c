//! Limits that hosts share, a host whose disk is full, and a bug that the tests must catch.

use std::fs;

use afresh_sys::planted::{Bug, must_be_caught};

use crate::hosts::{Fleet, Host, Ran, Sandbox, until};
use crate::small_disk::SmallDisk;

/// The status and the text of an attempt to make a sandbox.
fn make(host: &Host, key: &str) -> (u16, String) {
    let key = format!("X-API-Key: {key}\r\n");
    let mut made = (0, String::new());
    until("a host answers", || {
        made = host.ask("POST", "/v2/sandboxes", &key, b"{}").unwrap_or_default();
        !matches!(made.0, 0 | 503)
    });
    made
}

#[test]
fn a_tenants_limit_holds_on_all_hosts_and_counts_paused_sandboxes() {
    let Some(mut fleet) = Fleet::prepare("max-sandboxes = 3\n", "", &[]) else { return };
    fleet.begin();
    let know = |count: u64| {
        until("each host knows the sandboxes of all", || {
            fleet.hosts.iter().all(|host| host.counts("sandboxes") == Some(count))
        });
    };
    let refused = || {
        for host in &fleet.hosts {
            let (status, why) = make(host, "key-of-acme");
            assert_eq!(status, 429, "{}: {why}", host.name);
            assert!(why.contains("`max-sandboxes` is used up: 3 of 3"), "{why}");
        }
    };
    let sandboxes: Vec<Sandbox> = fleet.hosts.iter().map(Sandbox::new).collect();
    for sandbox in &sandboxes[..2] {
        assert_eq!(sandbox.ask_soon(&fleet.hosts[1], "POST", "/pause"), 204);
    }
    know(3);
    refused();
    // The limit is each tenant's own.
    assert_eq!(make(&fleet.hosts[2], "key-of-other").0, 201);
    know(4);
    refused();
    // Room is there at once, on any host.
    for (number, sandbox) in sandboxes.iter().enumerate() {
        assert_eq!(sandbox.ask_soon(&fleet.hosts[number], "DELETE", ""), 204);
        let (status, made) = make(&fleet.hosts[(number + 1) % 3], "key-of-acme");
        assert_eq!(status, 201, "{made}");
        know(4);
        refused();
    }
}

#[test]
fn a_host_whose_disk_is_full_loses_nothing_and_takes_sandboxes_of_others() {
    let Some(mut fleet) = Fleet::prepare("", "", &[]) else { return };
    let dir = fleet.dir.path().join("one/sandboxes");
    fs::create_dir_all(&dir).unwrap();
    let Some(disk) = SmallDisk::mount(&dir, 32) else { return };
    fleet.begin();
    let paused: Vec<Sandbox> = (0..6).map(|n| Sandbox::new(&fleet.hosts[n % 3])).collect();
    for sandbox in &paused {
        assert_eq!(sandbox.run_soon(&fleet.hosts[0]), Ran::Count(1));
        assert_eq!(sandbox.ask_soon(&fleet.hosts[0], "POST", "/pause"), 204);
    }
    let own = super::saved(&fleet, 2);
    assert_eq!(own.run_soon(&fleet.hosts[0]), Ran::Count(3));
    disk.fill(0);
    assert_eq!(own.ask_soon(&fleet.hosts[1], "POST", "/pause"), 507);
    assert_eq!(own.run_soon(&fleet.hosts[2]), Ran::Count(4));
    // It is the only one that is left to take them.
    for (number, name) in [(1, "two"), (2, "three")] {
        fleet.command(&["drain", name]);
        fleet.hosts[number].wait();
    }
    for sandbox in &paused {
        let connected = sandbox.ask_soon(&fleet.hosts[0], "POST", "/connect");
        assert!(matches!(connected, 200 | 201), "{connected}");
        assert_eq!(sandbox.run_soon(&fleet.hosts[0]), Ran::Count(2));
    }
    disk.empty();
    for (sandbox, count) in paused.iter().map(|one| (one, 3)).chain([(&own, 5)]) {
        sandbox.save(&fleet.hosts[0]);
        assert_eq!(sandbox.run_soon(&fleet.hosts[0]), Ran::Count(count));
    }
}

#[test]
fn a_host_that_ends_with_a_full_disk_loses_no_acknowledged_call() {
    let Some(mut fleet) = Fleet::prepare("", "", &[]) else { return };
    let dir = fleet.dir.path().join("one/sandboxes");
    fs::create_dir_all(&dir).unwrap();
    let Some(disk) = SmallDisk::mount(&dir, 32) else { return };
    fleet.begin();
    let own = super::saved(&fleet, 2);
    disk.fill(0);
    let mut count = 2;
    while count < 5 {
        count += 1;
        assert_eq!(own.run_soon(&fleet.hosts[2]), Ran::Count(count));
    }
    assert_eq!(own.ask_soon(&fleet.hosts[1], "POST", "/pause"), 507, "it is on the full host");
    fleet.command(&["drain", "one"]);
    fleet.hosts[0].wait();
    assert_eq!(own.run_soon(&fleet.hosts[1]), Ran::Count(6));
    let left = fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains(&own.id)).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn planted_bugs_are_caught() {
    if std::env::var_os("AFRESH_TEST_NATS_SERVER").is_none() {
        println!("SKIPPED: planted bugs: the test that catches them needs a nats-server");
        return;
    }
    must_be_caught(&[Bug::Lease], &["a_host_that_is_cut_off_refuses_and_joins_again"]);
}
