//! Connections that break, answers that are cut or wrong, servers that die: an error that names the
//! cause, never wrong bytes, never a hang beyond the time limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_pager::{FillStrategy, Options, Restore, SnapshotSource};
use afresh_store::Encoding;
use afresh_store::remote::{Remote, RemoteError, RetryPolicy};
use afresh_sys::{PageRange, Reservation};

use super::proxy::{Fault, Proxy};
use super::servers::{KINDS, Server, retry};
use super::{content, local};
use crate::support::{bytes, options, store};

/// Opens and reads everything, or says what went wrong.
fn read(remote: &Remote) -> Result<Vec<u8>, String> {
    let snapshot = remote.load("a").map_err(|e| e.to_string())?;
    let mut out = vec![0; snapshot.pages() * 4096];
    snapshot.read(0, &mut out).map_err(|e| e.to_string())?;
    Ok(out)
}

#[test]
fn broken_and_cut_connections_are_tried_again_and_named_when_that_is_in_vain() {
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let proxy = Proxy::before(server.address);
        let dir = tempfile::tempdir().unwrap();
        let (here, snapshot, whole) = local(dir.path(), 1, 1500);
        let direct = server.remote(server.address, retry());
        direct.push(&here, &snapshot, "a", Encoding::Raw, &mut |_| {}).unwrap();
        for after in [0, 150, 1000, 30_000, 400_000] {
            for fault in [Fault::Reset { after }, Fault::Truncate { after }] {
                // A new one each time, which has no connections yet.
                let remote = server.remote(proxy.address, retry());
                proxy.be(fault, 2);
                assert!(read(&remote).unwrap() == whole, "{kind:?} {fault:?}");
                assert_eq!(proxy.left(), 0, "{kind:?} {fault:?} did not happen");
                let remote = server.remote(proxy.address, retry());
                proxy.be(fault, usize::MAX);
                let start = Instant::now();
                let error = read(&remote).unwrap_err();
                assert!(start.elapsed() < Duration::from_secs(240), "{:?}", start.elapsed());
                let cause = ["reset", "closed", "end of file", "error sending", "instead of"]
                    .iter()
                    .any(|word| error.contains(word));
                assert!(cause, "{kind:?} {fault:?}: {error}");
                proxy.be(Fault::Nothing, 0);
            }
        }
    }
}

#[test]
fn a_push_continues_after_broken_connections() {
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let proxy = Proxy::before(server.address);
        let dir = tempfile::tempdir().unwrap();
        // Three parts.
        let (here, snapshot, whole) = local(dir.path(), 1, 5000);
        for (name, after) in [("a", 0), ("b", 100), ("c", 700)] {
            let fault = Fault::Reset { after };
            let remote = server.remote(proxy.address, retry());
            proxy.be(fault, 2);
            remote.push(&here, &snapshot, name, Encoding::Raw, &mut |_| {}).unwrap();
            assert_eq!(proxy.left(), 0, "{kind:?} {fault:?} did not happen");
            proxy.be(Fault::Nothing, 0);
            assert!(bytes(&remote.load(name).unwrap()) == whole, "{kind:?} {fault:?}");
        }
    }
}

#[test]
fn wrong_bytes_on_the_way_are_noticed_and_asked_for_again() {
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let proxy = Proxy::before(server.address);
        let dir = tempfile::tempdir().unwrap();
        let (here, snapshot, whole) = local(&dir.path().join("here"), 1, 1500);
        let remote = server.remote(proxy.address, retry());
        for encoding in [Encoding::Raw, Encoding::Zstd] {
            remote.push(&here, &snapshot, "a", encoding, &mut |_| {}).unwrap();
            let opened = remote.load("a").unwrap();
            let mut out = vec![0; whole.len()];
            proxy.be(Fault::Flip, 1);
            opened.read(0, &mut out).unwrap();
            assert!(out == whole && proxy.left() == 0);
            proxy.be(Fault::Flip, usize::MAX);
            let error = opened.read(0, &mut out).unwrap_err().to_string();
            assert!(error.contains("match") || error.contains("decompress"), "{error}");
            let there = store(&dir.path().join(format!("there-{encoding:?}")));
            let error = remote.pull(&there, "a", "a", encoding, &mut |_| {}).unwrap_err();
            assert!(error.to_string().contains("digest"), "{error}");
            assert!(there.tags().unwrap().is_empty());
            proxy.be(Fault::Nothing, 0);
            assert!(bytes(&opened) == whole);
        }
    }
}

#[test]
fn a_silent_server_is_an_error_within_its_time_limit() {
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let proxy = Proxy::before(server.address);
        let dir = tempfile::tempdir().unwrap();
        let (here, snapshot, _) = local(dir.path(), 1, 700);
        let short = RetryPolicy {
            attempts: 2,
            timeout: Duration::from_millis(700),
            pause: Duration::from_millis(10),
            outage: Duration::ZERO,
        };
        let remote = server.remote(proxy.address, short);
        let direct = server.remote(server.address, retry());
        direct.push(&here, &snapshot, "a", Encoding::Raw, &mut |_| {}).unwrap();
        // A busy server may need longer than that.
        let opened = (0..60).find_map(|_| remote.load("a").ok()).expect("it is loaded in time");
        proxy.be(Fault::Silence, usize::MAX);
        let start = Instant::now();
        let error = remote.load("a").unwrap_err();
        assert!(matches!(error, RemoteError::Timeout { .. }), "{error}");
        let mut out = vec![0; opened.pages() * 4096];
        let error = opened.read(0, &mut out).unwrap_err().to_string();
        assert!(error.contains("no answer within"), "{error}");
        let error = remote.push(&here, &snapshot, "b", Encoding::Raw, &mut |_| {}).unwrap_err();
        assert!(matches!(error, RemoteError::Timeout { .. }), "{error}");
        assert!(start.elapsed() < Duration::from_secs(240), "{:?}", start.elapsed());
    }
}

#[test]
fn a_server_killed_midway_is_an_error_and_another_try_completes() {
    for kind in KINDS {
        let Some(mut server) = Server::start(kind) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let (here, new, whole) = local(&dir.path().join("here"), 1, 5000);
        here.save("old", &afresh_store::MemoryPages(content(9, 30)), &options()).unwrap();
        let old = here.load("old").unwrap();
        let remote = server.remote(server.address, retry());
        remote.push(&here, &old, "a", Encoding::Raw, &mut |_| {}).unwrap();

        // While it is written to.
        let mut alive = true;
        let result = remote.push(&here, &new, "a", Encoding::Raw, &mut |_| {
            if std::mem::take(&mut alive) {
                server.kill();
            }
        });
        refused(&result.unwrap_err().to_string());
        server.start_again();
        assert!(bytes(&remote.load("a").unwrap()) == content(9, 30));
        remote.push(&here, &new, "a", Encoding::Raw, &mut |_| {}).unwrap();

        // While it is read from, as a whole.
        let there = store(&dir.path().join("there"));
        there.save("a", &afresh_store::MemoryPages(content(9, 30)), &options()).unwrap();
        let mut alive = true;
        let result = remote.pull(&there, "a", "a", Encoding::Raw, &mut |_| {
            if std::mem::take(&mut alive) {
                server.kill();
            }
        });
        refused(&result.unwrap_err().to_string());
        assert!(bytes(&there.load("a").unwrap()) == content(9, 30));
        server.start_again();
        remote.pull(&there, "a", "a", Encoding::Raw, &mut |_| {}).unwrap();
        assert!(bytes(&there.load("a").unwrap()) == whole);

        // While it is read from in place.
        let opened = remote.load("a").unwrap();
        let mut out = vec![0; 4096];
        opened.read(100, &mut out).unwrap();
        let memory = Arc::new(Reservation::aligned(5000, 2 << 20).unwrap());
        let source = Arc::new(SnapshotSource::new(opened.clone()));
        let mut lazily = Options::with(FillStrategy::Stream);
        lazily.background = false;
        let restore =
            Restore::start(memory.clone(), PageRange::new(0, 5000), source, &lazily).unwrap();
        restore.resolve(PageRange::new(200, 10)).unwrap();
        server.kill();
        let start = Instant::now();
        refused(&restore.resolve(PageRange::new(3000, 10)).unwrap_err().to_string());
        drop(restore);
        let error = opened.read(4000, &mut out).unwrap_err().to_string();
        refused(&error);
        refused(&remote.load("a").unwrap_err().to_string());
        assert!(start.elapsed() < Duration::from_secs(240), "{:?}", start.elapsed());
        server.start_again();
        assert!(bytes(&opened) == whole);
    }
}

/// The message must name what happened.
fn refused(error: &str) {
    let words = ["refused", "reset", "closed", "end of file", "broken pipe", "before message"];
    assert!(words.iter().any(|word| error.to_lowercase().contains(word)), "{error}");
}
