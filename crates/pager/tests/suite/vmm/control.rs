//! Requests of control clients, with VMMs in other processes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use afresh_pager::vmm::{
    ControlClient, ControlServer, EndpointOptions, Listener, Snapshots, VmmHost,
};
use afresh_store::Store;
use afresh_sys::PAGE_SIZE;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use serde_json::json;

use super::bench::{Bench, Names, TEST_TIMEOUT, byte_of, content};
use super::client::PAGES;
use super::process::VmmProcess;

#[test]
fn a_vmm_shows_what_it_touched_and_its_working_set_is_stored() {
    let bench = Bench::new();
    let Some(mut vmm) = bench.vmm("rec", json!({ "record": true })) else { return };
    for page in [7, 3, 150, 151, 299] {
        assert_eq!(vmm.peek(page), byte_of(page));
    }
    vmm.ask("poke 150 9").unwrap();
    vmm.ask("discard 3 1").unwrap();
    bench.until("rec", |stats| stats["removed"] == 1);
    let stats = bench.stats("rec.1");
    assert_eq!((&stats["state"], &stats["missing"]), (&json!("filling"), &json!(PAGES - 5)));
    assert_eq!(stats["faults"], 5);
    let touched = bench.request(json!({ "request": "touched", "vm": "rec.1" }));
    assert_eq!(touched["read"], json!([[3, 1], [7, 1], [150, 2], [299, 1]]));
    assert_eq!(touched["written"], json!([[3, 1], [150, 1]]));
    assert_eq!(touched["removed"], json!([[3, 1]]));
    assert_eq!(touched["exact"], true);
    let recorded =
        bench.request(json!({ "request": "record", "vm": "rec", "to": "warm", "id": 3 }));
    assert_eq!((&recorded["pages"], &recorded["id"]), (&json!(5), &json!(3)));
    let warm = Store::open(bench.path("store")).unwrap().load("warm").unwrap();
    let set: Vec<usize> = warm.working_set().iter().flat_map(|r| r.start..r.end()).collect();
    assert_eq!(set, [3, 7, 150, 151, 299]);
    // Pages that are filled ahead end the recording.
    let left = bench.request(json!({
        "request": "prefetch", "vm": "rec", "pages": [[10, 5], [290, 10]],
    }));
    assert!(left["missing"].as_u64().unwrap() <= (PAGES - 5) as u64);
    bench.until("rec", |stats| stats["missing"] == PAGES - 5 - 14);
    let error = bench.refused(json!({ "request": "record", "vm": "rec", "to": "warm" }));
    assert!(error.contains("serve it with `record`"), "{error}");
    // Another VMM, in the same process, of another snapshot.
    let Some(mut other) = bench.vmm("other", json!({ "snapshot": "warm" })) else { return };
    assert_eq!(other.peek(299), byte_of(299));
    let list = bench.request(json!({ "request": "list" }));
    assert_eq!(list["vms"], json!(["other.1", "rec.1"]));
    assert_eq!(list["endpoints"][0]["snapshot"], "warm");
}

#[test]
fn a_paused_vmm_is_saved_and_restored_byte_for_byte() {
    let bench = Bench::new();
    for how in [json!({}), json!({ "on_demand": true, "window": 1 })] {
        let Some(mut vmm) = bench.vmm("vm", how.clone()) else { return };
        vmm.ask("poke 20 7").unwrap();
        vmm.ask("poke 4 8").unwrap();
        vmm.ask("poke 299 1").unwrap();
        assert_eq!(vmm.peek(50), byte_of(50));
        vmm.ask("discard 50 2").unwrap();
        vmm.ask("poke 51 3").unwrap();
        std::fs::write(bench.path("vmstate"), "registers").unwrap();
        let saved = bench.request(json!({
            "request": "snapshot", "vm": "vm", "to": "next", "state": bench.path("vmstate"),
        }));
        let saved_memory = bench.memory("next");
        let memory = vmm.dump(&bench.path("dump"));
        assert!(memory == saved_memory, "{how}");
        assert_eq!(memory[50 * PAGE_SIZE], 0);
        let next = Store::open(bench.path("store")).unwrap().load("next").unwrap();
        assert_eq!((next.state(), &*next.guest().module), (&b"registers"[..], "kernel"));
        assert_eq!(next.layers().len(), 2);
        // Four pages with content, and one that is zero.
        assert!(saved["written_bytes"].as_u64().unwrap() < 12 * PAGE_SIZE as u64, "{saved}");
        // The clone of a later endpoint finds it all.
        let Some(mut clone) = bench.vmm("clone", json!({ "snapshot": "next" })) else { return };
        assert!(clone.dump(&bench.path("dump")) == saved_memory);
        bench.request(json!({ "request": "remove", "name": "clone" }));
        bench.request(json!({ "request": "remove", "name": "vm" }));
        drop((vmm, clone));
        for _ in 0..2 {
            bench.events.recv_timeout(TEST_TIMEOUT).unwrap();
        }
    }
}

#[test]
fn a_detached_vmm_needs_the_pager_no_more_and_can_still_be_saved() {
    let bench = Bench::new();
    let Some(mut vmm) = bench.vmm("vm", json!({ "on_demand": true })) else { return };
    vmm.ask("poke 9 77").unwrap();
    vmm.ask("discard 120 3").unwrap();
    bench.request(json!({ "request": "detach", "vm": "vm" }));
    assert_eq!(bench.stats("vm")["state"], "detached");
    let error = bench.refused(json!({ "request": "prefetch", "vm": "vm" }));
    assert!(error.contains("is detached"), "{error}");
    vmm.ask("poke 10 78").unwrap();
    vmm.ask("discard 200 1").unwrap();
    bench.request(json!({ "request": "snapshot", "vm": "vm", "to": "next" }));
    let saved = bench.memory("next");
    drop(bench);
    let dir = tempfile::tempdir().unwrap();
    let memory = vmm.dump(&dir.path().join("dump"));
    assert!(memory == saved);
    let mut expected = content();
    expected[9 * PAGE_SIZE..][..99].fill(77);
    expected[10 * PAGE_SIZE..][..99].fill(78);
    expected[120 * PAGE_SIZE..123 * PAGE_SIZE].fill(0);
    expected[200 * PAGE_SIZE..201 * PAGE_SIZE].fill(0);
    assert!(memory == expected);
}

/// A program of another user could have its secrets there.
#[test]
fn the_memory_of_a_program_that_a_detached_vmm_executes_is_not_read() {
    let bench = Bench::new();
    let Some(mut vmm) = bench.vmm("vm", json!({ "on_demand": true })) else { return };
    bench.request(json!({ "request": "detach", "vm": "vm" }));
    bench.request(json!({ "request": "snapshot", "vm": "vm", "to": "next" }));
    assert_eq!(vmm.ask("exec").as_deref(), Some("executed"));
    for request in [
        json!({ "request": "snapshot", "vm": "vm", "to": "next" }),
        json!({ "request": "touched", "vm": "vm" }),
    ] {
        let refused = bench.refused(request);
        assert!(refused.contains("the memory of the VMM"), "{refused}");
    }
    assert!(bench.memory("next") == content());
}

#[test]
fn mappings_that_are_moved_or_released_are_followed() {
    let bench = Bench::new();
    let Some(mut vmm) = bench.vmm("vm", json!({ "on_demand": true, "window": 1 })) else { return };
    vmm.ask("unmap 90 10").unwrap();
    // Page 100 of the source, and following, are the second mapping.
    let byte: u8 = vmm.ask("move 33").unwrap().parse().unwrap();
    assert_eq!(byte, byte_of(133));
    bench.request(json!({ "request": "snapshot", "vm": "vm", "to": "next" }));
    let mut expected = content();
    expected[90 * PAGE_SIZE..100 * PAGE_SIZE].fill(0);
    assert!(bench.memory("next") == expected);
    assert_eq!(vmm.peek(3), byte_of(3));
    bench.request(json!({ "request": "detach", "vm": "vm" }));
}

#[test]
fn hostile_clients_get_errors_and_harm_no_vmm() {
    let bench = Bench::new();
    let Some(mut vmm) = bench.vmm("vm", json!({})) else { return };
    for (request, word) in [
        (json!({ "request": "stats", "vm": "other" }), "no VMM is called other; there are: vm.1"),
        (json!({ "request": "detach", "vm": "" }), "no VMM is called"),
        (json!({ "request": "prefetch", "vm": "vm", "pages": [[299, 2]] }), "not all in the"),
        (json!({ "request": "snapshot", "vm": "vm", "to": "n", "state": "/dev/zero" }), "regular"),
        (
            json!({ "request": "add", "name": "a/b", "snapshot": "base", "socket": "s" }),
            "cannot be called",
        ),
        (
            json!({ "request": "add", "name": "vm", "snapshot": "base", "socket": "s" }),
            "there is an endpoint called vm",
        ),
        (json!({ "request": "add", "name": "b", "snapshot": "none", "socket": "s" }), "none"),
        (json!({ "request": "remove", "name": "b" }), "no endpoint is called b; there are: vm"),
    ] {
        let error = bench.refused(request.clone());
        assert!(error.contains(word), "{request}: {error}");
    }
    let raw = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(bench.path("control")).unwrap();
        // The server may disconnect before it has read everything.
        let _ = stream.write_all(bytes);
        let mut answer = String::new();
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_string(&mut answer);
        answer
    };
    assert!(raw(b"\xff\xfe\n").contains("JSON object"));
    let two = raw(b"{\"request\":\"list\"}\n{\n");
    assert!(two.lines().count() == 2 && two.contains("\"ok\":true"), "{two}");
    assert!(!raw(&[b'['; 200 << 10]).contains("\"ok\":true"));
    let clients: Vec<UnixStream> =
        (0..16).map(|_| UnixStream::connect(bench.path("control")).unwrap()).collect();
    let started = Instant::now();
    while !raw(b"").contains("16 clients") {
        assert!(started.elapsed() < TEST_TIMEOUT);
    }
    drop(clients);
    assert!(vmm.dump(&bench.path("dump")) == content());
}

/// An endpoint is closed while its VMM runs, and another one of the same name is opened.
#[test]
fn vmms_of_two_endpoints_with_one_name_are_told_apart() {
    let bench = Bench::new();
    let Some(mut first) = bench.vmm("vm", json!({})) else { return };
    bench.until("vm", |stats| stats["state"] == "filled");
    bench.request(json!({ "request": "remove", "name": "vm" }));
    let on_demand = json!({ "on_demand": true, "window": 1 });
    let Some(mut second) = bench.vmm("vm", on_demand) else { return };
    while bench.host.vms().len() < 2 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let list = bench.request(json!({ "request": "list" }));
    assert_eq!(list["vms"], json!(["vm.1", "vm.2"]));
    assert_eq!(second.peek(3), byte_of(3));
    bench.until("vm.2", |stats| stats["filled"] == 1);
    assert_eq!(bench.stats("vm.1")["filled"], PAGES);
    // Counts of an endpoint are those of its VMMs only.
    let filled = || bench.host.endpoints()[0].totals.served.pages;
    assert_eq!(filled(), 1);
    assert_eq!(first.peek(4), byte_of(4));
    drop(first);
    while bench.host.vms().len() > 1 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(bench.request(json!({ "request": "list" }))["vms"], json!(["vm.2"]));
    assert_eq!(filled(), 1);
    assert_eq!(second.peek(5), byte_of(5));
    assert_eq!(filled(), 2);
}

#[test]
fn a_vmm_beyond_its_budget_is_ended_and_another_is_not() {
    let bench = Bench::new();
    let Some(mut vmm) = bench.vmm("vm", json!({})) else { return };
    let mut small = EndpointOptions::new("small", "base", bench.path("small"));
    small.budget = Some(100);
    let source = Names(bench.path("store")).open("base").unwrap();
    bench.host.open_endpoint(small, source).unwrap();
    let mut refused = VmmProcess::start(&bench.path("small")).unwrap();
    let refusal = |event: &String| event.contains("raise the budget");
    // The connection of the other one is an event as well.
    let event = bench.events.iter().find(refusal).unwrap();
    assert!(event.contains("small.1"), "{event}");
    assert_eq!(refused.wait().signal(), Some(libc::SIGBUS));
    assert!(vmm.dump(&bench.path("dump")) == content());
}

#[test]
fn a_client_that_cannot_be_accepted_is_reported_and_later_ones_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    // It does not listen yet, so `accept` fails, as it does without descriptors.
    let listener = Listener::of_socket(socket.try_clone().unwrap().into()).unwrap();
    let (sender, events) = std::sync::mpsc::channel();
    let host = VmmHost::new(None, move |event| {
        let _ = sender.send(format!("{event:?}"));
    });
    let server = ControlServer::new(listener, host, Names(dir.path().join("store")));
    let over = AtomicBool::new(false);
    let (event, answer) = std::thread::scope(|scope| {
        scope.spawn(|| server.serve(&over));
        let event = events.recv_timeout(TEST_TIMEOUT);
        let listens = listen(&socket, 4);
        let client = listens.map_err(Into::into).and_then(|()| ControlClient::connect(&path));
        let answer = client.and_then(|mut client| client.request(&json!({ "request": "list" })));
        over.store(true, Ordering::Release);
        (event, answer)
    });
    assert!(event.unwrap().contains("ClientFailed"));
    assert_eq!(answer.unwrap()["vms"], json!([]));
}

#[test]
fn lists_of_pages_are_charged_to_the_budget_of_the_endpoint() {
    let bench = Bench::new();
    let mut endpoint = EndpointOptions::new("vm", "base", bench.path("vm"));
    (endpoint.record, endpoint.budget) = (true, Some(PAGES * 4 + 4096));
    bench.host.open_endpoint(endpoint, Names(bench.path("store")).open("base").unwrap()).unwrap();
    let Some(mut vmm) = VmmProcess::start(&bench.path("vm")) else { return };
    assert_eq!(vmm.peek(0), byte_of(0));
    let touched = json!({ "request": "touched", "vm": "vm" });
    let save = json!({ "request": "snapshot", "vm": "vm", "to": "next" });
    assert_eq!(bench.request(touched.clone())["read"], json!([[0, 1]]));
    for page in (2..PAGES).step_by(2) {
        assert_eq!(vmm.peek(page), byte_of(page));
    }
    for request in [touched, save] {
        let error = bench.refused(request);
        assert!(error.contains("raise the budget of the endpoint"), "{error}");
    }
    assert_eq!(bench.host.endpoints()[0].used, PAGES * 4);
    assert_eq!(vmm.peek(299), byte_of(299));
}

#[test]
fn memory_that_the_peer_does_not_have_is_not_saved() {
    let bench = Bench::new();
    let endpoint = EndpointOptions::new("vm", "base", bench.path("vm"));
    bench.host.open_endpoint(endpoint, Names(bench.path("store")).open("base").unwrap()).unwrap();
    // A process connects, and its child hands over its own memory.
    let Some(mut vmm) = VmmProcess::start_behind(&bench.path("vm")) else { return };
    assert_eq!(vmm.peek(3), byte_of(3));
    for request in ["snapshot", "detach", "snapshot"] {
        let mut request = json!({ "request": request, "vm": "vm", "to": "next" });
        if request["request"] == "detach" {
            request.as_object_mut().unwrap().remove("to");
            bench.request(request);
            continue;
        }
        let error = bench.refused(request);
        let refused = ["the VMM itself must connect", "Bad address"];
        assert!(refused.iter().any(|word| error.contains(word)), "{error}");
    }
    assert!(vmm.dump(&bench.path("dump")) == content());
}
