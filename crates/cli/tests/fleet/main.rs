//! Three hosts on one machine, in separate processes, over a real nats-server and, if available, a
//! real S3 server.
//!
//! A sandbox here counts its calls in its own memory. A host that ran it twice, or answered for it
//! after another host had taken it over, would return a number a second time.

mod access;
mod apart;
mod backup;
mod checker;
mod clock;
mod cluster;
mod deletion;
mod history;
mod hosts;
mod limits;
#[path = "../../../store/tests/suite/support/listening.rs"]
mod listening;
#[path = "../../../serve/src/fleet/tests/nats_server.rs"]
mod nats_server;
mod outages;
mod samples;
mod servers;
#[path = "../../../store/tests/suite/support/small_disk.rs"]
mod small_disk;
mod soak;

use apart::Namespace;
use hosts::{Fleet, Host, RunResult, Sandbox, others_ask, until};
use serde_json::Value;
use servers::Proxy;

#[test]
fn calls_land_where_the_snapshot_is_held_and_any_host_takes_them() {
    let Some(fleet) = Fleet::start() else { return };
    let sandboxes: Vec<Sandbox> = (0..12).map(|n| Sandbox::new(&fleet.hosts[n % 3])).collect();
    for round in 1..=5 {
        for (number, sandbox) in sandboxes.iter().enumerate() {
            let host = &fleet.hosts[(number + round) % 3];
            assert_eq!(sandbox.run_soon(host), RunResult::Count(round as u64), "{sandbox:?}");
        }
    }
    // Bodies and answers of any size pass between hosts, and the host that has no such guest serves
    // it all the same.
    let large = vec![b'x'; 3 << 20];
    for host in &fleet.hosts {
        let (status, answer) = host.ask("POST", "/echo", "", &large).unwrap();
        assert_eq!((status, answer.len()), (200, large.len()));
        assert_eq!(host.ask("POST", "/echo", "", b"small").unwrap(), (200, "small".to_owned()));
        let (status, _) = host.ask("POST", "/nowhere", "", b"").unwrap();
        assert_eq!(status, 404);
    }
    let count = |name: &str| -> u64 { fleet.hosts.iter().map(|host| host.metric(name)).sum() };
    let (held, elsewhere) =
        (count("afresh_fleet_calls_held_total"), count("afresh_fleet_calls_elsewhere_total"));
    assert!(held >= 72 && held * 100 >= (held + elsewhere) * 95, "{held} and {elsewhere}");
    assert!(count("afresh_fleet_calls_forwarded_total") >= 30);
    // Every host checks the owner, and refuses invalid ids.
    for host in &fleet.hosts {
        assert_eq!(others_ask(host, &sandboxes[0]), 404);
        let (status, _) =
            host.ask("GET", "/sandboxes/a.b*c%3E", "X-API-Key: key-of-acme\r\n", b"").unwrap();
        assert_eq!(status, 404);
        let (_, listed) =
            host.ask("GET", "/v2/sandboxes", "X-API-Key: key-of-acme\r\n", b"").unwrap();
        assert_eq!(serde_json::from_str::<Vec<Value>>(&listed).unwrap().len(), 12, "{listed}");
    }
    let nodes = fleet.command(&["nodes"]);
    let nodes: Vec<Value> = nodes.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<_> = nodes.iter().map(|node| node["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["one", "three", "two"]);
    assert_eq!(nodes.iter().map(|node| node["sandboxes"].as_u64().unwrap()).sum::<u64>(), 12);
    assert_eq!(sandboxes[0].ask_soon(&fleet.hosts[1], "DELETE", ""), 204);
    assert_eq!(sandboxes[0].ask_soon(&fleet.hosts[2], "GET", ""), 404);
}

/// A sandbox of the first host, saved after this many calls.
fn saved(fleet: &Fleet, calls: u64) -> Sandbox {
    saved_on(fleet, 0, calls)
}

/// A sandbox of this host, saved after this many calls.
fn saved_on(fleet: &Fleet, host: usize, calls: u64) -> Sandbox {
    let host = &fleet.hosts[host];
    let mut found = None;
    until("a sandbox lives on that host", || {
        let sandbox = Sandbox::new(host);
        for call in 1..=calls {
            assert_eq!(sandbox.run_soon(host), RunResult::Count(call));
        }
        let nodes = fleet.command(&["nodes"]);
        let mut nodes = nodes.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let here = nodes.any(|node| node["name"] == host.name.as_str() && node["sandboxes"] == 1);
        sandbox.save(host);
        found = Some(sandbox);
        here
    });
    found.unwrap()
}

#[test]
fn saved_sandboxes_of_a_killed_host_continue_elsewhere() {
    let Some(mut fleet) = Fleet::start() else { return };
    let sandbox = saved(&fleet, 3);
    assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(4));
    let lost = Sandbox::new(&fleet.hosts[0]);
    assert_eq!(lost.run_soon(&fleet.hosts[0]), RunResult::Count(1));
    fleet.hosts[0].kill();
    // From its last saved state, by way of any host, and only once.
    assert_eq!(sandbox.run_soon(&fleet.hosts[1]), RunResult::Count(4));
    assert_eq!(sandbox.run_soon(&fleet.hosts[2]), RunResult::Count(5));
    assert_eq!(sandbox.run_soon(&fleet.hosts[1]), RunResult::Count(6));
    // A sandbox that was never saved is lost and reported to its client, unless it lived elsewhere.
    assert!(matches!(
        lost.run_soon(&fleet.hosts[2]),
        RunResult::Refused(502) | RunResult::Count(2)
    ));
}

#[test]
fn a_host_stopped_past_its_lease_does_not_answer_for_lost_sandboxes() {
    let Some(fleet) = Fleet::start() else { return };
    let sandbox = saved(&fleet, 2);
    assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(3));
    fleet.hosts[0].stop();
    assert_eq!(sandbox.run_soon(&fleet.hosts[1]), RunResult::Count(3));
    assert_eq!(sandbox.run_soon(&fleet.hosts[2]), RunResult::Count(4));
    fleet.hosts[0].go_on();
    let mut last = 4;
    for round in 0..40 {
        match sandbox.run(&fleet.hosts[round % 3]) {
            RunResult::Count(count) => {
                assert_eq!(count, last + 1, "answered from what the stopped host remembers");
                last = count;
            }
            RunResult::Refused(status) => assert!(matches!(status, 503 | 504), "{status}"),
        }
    }
    assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(last + 1));
}

#[test]
fn a_host_that_is_cut_off_refuses_and_joins_again() {
    let Some(fleet) = Fleet::start() else { return };
    let sandbox = saved(&fleet, 2);
    assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(3));
    fleet.proxy.swallow(true);
    another_takes_it(&fleet, &fleet.hosts[0], &sandbox);
    fleet.proxy.swallow(false);
    assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(4));
    assert_eq!(sandbox.run_soon(&fleet.hosts[2]), RunResult::Count(5));
}

#[test]
fn a_pause_during_an_unfinished_pause_is_not_acknowledged() {
    let Some(fleet) = Fleet::start() else { return };
    let sandbox = saved(&fleet, 1);
    assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(2));
    fleet.proxy.swallow(true);
    let addr = fleet.hosts[0].addr;
    let pause = || {
        let sandbox = sandbox.clone();
        std::thread::spawn(move || sandbox.ask_at(addr, "POST", "/pause"))
    };
    let first = pause();
    // Each waits for the first, wherever that is; 409 would mean that the sandbox is saved.
    let mut others = Vec::new();
    while !first.is_finished() && others.len() < 100 {
        std::thread::sleep(std::time::Duration::from_millis(50));
        others.push(pause());
    }
    // Nothing answers whether the pause has entered the ledger.
    assert!(matches!(first.join().unwrap(), 503 | 504));
    let others: Vec<u16> = others.into_iter().map(|other| other.join().unwrap()).collect();
    assert!(others.iter().all(|status| matches!(status, 503 | 504)), "{others:?}");
    fleet.proxy.swallow(false);
}

/// Waits until the second host has a sandbox that was saved after two calls, while `before`, its
/// earlier owner with a third call, gets requests all the time: once another host answers, it must
/// not any more.
fn another_takes_it(fleet: &Fleet, before: &Host, sandbox: &Sandbox) {
    let (mut last, mut taken) = (3, false);
    until("another host has it", || {
        match sandbox.run(before) {
            RunResult::Count(count) => {
                assert!(!taken);
                assert_eq!(count, last + 1);
                last = count;
            }
            RunResult::Refused(status) => assert!(matches!(status, 503 | 504), "{status}"),
        }
        match sandbox.run(&fleet.hosts[1]) {
            RunResult::Count(count) => {
                taken = true;
                assert_eq!(count, 3);
            }
            RunResult::Refused(status) => assert!(matches!(status, 503 | 504), "{status}"),
        }
        taken
    });
    assert_eq!(sandbox.run(before), RunResult::Refused(503));
}

#[test]
fn a_host_whose_packets_are_dropped_runs_nothing_that_others_took() {
    let Some(apart) = Namespace::new() else { return };
    let Some(mut fleet) = Fleet::start() else { return };
    let nats = Proxy::at(&apart.ours, fleet.nats.address);
    let s3 = fleet.place.address().map(|s3| Proxy::at(&apart.ours, s3).address);
    fleet.add_apart("apart", &apart, nats.address, s3);
    fleet.settle(4);
    let sandbox = saved_on(&fleet, 3, 2);
    assert_eq!(sandbox.run_soon(&fleet.hosts[3]), RunResult::Count(3));
    apart.cut(nats.address.port(), true);
    another_takes_it(&fleet, &fleet.hosts[3], &sandbox);
    apart.cut(nats.address.port(), false);
    assert_eq!(sandbox.run_soon(&fleet.hosts[3]), RunResult::Count(4));
    assert_eq!(sandbox.run_soon(&fleet.hosts[2]), RunResult::Count(5));
}

#[test]
fn nothing_is_lost_with_nats_and_guests_are_served_on() {
    let Some(mut fleet) = Fleet::start() else { return };
    let sandboxes: Vec<Sandbox> = (0..6).map(|n| Sandbox::new(&fleet.hosts[n % 3])).collect();
    for sandbox in &sandboxes {
        assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(1));
    }
    fleet.nats.kill();
    let mut acknowledged = 1;
    until("hosts refuse what they cannot be sure of", || {
        let ran = sandboxes[0].run(&fleet.hosts[1]);
        acknowledged += u64::from(matches!(ran, RunResult::Count(_)));
        assert!(matches!(ran, RunResult::Count(_) | RunResult::Refused(503 | 504)), "{ran:?}");
        let (status, answer) = fleet.hosts[2].ask("POST", "/echo", "", b"on").unwrap();
        assert_eq!((status, answer.as_str()), (200, "on"));
        ran == RunResult::Refused(503)
    });
    fleet.nats.start_again();
    for (number, sandbox) in sandboxes.iter().enumerate() {
        let RunResult::Count(first) = sandbox.run_soon(&fleet.hosts[number % 3]) else { panic!() };
        // No host could take anything, so calls that were not saved are there as well, and calls
        // that were refused did not run later.
        assert_eq!(first, if number == 0 { acknowledged + 1 } else { 2 }, "{number}");
        assert_eq!(sandbox.run_soon(&fleet.hosts[(number + 1) % 3]), RunResult::Count(first + 1));
    }
}

#[test]
fn saves_of_killed_sandboxes_are_removed_and_other_sandboxes_continue() {
    let Some(mut fleet) = Fleet::start() else { return };
    let templates = fleet.place.names();
    let kept: Vec<Sandbox> = (0..3).map(|n| Sandbox::new(&fleet.hosts[n])).collect();
    let dead: Vec<Sandbox> = (0..3).map(|n| Sandbox::new(&fleet.hosts[n])).collect();
    for sandbox in kept.iter().chain(&dead) {
        assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(1));
    }
    for sandbox in &dead {
        assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(2));
    }
    for sandbox in kept.iter().chain(&dead) {
        sandbox.save(&fleet.hosts[1]);
    }
    for sandbox in &dead {
        assert_eq!(sandbox.ask_soon(&fleet.hosts[2], "DELETE", ""), 204);
    }
    let collect = |fleet: &Fleet| -> Value {
        serde_json::from_str(fleet.collect(true).unwrap().trim()).unwrap()
    };
    assert_eq!(collect(&fleet)["removed"], 0, "all of it is young");
    fleet.place.age();
    // Without the fleet's ledger everything would seem to have no name.
    let why = fleet.collect(false).unwrap_err();
    assert!(why.contains("named by `fleet-default`"), "{why}");
    let collected = collect(&fleet);
    assert!(collected["removed"].as_u64().unwrap() > 0, "{collected}");
    // Some are on the host that is about to die, and were never saved.
    let unsaved: Vec<Sandbox> = (0..6).map(|n| Sandbox::new(&fleet.hosts[n % 3])).collect();
    fleet.hosts[0].kill();
    for (n, sandbox) in kept.iter().enumerate() {
        assert_eq!(sandbox.run_soon(&fleet.hosts[1 + n % 2]), RunResult::Count(2), "{collected}");
    }
    for sandbox in &unsaved {
        assert!(matches!(sandbox.ask_soon(&fleet.hosts[2], "DELETE", ""), 204 | 404));
    }
    for sandbox in &kept {
        assert_eq!(sandbox.ask_soon(&fleet.hosts[1], "DELETE", ""), 204);
    }
    // Their saved states are unreferenced now; a new one is made from the template all the same.
    fleet.place.age();
    assert!(collect(&fleet)["removed"].as_u64().unwrap() > 0);
    let new = Sandbox::new(&fleet.hosts[1]);
    assert_eq!(new.run_soon(&fleet.hosts[2]), RunResult::Count(1));
    new.save(&fleet.hosts[2]);
    assert_eq!(new.run_soon(&fleet.hosts[1]), RunResult::Count(2));
    // After all of that, ledger and store have what is reachable: nothing but the templates.
    assert_eq!(new.ask_soon(&fleet.hosts[1], "DELETE", ""), 204);
    let backup = fleet.dir.path().join("backup").display().to_string();
    until("the ledger has no sandbox", || {
        let report = fleet.try_command(&["fleet", "backup", &backup], true).unwrap();
        let report: Value = serde_json::from_str(report.trim()).unwrap();
        report["sandboxes"] == 0 && report["unsaved"] == serde_json::json!([])
    });
    fleet.place.age();
    collect(&fleet);
    let left: Vec<_> = fleet.place.names().difference(&templates).cloned().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_sandbox_killed_during_a_call_is_removed_on_all_hosts() {
    let Some(fleet) = Fleet::start() else { return };
    // Saved, so it could be restored from there.
    let sandbox = saved(&fleet, 2);
    assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(3));
    let addr = fleet.hosts[0].addr;
    let calling = std::thread::spawn({
        let sandbox = sandbox.clone();
        move || sandbox.run_slowly_at(addr)
    });
    until("the call runs", || {
        let nodes = fleet.command(&["nodes"]);
        let mut nodes = nodes.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        nodes.any(|node| node["load"].as_u64() > Some(0))
    });
    assert_eq!(sandbox.ask_soon(&fleet.hosts[1], "DELETE", ""), 204);
    let during = [0, 1, 2, 0].map(|host: usize| sandbox.run(&fleet.hosts[host]));
    assert!(during.iter().all(|ran| matches!(ran, RunResult::Refused(502..=504))), "{during:?}");
    // The kill ended the call, so the slow code has no value, or its connection was broken off.
    if let Ok(ran) = calling.join() {
        assert!(matches!(ran, RunResult::Refused(_)), "the call was over before the kill: {ran:?}");
    }
    for host in &fleet.hosts {
        assert_eq!(sandbox.run_soon(host), RunResult::Refused(502));
        assert_eq!(sandbox.ask_soon(host, "GET", ""), 404);
    }
}

#[test]
fn a_snapshots_name_is_the_last_ones_that_was_given_it_on_all_hosts() {
    let Some(fleet) = Fleet::start() else { return };
    let sandbox = Sandbox::new(&fleet.hosts[0]);
    let key = "X-API-Key: key-of-acme\r\n";
    let ask = |host: usize, method: &str, path: &str, body: &str| {
        let mut said = (0, String::new());
        until("the control plane answers", || {
            said = fleet.hosts[host].ask(method, path, key, body.as_bytes()).unwrap_or_default();
            !matches!(said.0, 0 | 503 | 504)
        });
        said
    };
    let mut ids = Vec::new();
    for (host, calls) in [(0, 1), (1, 2)] {
        assert_eq!(sandbox.run_soon(&fleet.hosts[host]), RunResult::Count(calls));
        let path = format!("/sandboxes/{}/snapshots", sandbox.id());
        let (status, made) = ask(host, "POST", &path, r#"{"name": "kept"}"#);
        assert_eq!(status, 201, "{made}");
        let made: Value = serde_json::from_str(&made).unwrap();
        ids.push(made["snapshotID"].as_str().unwrap().to_owned());
    }
    let (_, listed) = ask(2, "GET", "/snapshots", "");
    let listed: Vec<Value> = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed.len(), 2, "{listed:?}");
    for one in &listed {
        let names = one["names"].as_array().unwrap();
        let last = one["snapshotID"] == ids[1].as_str();
        assert_eq!(names.len(), usize::from(last), "{listed:?}");
    }
    let (status, made) = ask(2, "POST", "/sandboxes", r#"{"templateID": "kept"}"#);
    assert_eq!(status, 201, "{made}");
}

#[test]
fn a_drained_host_leaves_everything_to_the_others() {
    let Some(mut fleet) = Fleet::start() else { return };
    let sandboxes: Vec<Sandbox> = (0..6).map(|n| Sandbox::new(&fleet.hosts[n % 3])).collect();
    for sandbox in &sandboxes {
        assert_eq!(sandbox.run_soon(&fleet.hosts[0]), RunResult::Count(1));
    }
    fleet.command(&["drain", "one"]);
    fleet.hosts[0].wait();
    for (number, sandbox) in sandboxes.iter().enumerate() {
        assert_eq!(sandbox.run_soon(&fleet.hosts[1 + number % 2]), RunResult::Count(2), "{number}");
        assert_eq!(sandbox.run_soon(&fleet.hosts[2 - number % 2]), RunResult::Count(3), "{number}");
    }
    let nodes = fleet.command(&["nodes"]);
    assert_eq!(nodes.lines().count(), 2, "{nodes}");
}
