//! Transfers to real servers, an S3 gateway and a registry, that die at each of their steps.
//!
//! The directory remote of the other tests has further writers. Here each operation is alone, so
//! that all steps take minutes.

use std::fs;
use std::path::Path;

use afresh_store::remote::Remote;
use afresh_store::{Encoding, MemoryPages, Snapshot, Store};
use afresh_sys::crash;

use super::{ADDRESS, Matrix, Operation, ROUNDS, TRANSFERS, check_remote, push_first, remote};
use crate::remote_servers::servers::{Kind, Server};
use crate::support::{bytes, options, page_of};
use crate::turns::is_round;

/// Pages of a snapshot that is sent in parts.
const LARGE: u32 = 2200;
const SEED: u32 = 7;

/// A blob that is sent in parts.
const PUSH_PARTS: Operation = (
    "push parts",
    |store, _| {
        let large = store.load("large").unwrap();
        remote(store).push(store, &large, "large", Encoding::Raw, &mut |_| {}).unwrap();
    },
    ROUNDS,
);

fn content() -> MemoryPages {
    MemoryPages((0..LARGE).flat_map(|page| page_of(SEED * 100_000 + page)).collect())
}

/// Runs the operation in this process, which dies at step `at` if there are so many.
fn child(dir: &Path, operation: Operation, at: usize) -> ! {
    let store = Store::open(dir).unwrap();
    let open = store.load("a").unwrap();
    // A client looks its server up at its first request.
    remote(&store).tags().unwrap();
    crash::arm(at);
    operation.1(&store, &open);
    crash::disarm();
    std::process::exit(77);
}

/// Gives the store a separate remote on the server.
fn assign(store: &Store, server: &Server, name: &str) {
    let (url, options) = server.url(server.address);
    let url = url.replace("team/guest", name);
    let lines = options.iter().map(|(key, value)| format!("\n{key}={value}"));
    let beside = store.root().parent().unwrap();
    fs::write(beside.join(ADDRESS), url + &lines.collect::<String>()).unwrap();
    if server.kind == Kind::S3 {
        let folder = server.bucket().join(name);
        fs::create_dir_all(&folder).unwrap();
        std::os::unix::fs::symlink(folder, beside.join("remote")).unwrap();
    }
}

/// A number for the next remote, which has no objects yet.
fn next_name() -> String {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    format!("crash/guest-{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
}

fn save_large(store: &Store) {
    store.save("large", &content(), &options()).unwrap();
}

/// The next attempt of an operation that may have died succeeds.
fn try_again(store: &Store, operation: &str) {
    let open = store.load("a").unwrap();
    let again = |operation: &Operation| operation.1(store, &open);
    match operation {
        "push" | "push turns" | "pull" => {
            again(TRANSFERS.iter().find(|known| known.0 == operation).unwrap());
        }
        "push parts" => {
            again(&PUSH_PARTS);
            assert!(bytes(&remote(store).load("large").unwrap()) == content().0);
        }
        // Checked by an append and a collection.
        _ => return,
    }
    assert!(is_round(&remote(store).load("a").unwrap(), ROUNDS), "{operation}");
    if operation == "pull" {
        assert!(is_round(&store.load("pulled").unwrap(), ROUNDS), "{operation}");
    }
}

#[test]
fn acknowledged_snapshots_open_after_a_crash_at_any_step_of_a_transfer_to_s3() {
    let mut matrix = Matrix {
        operations: TRANSFERS.to_vec(),
        test: "crashes::servers::acknowledged_snapshots_open_after_a_crash_at_any_step_of_a_transfer_to_s3",
        child,
    };
    matrix.operations.push(PUSH_PARTS);
    matrix.be_child();
    let Some(server) = Server::start(Kind::S3) else { return };
    let first = |store: &Store| {
        assign(store, &server, &next_name());
        save_large(store);
        push_first(store);
    };
    let also = |store: &Store, operation: &str, done: bool| {
        check_remote(store, operation, done);
        try_again(store, operation);
    };
    matrix.run_alone(first, also);
}

/// The operations that a registry serves.
const OF_REGISTRIES: [&str; 2] = ["push", "pull"];

fn push_to_registry(store: &Store) {
    let (open, other) = (store.load("a").unwrap(), store.load("plain").unwrap());
    for (name, snapshot) in [("first", &other), ("first", &open), ("a", &open)] {
        send(&remote(store), store, snapshot, name);
    }
}

fn send(remote: &Remote, store: &Store, snapshot: &Snapshot, name: &str) {
    remote.push(store, snapshot, name, Encoding::Raw, &mut |_| {}).unwrap();
}

#[test]
fn acknowledged_snapshots_open_after_a_crash_at_any_step_of_a_transfer_to_a_registry() {
    let named = |name: &&str| *TRANSFERS.iter().find(|known| known.0 == *name).unwrap();
    let mut matrix = Matrix {
        operations: OF_REGISTRIES.iter().map(named).collect(),
        test: "crashes::servers::acknowledged_snapshots_open_after_a_crash_at_any_step_of_a_transfer_to_a_registry",
        child,
    };
    matrix.operations.push(PUSH_PARTS);
    matrix.be_child();
    let Some(server) = Server::start(Kind::Registry) else { return };
    let first = |store: &Store| {
        assign(store, &server, &next_name());
        save_large(store);
        push_to_registry(store);
    };
    let also = |store: &Store, operation: &str, _| {
        let remote = remote(store);
        for name in ["first", "a"] {
            assert!(is_round(&remote.load(name).unwrap(), ROUNDS), "{operation}: {name}");
        }
        for tag in remote.tags().unwrap() {
            remote.load(&tag.name).unwrap().verify().unwrap();
        }
        try_again(store, operation);
    };
    matrix.run_alone(first, also);
}
