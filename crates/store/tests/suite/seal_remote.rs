//! Signed and sealed snapshots on servers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::support::objects::{Server, ServerFault};
use crate::support::{PAGE, bytes, options, page_of, store};
use afresh_store::remote::{Remote, RemoteError, RetryPolicy};
use afresh_store::seal::{Access, SealKey, SigningKey};
use afresh_store::{Encoding, Limits, MemoryPages, OpenError, SealError, Store, archive};
use afresh_sys::PageRange;
use object_store::path::Path;

fn remote(server: &Arc<Server>) -> Remote {
    let retry = RetryPolicy {
        attempts: 3,
        timeout: Duration::from_secs(120),
        pause: Duration::from_millis(1),
        outage: Duration::ZERO,
    };
    Remote::with_objects(server.clone(), Path::from("team/guest"), retry).unwrap()
}

fn content() -> MemoryPages {
    MemoryPages((0..300).flat_map(page_of).collect())
}

/// A sealed and signed delta with a working set.
fn local(dir: &std::path::Path, key: &SealKey, sign: &SigningKey, encoding: Encoding) -> Store {
    let store = store(dir);
    let mut save = options();
    save.options.seal = Some(key.clone());
    save.options.encoding = encoding;
    let mut base = content();
    base.0[..7 * PAGE].fill(1);
    store.save("a", &base, &save).unwrap();
    save.options.parent = Some(store.load_with("a", &Access::new().with_key(key.clone())).unwrap());
    save.options.working_set = vec![PageRange::new(3, 4), PageRange::new(90, 30)];
    save.options.sign = Some(sign.clone());
    store.save("a", &content(), &save).unwrap();
    store
}

fn seal_error<T: std::fmt::Debug>(result: Result<T, RemoteError>) -> SealError {
    match result.unwrap_err() {
        RemoteError::Open(OpenError::Seal(error)) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn sealed_and_signed_snapshots_stay_so_on_the_way_there_and_back() {
    let (key, alice) = (SealKey::generate().unwrap(), SigningKey::generate().unwrap());
    let access = Access::new().trusting([alice.public()]).with_key(key.clone());
    for (kept, sent) in [
        (Encoding::Raw, Encoding::Raw),
        (Encoding::Raw, Encoding::Zstd),
        (Encoding::Zstd, Encoding::Raw),
    ] {
        let server = Server::new();
        let remote = remote(&server);
        let dir = tempfile::tempdir().unwrap();
        let from = local(&dir.path().join("from"), &key, &alice, kept);
        let snapshot = from.load_with("a", &access).unwrap();
        remote.push(&from, &snapshot, "b", sent, &mut |_| {}).unwrap();

        assert_eq!(seal_error(remote.load("b")), SealError::Locked);
        let mallory = SigningKey::generate().unwrap().public();
        let distrust = Access::new().trusting([mallory]).with_key(key.clone());
        assert!(matches!(seal_error(remote.load_with("b", &distrust)), SealError::Untrusted(_)));
        let in_place = remote.load_with("b", &access).unwrap();
        assert_eq!(in_place.layers()[0].encoding(), sent);
        assert!(bytes(&in_place) == content().0);
        let mut part = vec![0; 33 * PAGE];
        in_place.read(77, &mut part).unwrap();
        assert!(part == content().0[77 * PAGE..110 * PAGE]);
        let mut set = 0;
        in_place
            .read_working_set(|range, pages| {
                assert!(pages == &content().0[range.byte_start()..][..range.byte_len()]);
                set += range.len;
                Ok::<(), OpenError>(())
            })
            .unwrap();
        assert_eq!(set, 34);

        // No key is needed to carry it.
        let to = store(&dir.path().join("to"));
        remote.pull(&to, "b", "c", Encoding::Raw, &mut |_| {}).unwrap();
        assert!(bytes(&to.load_with("c", &access).unwrap()) == content().0);
        // Neither the stores nor the server, copied to a file as it is, hold a page.
        let file = dir.path().join("file");
        archive::export(&in_place, &file, None).unwrap();
        let canary = &page_of(9)[160..192];
        let mut files = vec![file];
        for store in [&from, &to] {
            let blobs = std::fs::read_dir(store.root().join("blobs/sha256")).unwrap();
            files.extend(blobs.map(|entry| entry.unwrap().path()));
        }
        assert!(files.len() > 10);
        for path in files {
            let stored = std::fs::read(&path).unwrap();
            assert!(!stored.windows(32).any(|part| part == canary), "{}", path.display());
        }
    }
}

#[test]
fn a_sealed_snapshot_takes_no_more_round_trips_than_an_open_one() {
    let (key, alice) = (SealKey::generate().unwrap(), SigningKey::generate().unwrap());
    let access = Access::new().trusting([alice.public()]).with_key(key.clone());
    let server = Server::new();
    let remote = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    let from = local(&dir.path().join("from"), &key, &alice, Encoding::Zstd);
    let snapshot = from.load_with("a", &access).unwrap();
    remote.push(&from, &snapshot, "sealed", Encoding::Zstd, &mut |_| {}).unwrap();
    let plain = store(&dir.path().join("plain"));
    let mut save = options();
    save.options.encoding = Encoding::Zstd;
    plain.save("a", &content(), &save).unwrap();
    let open = plain.load("a").unwrap();
    remote.push(&plain, &open, "open", Encoding::Zstd, &mut |_| {}).unwrap();
    let rounds = ["sealed", "open"].map(|name| {
        server.be(ServerFault::Slow(Duration::from_millis(2)));
        let access = if name == "sealed" { access.clone() } else { Access::new() };
        let snapshot = remote.load_with(name, &access).unwrap();
        // Scattered over the whole, at once.
        snapshot.read(0, &mut vec![0; 300 * PAGE]).unwrap();
        server.rounds.load(Ordering::Relaxed)
    });
    assert_eq!(rounds[0], rounds[1]);
}

#[test]
fn wrong_bytes_of_a_sealed_snapshot_are_an_error_and_never_memory() {
    let (key, alice) = (SealKey::generate().unwrap(), SigningKey::generate().unwrap());
    let access = Access::new().trusting([alice.public()]).with_key(key.clone());
    let server = Server::new();
    let remote = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    let from = local(&dir.path().join("from"), &key, &alice, Encoding::Raw);
    let snapshot = from.load_with("a", &access).unwrap();
    remote.push(&from, &snapshot, "a", Encoding::Raw, &mut |_| {}).unwrap();
    let cached = remote.with_cache(dir.path().join("cache"));
    for remote in [&remote, &cached] {
        server.be(ServerFault::Nothing);
        let opened = remote.load_with("a", &access).unwrap();
        server.be(ServerFault::Flip);
        assert!(opened.read(0, &mut vec![0; 300 * PAGE]).is_err());
        // And once the server has come to its senses, what it sent before is not believed.
        server.be(ServerFault::Nothing);
        assert!(bytes(&opened) == content().0);
    }
}

/// A remote may claim any length of a layer that only its key can check.
#[test]
fn sealed_layers_that_are_pulled_have_a_limit() {
    let (key, alice) = (SealKey::generate().unwrap(), SigningKey::generate().unwrap());
    let server = Server::new();
    let remote = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    let from = local(&dir.path().join("from"), &key, &alice, Encoding::Raw);
    let snapshot = from.load_with("a", &Access::new().with_key(key)).unwrap();
    remote.push(&from, &snapshot, "b", Encoding::Raw, &mut |_| {}).unwrap();
    let to = store(&dir.path().join("to"));
    let pull = |content| {
        let limits = Limits { content, index: 1000, ..Limits::default() };
        remote.pull_within(&limits, &to, "b", "b", Encoding::Raw, &mut |_| {})
    };
    let refused = pull(1000).unwrap_err();
    assert!(
        matches!(refused, RemoteError::Open(OpenError::Limit { name: "content", .. })),
        "{refused}"
    );
    assert!(to.list().unwrap().is_empty());
    assert_eq!(pull(8 << 20).unwrap(), snapshot.id());
}
