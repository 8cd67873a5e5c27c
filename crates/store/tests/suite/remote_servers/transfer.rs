//! Push, pull, and reading in place.

use std::sync::Arc;
use std::time::Duration;

use afresh_pager::{FillStrategy, Options, Restore, SnapshotSource};
use afresh_store::remote::RemoteError;
use afresh_store::{Encoding, OpenError};
use afresh_sys::{PageRange, Reservation};

use super::local;
use super::servers::{KINDS, Kind, Server, retry};
use crate::support::{bytes, store};

#[test]
fn real_servers_take_and_give_snapshots() {
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let remote = server.remote(server.address, retry());
        assert!(remote.tags().unwrap().is_empty(), "{kind:?}");
        let dir = tempfile::tempdir().unwrap();
        // Larger than one part, and incompressible.
        let (here, snapshot, whole) = local(&dir.path().join("here"), 1, 5000);
        for encoding in [Encoding::Raw, Encoding::Zstd] {
            let mut last = None;
            let id =
                remote.push(&here, &snapshot, "v1", encoding, &mut |p| last = Some(p)).unwrap();
            let last = last.unwrap();
            assert_eq!(last.done, last.total);
            assert_eq!(remote.tags().unwrap().len(), 1);
            assert_eq!(remote.tags().unwrap()[0].id, id);
            for name in ["v1", &id.to_string()] {
                let lazy = remote.load(name).unwrap();
                assert_eq!(lazy.id(), id);
                assert!(bytes(&lazy) == whole);
                assert_eq!(lazy.state(), 1u32.to_le_bytes());
            }
            let there = store(&dir.path().join(format!("there-{encoding:?}")));
            let id = remote.pull(&there, "v1", "mine", Encoding::Raw, &mut |_| {}).unwrap();
            assert_eq!(id, snapshot.id());
            let pulled = there.load("mine").unwrap();
            pulled.verify().unwrap();
            assert!(bytes(&pulled) == whole);
        }
        let error = remote.load("no-such").unwrap_err();
        assert!(
            matches!(&error, RemoteError::Open(OpenError::NoSuchName { known, .. }) if *known == ["v1"]),
            "{error}"
        );
        let nobody = format!("sha256:{}", "0".repeat(64));
        assert!(remote.load(&nobody).unwrap_err().is_not_found());
    }
}

#[test]
fn blobs_that_a_server_has_are_not_sent_again() {
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let remote = server.remote(server.address, retry());
        let dir = tempfile::tempdir().unwrap();
        let (here, snapshot, _) = local(dir.path(), 1, 1000);
        remote.push(&here, &snapshot, "one", Encoding::Raw, &mut |_| {}).unwrap();
        let before = server.stored();
        remote.push(&here, &snapshot, "two", Encoding::Raw, &mut |_| {}).unwrap();
        let grown = server.stored() - before;
        assert!(before > 4_000_000 && grown < 10_000, "{before} bytes, then {grown} more");
        let names: Vec<_> = remote.tags().unwrap().into_iter().map(|tag| tag.name).collect();
        assert_eq!(names, ["one", "two"]);
    }
}

#[test]
fn a_name_that_a_registry_can_not_hold_is_refused_before_anything_is_sent() {
    let Some(server) = Server::start(Kind::Registry) else { return };
    let remote = server.remote(server.address, retry());
    let dir = tempfile::tempdir().unwrap();
    let (here, snapshot, _) = local(dir.path(), 1, 20);
    for name in ["a/b", "a:b", ".a", "", &"x".repeat(129), &snapshot.id().to_string()] {
        let error = remote.push(&here, &snapshot, name, Encoding::Raw, &mut |_| {}).unwrap_err();
        assert!(matches!(error, RemoteError::Name(_)), "{error}");
    }
    assert_eq!(server.stored(), 0);
}

#[test]
fn a_guest_runs_from_a_real_server_while_the_rest_is_on_the_network() {
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let remote = server.remote(server.address, retry());
        let dir = tempfile::tempdir().unwrap();
        let (here, snapshot, whole) = local(dir.path(), 3, 3000);
        remote.push(&here, &snapshot, "a", Encoding::Zstd, &mut |_| {}).unwrap();
        for strategy in [FillStrategy::Stream, FillStrategy::WorkingSet] {
            let memory = Arc::new(Reservation::aligned(3000, 2 << 20).unwrap());
            let source = Arc::new(SnapshotSource::new(remote.load("a").unwrap()));
            let range = PageRange::new(0, 3000);
            let restore =
                Restore::start(memory.clone(), range, source, &Options::with(strategy)).unwrap();
            let peek = |at: usize| {
                // SAFETY: inside the restored range.
                unsafe { memory.base().as_ptr().add(at).read_volatile() }
            };
            for page in [2999, 7, 1000, 40] {
                assert_eq!(peek(page * 4096 + 9), whole[page * 4096 + 9]);
            }
            restore.wait(Duration::from_secs(60)).unwrap();
            assert!((0..whole.len()).all(|at| peek(at) == whole[at]), "{kind:?} {strategy:?}");
        }
    }
}

const CHILD: &str = "AFRESH_TEST_READ_THROUGH_CACHE";

/// The child of [`two_processes_share_a_cache`]: reads all of it through the cache.
#[test]
fn a_process_that_reads_through_the_cache() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let words: Vec<_> = task.split('|').collect();
    let [url, cache, options @ ..] = &words[..] else { panic!("{task}") };
    let options: Vec<_> = options.iter().map(|o| o.split_once('=').unwrap()).collect();
    let remote =
        afresh_store::remote::Remote::open_with(url, retry(), &options).unwrap().with_cache(cache);
    let snapshot = remote.load("a").unwrap();
    println!("digest {}", afresh_store::Sha256::of(&bytes(&snapshot)));
}

#[test]
fn two_processes_share_a_cache() {
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let proxy = super::proxy::Proxy::before(server.address);
        let dir = tempfile::tempdir().unwrap();
        let (here, snapshot, whole) = local(&dir.path().join("here"), 5, 2000);
        let remote = server.remote(server.address, retry());
        remote.push(&here, &snapshot, "a", Encoding::Raw, &mut |_| {}).unwrap();
        let cache = dir.path().join("cache");
        let start = || {
            let (url, options) = server.url(proxy.address);
            let options = options.iter().map(|(key, value)| format!("|{key}={value}"));
            afresh_sys::test_command(
                "remote_servers::transfer::a_process_that_reads_through_the_cache",
            )
            .env(CHILD, format!("{url}|{}{}", cache.display(), options.collect::<String>()))
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
        };
        let digest = afresh_store::Sha256::of(&whole).to_string();
        let right = |child: std::process::Child| {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success() && text.contains(&digest), "{text}");
        };
        // Both at once, into an empty cache.
        let (one, two) = (start(), start());
        right(one);
        right(two);
        let cold = proxy.passed();
        assert!(cold > whole.len(), "{cold} bytes for the first two");
        right(start());
        let warm = proxy.passed() - cold;
        assert!(warm < 20_000, "{warm} bytes for a third process");
    }
}
