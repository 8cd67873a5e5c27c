//! Blobs that have no name yet: `gc` keeps them, and nothing waits for their writer.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use afresh_store::remote::{Remote, RetryPolicy};
use afresh_store::{Encoding, Store};

use crate::support::objects::{Server, ServerFault};
use crate::support::{bytes, memory, options, store};

/// A store and a remote that holds a snapshot of three layers.
fn pushed(dir: &Path, server: &Arc<Server>) -> (Store, Remote) {
    let retry = RetryPolicy { timeout: Duration::from_secs(120), ..RetryPolicy::default() };
    let path = object_store::path::Path::from("guest");
    let remote = Remote::with_objects(server.clone(), path, retry).unwrap();
    let from = store(&dir.join("from"));
    for seeds in [&[1, 2, 3][..], &[1, 5, 3], &[1, 5, 6]] {
        let mut save = options();
        save.options.parent = from.load("a").ok();
        from.save("a", &memory(seeds), &save).unwrap();
    }
    remote.push(&from, &from.load("a").unwrap(), "a", Encoding::Raw, &mut |_| {}).unwrap();
    (store(&dir.join("to")), remote)
}

#[test]
fn saves_and_collections_wait_for_no_transfer() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new();
    let (to, remote) = pushed(dir.path(), &server);
    server.be(ServerFault::Nothing);
    let whole = store(&dir.path().join("whole"));
    remote.pull(&whole, "a", "a", Encoding::Raw, &mut |_| {}).unwrap();
    let requests = server.requests.load(Ordering::Relaxed);
    // The server stops answering before each request that a pull makes.
    for after in 0..requests {
        server.be(ServerFault::Held { after });
        let (local, from) = (to.clone(), remote.clone());
        let pull = std::thread::spawn(move || {
            from.pull(&local, "a", "pulled", Encoding::Raw, &mut |_| {}).unwrap();
        });
        while server.requests.load(Ordering::Relaxed) <= after {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (done, finished) = channel();
        let local = to.clone();
        let beside = std::thread::spawn(move || {
            local.save("beside", &memory(&[9, after as u8]), &options()).unwrap();
            local.gc().unwrap();
            local.save("beside", &memory(&[9, 1, after as u8]), &options()).unwrap();
            done.send(local.gc().unwrap()).unwrap();
        });
        let finished = finished.recv_timeout(Duration::from_secs(60));
        server.be(ServerFault::Nothing);
        pull.join().unwrap();
        beside.join().unwrap();
        let collected = finished.expect("a save or a collection waits for the server");
        assert!(collected.kept >= 3);
        assert_eq!(bytes(&to.load("pulled").unwrap()), memory(&[1, 5, 6]).0);
        // The next one begins without blobs of this one.
        to.tag("pulled", None).unwrap();
        to.gc().unwrap();
    }
    assert!(requests >= 5, "{requests}");
}

#[test]
fn a_collection_removes_what_dead_writers_left() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1, 2]), &options()).unwrap();
    let id = "0123456789abcdef0123456789abcdef";
    let blob = "5".repeat(64);
    let marker = dir.path().join(format!(".staging-{id}"));
    std::fs::write(&marker, format!("{blob}\n")).unwrap();
    let blobs = dir.path().join("blobs/sha256");
    let temporary = blobs.join(format!(".tmp-{id}-abc"));
    std::fs::write(&temporary, b"part").unwrap();
    std::fs::write(blobs.join(&blob), b"blob").unwrap();
    // A living writer.
    let lock = std::fs::OpenOptions::new().read(true).write(true).open(&marker).unwrap();
    lock.lock().unwrap();
    assert_eq!(store.gc().unwrap().files, 0);
    // It dies.
    drop(lock);
    assert_eq!(store.gc().unwrap().files, 2);
    assert!(!marker.exists() && !temporary.exists() && !blobs.join(&blob).exists());
    store.load("a").unwrap().verify().unwrap();
    store.save("a", &memory(&[1, 3]), &options()).unwrap();
    let left = std::fs::read_dir(dir.path()).unwrap().flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with(".staging-")), "{left:?}");
}

#[test]
fn staged_blobs_that_are_collected_are_noticed() {
    afresh_sys::planted::must_be_caught(
        &[afresh_sys::planted::Bug::Staged],
        &["staging::saves_and_collections_wait_for_no_transfer"],
    );
}
