//! Limits that hosts share, a host whose disk is full, and a bug that the tests must catch.

use std::fs;
use std::time::Duration;

use afresh_sys::planted::{Bug, must_be_caught};

use crate::hosts::{COUNTER, Fleet, Host, RunResult, Sandbox, until};
use crate::small_disk::SmallDisk;

/// The status and the text of an attempt to make a sandbox.
fn make(host: &Host, key: &str) -> (u16, String) {
    let key = format!("X-API-Key: {key}\r\n");
    let mut made = (0, String::new());
    until("a host answers", || {
        made = host.ask("POST", "/v2/sandboxes", &key, b"{}").unwrap_or_default();
        !matches!(made.0, 0 | 503 | 504)
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

/// Waits until every host has heard a heartbeat of each that was made since.
fn hear_all(fleet: &Fleet) {
    const HEARTBEATS: &str = "afresh_fleet_adverts_total";
    let before: Vec<u64> = fleet.hosts.iter().map(|host| host.metric(HEARTBEATS)).collect();
    until("heartbeats arrive", || {
        let mut hosts = fleet.hosts.iter().zip(&before);
        hosts.all(|(host, before)| host.metric(HEARTBEATS) >= before + 6)
    });
}

/// A counter with 1 MiB of memory. Each call changes every page.
fn large_counter() -> String {
    const CHANGE: &str = "(local.set $page (i32.const 0x100000))
        (loop $next
            (i32.store (local.get $page)
                (i32.add (i32.add (i32.load (local.get $page)) (i32.const 1000000)) (local.get $page)))
            (local.set $page (i32.add (local.get $page) (i32.const 4096)))
            (br_if $next (i32.lt_u (local.get $page) (i32.const 0x200000))))";
    let change = format!("(func $change (local $page i32) {CHANGE})\n");
    let evaluate = "(local $digit i32) (local $rounds i64)";
    COUNTER
        .replacen("\"memory\") 3)", "\"memory\") 40)", 1)
        .replacen("(func (export \"warm\"))", "(func (export \"warm\") (call $change))", 1)
        .replacen(evaluate, &format!("{evaluate} (call $change)"), 1)
        .replacen("(data", &format!("{change}(data"), 1)
}

#[test]
fn memory_and_saved_states_of_a_tenant_have_one_budget_on_all_hosts() {
    let limits = "[sandboxes.tenants.acme]\nmax-stored-mib = 2\n\
                  [sandboxes.tenants.other]\nmax-memory-mib = 4\n";
    let guest = large_counter();
    let Some(mut fleet) = Fleet::prepare("", limits, &[("counter", &guest)]) else { return };
    fleet.begin();
    let hosts = &fleet.hosts;
    // Wherever they are placed, all hosts count them.
    let mut made = 0;
    let refused = loop {
        let (status, text) = make(&hosts[made % 3], "key-of-other");
        if status != 201 {
            break (status, text);
        }
        made += 1;
        assert!(made < 5, "{made} sandboxes of 1 MiB under a budget of 4 MiB");
        hear_all(&fleet);
    };
    assert!(refused.0 == 429 && refused.1.contains("`max-memory-mib` is used up"), "{refused:?}");
    assert!(made > 1, "one sandbox has no more than 2 MiB");
    for host in hosts {
        let (status, why) = make(host, "key-of-other");
        assert_eq!(status, 429, "{}: {why}", host.name);
    }
    // Paused sandboxes have no owner, and their states count.
    let sandboxes: Vec<Sandbox> = hosts.iter().map(Sandbox::new).collect();
    for sandbox in &sandboxes {
        assert_eq!(sandbox.run_soon(&hosts[0]), RunResult::Count(1));
    }
    for sandbox in &sandboxes[..2] {
        assert_eq!(sandbox.ask_soon(&hosts[1], "POST", "/pause"), 204);
    }
    for host in hosts {
        until("the saved states are counted", || {
            // Each attempt before makes a sandbox.
            std::thread::sleep(Duration::from_secs(1));
            let (status, why) = make(host, "key-of-acme");
            status == 429 && why.contains("`max-stored-mib` is used up")
        });
    }
    assert_eq!(sandboxes[2].ask_soon(&hosts[0], "POST", "/pause"), 429);
    // A killed sandbox makes room, wherever its state was.
    assert_eq!(sandboxes[0].ask_soon(&hosts[2], "DELETE", ""), 204);
    until("there is room again", || sandboxes[2].ask_soon(&hosts[0], "POST", "/pause") == 204);
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
        assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(1));
        assert_eq!(sandbox.ask_soon(&fleet.hosts[0], "POST", "/pause"), 204);
    }
    let own = super::saved(&fleet, 2);
    assert_eq!(own.run_soon(&fleet.hosts[0]), RunResult::Count(3));
    disk.fill(0);
    assert_eq!(own.ask_soon(&fleet.hosts[1], "POST", "/pause"), 507);
    assert_eq!(own.run_soon(&fleet.hosts[2]), RunResult::Count(4));
    // It is the only one that is left to take them.
    for (number, name) in [(1, "two"), (2, "three")] {
        fleet.command(&["drain", name]);
        fleet.hosts[number].wait();
    }
    for sandbox in &paused {
        let connected = sandbox.ask_soon(&fleet.hosts[0], "POST", "/connect");
        assert!(matches!(connected, 200 | 201), "{connected}");
        assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(2));
    }
    disk.empty();
    for (sandbox, count) in paused.iter().map(|one| (one, 3)).chain([(&own, 5)]) {
        sandbox.save(&fleet.hosts[0]);
        assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(count));
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
        assert_eq!(own.run_soon(&fleet.hosts[2]), RunResult::Count(count));
    }
    assert_eq!(own.ask_soon(&fleet.hosts[1], "POST", "/pause"), 507, "it is on the full host");
    fleet.command(&["drain", "one"]);
    fleet.hosts[0].wait();
    assert_eq!(own.run_soon(&fleet.hosts[1]), RunResult::Count(6));
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
