//! Remotes, and servers that misbehave.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::support::objects::{Server, ServerFault};
use crate::support::{PAGE, bytes, memory, options, page_of, store};
use afresh_pager::{FillStrategy, Options, Restore, SnapshotSource};
use afresh_store::remote::{Remote, RemoteError, ReplacedName, RetryPolicy, trim_cache};
use afresh_store::{Encoding, OpenError, Snapshot, Store};
use afresh_sys::{PageRange, Reservation};
use object_store::path::Path;

fn remote(server: &Arc<Server>) -> Remote {
    remote_within(server, Duration::from_secs(120))
}

/// A remote whose requests have this time limit.
fn remote_within(server: &Arc<Server>, timeout: Duration) -> Remote {
    let retry = RetryPolicy {
        attempts: 3,
        timeout,
        pause: Duration::from_millis(1),
        outage: Duration::ZERO,
    };
    Remote::with_objects(server.clone(), Path::from("team/guest"), retry).unwrap()
}

const SEEDS: [u8; 40] = {
    let mut seeds = [0; 40];
    let mut n = 0;
    while n < 40 {
        seeds[n] = (n % 31) as u8;
        n += 1;
    }
    seeds
};

/// A local store with a base and a delta with a working set.
fn local(dir: &std::path::Path) -> (Store, Snapshot) {
    let store = store(dir);
    store.save("a", &memory(&SEEDS[..20]), &options()).unwrap();
    let mut save = options();
    save.options.parent = Some(store.load("a").unwrap());
    save.options.working_set = vec![PageRange::new(3, 4)];
    store.save("a", &memory(&SEEDS), &save).unwrap();
    let snapshot = store.load("a").unwrap();
    (store, snapshot)
}

fn push(remote: &Remote, from: &(Store, Snapshot), encoding: Encoding) -> Result<(), RemoteError> {
    remote.push(&from.0, &from.1, "a", encoding, &mut |_| {}).map(drop)
}

#[test]
fn pushed_contents_are_pulled_and_read_in_place() {
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let server = Server::new();
        let remote = remote(&server);
        let dir = tempfile::tempdir().unwrap();
        let from = local(dir.path());
        let mut seen = Vec::new();
        remote.push(&from.0, &from.1, "a", encoding, &mut |p| seen.push(p)).unwrap();
        let last = seen.last().unwrap();
        assert_eq!(last.done, last.total);
        assert_eq!(remote.tags().unwrap().len(), 1);

        let lazy = remote.load("a").unwrap();
        assert_eq!(bytes(&lazy), memory(&SEEDS).0);
        assert_eq!(lazy.state(), b"registers");
        assert_eq!(lazy.working_set(), [PageRange::new(3, 4)]);

        let other = tempfile::tempdir().unwrap();
        let to = store(other.path());
        let id = remote.pull(&to, "a", "mine", Encoding::Raw, &mut |_| {}).unwrap();
        // Raw layers have one encoding, so the snapshot is the same one that was pushed.
        assert_eq!(id, from.1.id());
        assert_eq!(bytes(&to.load("mine").unwrap()), memory(&SEEDS).0);
    }
}

#[test]
fn a_second_push_sends_no_layer_again() {
    let server = Server::new();
    let remote = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    let from = local(dir.path());
    push(&remote, &from, Encoding::Raw).unwrap();
    server.be(ServerFault::Nothing);
    push(&remote, &from, Encoding::Raw).unwrap();
    // Four heads; the manifest before collections are known; manifest and layout; the index, which
    // is read and stays. Lists are not counted: there is one, for marks of collectors.
    assert_eq!(server.requests.load(Ordering::Relaxed), 4 + 1 + 2 + 1);
}

#[test]
fn a_reset_connection_is_tried_again_and_a_dead_one_is_an_error() {
    let server = Server::new();
    let remote = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    push(&remote, &local(dir.path()), Encoding::Zstd).unwrap();
    for after in 0..8 {
        server.be(ServerFault::Reset { after, times: 2 });
        assert_eq!(bytes(&remote.load("a").unwrap()), memory(&SEEDS).0);
    }
    for after in 0..6 {
        server.be(ServerFault::Reset { after, times: usize::MAX });
        let read = || {
            let snapshot = remote.load("a").map_err(|e| e.to_string())?;
            let mut out = vec![0; snapshot.pages() * PAGE];
            snapshot.read(0, &mut out).map_err(|e| e.to_string())
        };
        let error = read().unwrap_err();
        assert!(error.contains("connection reset"), "after {after}: {error}");
    }
}

#[test]
fn a_cut_answer_is_fetched_again_and_never_taken_for_whole() {
    let server = Server::new();
    let remote = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    push(&remote, &local(dir.path()), Encoding::Zstd).unwrap();
    server.be(ServerFault::Short { times: 2 });
    assert_eq!(bytes(&remote.load("a").unwrap()), memory(&SEEDS).0);
    server.be(ServerFault::Short { times: usize::MAX });
    let error = remote.load("a").unwrap_err().to_string();
    assert!(error.contains("instead of"), "{error}");
}

#[test]
fn wrong_bytes_are_an_error_and_never_memory() {
    let server = Server::new();
    let remote = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        server.be(ServerFault::Nothing);
        let here = store(&dir.path().join(format!("{encoding:?}")));
        // Larger than the part that is fetched to open it.
        let large: Vec<u8> = (0..300).flat_map(page_of).collect();
        here.save("a", &afresh_store::MemoryPages(large), &options()).unwrap();
        push(&remote, &(here.clone(), here.load("a").unwrap()), encoding).unwrap();
        let opened = remote.load("a").unwrap();
        server.be(ServerFault::Flip);
        assert!(remote.load("a").is_err());
        let mut out = vec![0; opened.pages() * PAGE];
        let error = opened.read(0, &mut out).unwrap_err();
        assert!(matches!(error, OpenError::Layer { .. }), "{error}");
        let other = tempfile::tempdir().unwrap();
        let to = store(other.path());
        let error = remote.pull(&to, "a", "a", Encoding::Raw, &mut |_| {}).unwrap_err();
        assert!(matches!(error, RemoteError::Digest { .. }), "{error}");
        assert!(to.tags().unwrap().is_empty());
    }
}

#[test]
fn a_silent_server_is_an_error_within_its_time_limit() {
    let server = Server::new();
    let remote = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    push(&remote, &local(dir.path()), Encoding::Zstd).unwrap();
    server.be(ServerFault::Slow(Duration::from_millis(5)));
    assert_eq!(bytes(&remote.load("a").unwrap()), memory(&SEEDS).0);
    server.be(ServerFault::Slow(Duration::from_secs(3600)));
    let start = Instant::now();
    let error = remote_within(&server, Duration::from_millis(300)).load("a").unwrap_err();
    assert!(matches!(error, RemoteError::Timeout { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(120));
}

#[test]
fn a_push_that_ends_at_any_request_leaves_the_old_snapshot_or_the_new() {
    let dir = tempfile::tempdir().unwrap();
    let (store, new) = local(dir.path());
    store.save("old", &memory(&[9, 8]), &options()).unwrap();
    let old = store.load("old").unwrap();
    let mut after = 0;
    loop {
        let server = Server::new();
        let remote = remote(&server);
        remote.push(&store, &old, "a", Encoding::Raw, &mut |_| {}).unwrap();
        server.be(ServerFault::Reset { after, times: usize::MAX });
        let result = remote.push(&store, &new, "a", Encoding::Raw, &mut |_| {});
        server.be(ServerFault::Nothing);
        let there = bytes(&remote.load("a").unwrap());
        if result.is_ok() {
            assert_eq!(there, memory(&SEEDS).0);
            break;
        }
        assert_eq!(there, memory(&[9, 8]).0, "after {after}");
        after += 1;
    }
    assert!(after >= 8, "only {after} requests could fail");
}

#[test]
fn a_pull_that_ends_at_any_request_leaves_the_old_snapshot() {
    let server = Server::new();
    let remote = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    push(&remote, &local(dir.path()), Encoding::Zstd).unwrap();
    let other = tempfile::tempdir().unwrap();
    let to = store(other.path());
    to.save("a", &memory(&[5]), &options()).unwrap();
    let mut after = 0;
    loop {
        server.be(ServerFault::Reset { after, times: usize::MAX });
        if remote.pull(&to, "a", "a", Encoding::Raw, &mut |_| {}).is_ok() {
            break;
        }
        assert_eq!(bytes(&to.load("a").unwrap()), memory(&[5]).0, "after {after}");
        // Nothing of the attempt stays; a real client would keep the blobs it has.
        to.gc().unwrap();
        after += 1;
    }
    assert!(after >= 6, "only {after} requests could fail");
    assert_eq!(bytes(&to.load("a").unwrap()), memory(&SEEDS).0);
}

#[test]
fn names_pushed_at_the_same_time_are_all_kept() {
    let server = Server::new();
    let dir = tempfile::tempdir().unwrap();
    let from = local(dir.path());
    std::thread::scope(|scope| {
        for name in ["a", "b", "c", "d"] {
            let (server, from) = (&server, &from);
            scope.spawn(move || {
                let remote = remote(server);
                remote.push(&from.0, &from.1, name, Encoding::Raw, &mut |_| {}).unwrap();
            });
        }
    });
    let names: Vec<_> = remote(&server).tags().unwrap().into_iter().map(|t| t.name).collect();
    assert_eq!(names, ["a", "b", "c", "d"]);
}

#[test]
fn a_directory_is_a_remote_and_a_store_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let from = local(&dir.path().join("from"));
    let there = dir.path().join("there");
    std::fs::create_dir(&there).unwrap();
    let url = format!("file://{}", there.display());
    let remote = Remote::open(&url, RetryPolicy::default()).unwrap();
    push(&remote, &from, Encoding::Zstd).unwrap();
    assert_eq!(bytes(&remote.load("a").unwrap()), memory(&SEEDS).0);
    let local = Store::open(&there).unwrap().load("a").unwrap();
    assert_eq!(bytes(&local), memory(&SEEDS).0);
    // Only a snapshot of the store has a directory, which it is shared by.
    assert_eq!(remote.load("a").unwrap().directory(), None);
    assert_eq!(local.directory(), Some(&*there));
    // The umask decides whether the group of the directory may change names.
    let lock = std::fs::metadata(there.join(".index-lock")).unwrap().permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&lock) & 0o047, 0o040);
    assert!(matches!(
        Remote::open("gopher://x", RetryPolicy::default()),
        Err(RemoteError::Url { .. })
    ));
}

#[test]
fn a_guest_runs_while_the_rest_is_on_the_network_and_learns_when_the_server_dies() {
    let server = Server::new();
    let remote = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    let here = store(dir.path());
    let large: Vec<u8> = (0..3000u32).flat_map(page_of).collect();
    let mut save = options();
    save.options.working_set = vec![PageRange::new(0, 100)];
    here.save("a", &afresh_store::MemoryPages(large.clone()), &save).unwrap();
    push(&remote, &(here.clone(), here.load("a").unwrap()), Encoding::Zstd).unwrap();
    let start = |strategy, ahead| {
        let snapshot = remote.load("a").unwrap();
        let memory = Arc::new(Reservation::aligned(3000, 2 << 20).unwrap());
        let mut options = Options::with(strategy);
        options.streams = 3;
        options.background = ahead;
        let source = Arc::new(SnapshotSource::new(snapshot));
        let restore =
            Restore::start(memory.clone(), PageRange::new(0, 3000), source, &options).unwrap();
        (memory, restore)
    };
    let peek = |memory: &Reservation, at: usize| {
        // SAFETY: inside the restored range.
        unsafe { memory.base().as_ptr().add(at).read_volatile() }
    };
    server.be(ServerFault::Slow(Duration::from_millis(2)));
    for (strategy, ahead) in [
        (FillStrategy::Stream, true),
        (FillStrategy::WorkingSet, true),
        (FillStrategy::Stream, false),
    ] {
        let (memory, restore) = start(strategy, ahead);
        for page in [7, 2999, 1500, 30, 1024] {
            assert_eq!(peek(&memory, page * PAGE + 5), large[page * PAGE + 5]);
        }
        restore.wait(Duration::from_secs(120)).unwrap();
        assert!((0..large.len()).all(|at| peek(&memory, at) == large[at]));
    }
    // Index, manifest, configuration, two layer tails, the set: so many requests to the first
    // answer.
    server.be(ServerFault::Nothing);
    let mut options = Options::with(FillStrategy::WorkingSet);
    options.background = false;
    let source = Arc::new(SnapshotSource::new(remote.load("a").unwrap()));
    let memory = Arc::new(Reservation::aligned(3000, 2 << 20).unwrap());
    let restore =
        Restore::start(memory.clone(), PageRange::new(0, 3000), source, &options).unwrap();
    assert_eq!(peek(&memory, 99 * PAGE), large[99 * PAGE]);
    assert_eq!(server.requests.load(Ordering::Relaxed), 6);
    drop(restore);

    let (_, restore) = start(FillStrategy::Stream, false);
    server.be(ServerFault::Reset { after: 0, times: usize::MAX });
    let error = restore.resolve(PageRange::new(2000, 10)).unwrap_err().to_string();
    assert!(error.contains("connection reset"), "{error}");
}

#[test]
fn a_shared_cache_saves_requests_and_a_damaged_one_is_fetched_again() {
    let server = Server::new();
    let plain = remote(&server);
    let dir = tempfile::tempdir().unwrap();
    let here = store(&dir.path().join("store"));
    let large: Vec<u8> = (0..600u32).flat_map(page_of).collect();
    here.save("a", &afresh_store::MemoryPages(large.clone()), &options()).unwrap();
    push(&plain, &(here.clone(), here.load("a").unwrap()), Encoding::Raw).unwrap();
    let cache = dir.path().join("cache");
    let requests = || {
        // A separate remote, as of another process.
        server.be(ServerFault::Nothing);
        let other = remote(&server).with_cache(&cache);
        assert!(bytes(&other.load("a").unwrap()) == large);
        server.requests.load(Ordering::Relaxed)
    };
    let (cold, warm) = (requests(), requests());
    // The index is asked for each time, all that has a digest only once.
    assert!(cold > warm && warm == 1, "{cold} requests, then {warm}");
    let files = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path());
    let file = files.max_by_key(|path| std::fs::metadata(path).unwrap().len()).unwrap();
    let original = std::fs::read(&file).unwrap();
    for at in [0, 40, 300_000, original.len() - 1] {
        let mut damaged = original.clone();
        damaged[at] ^= 1;
        std::fs::write(&file, &damaged).unwrap();
        assert_eq!(requests(), 2, "damaged at {at}");
        assert!(std::fs::read(&file).unwrap() == original);
    }
    // Wrong bytes from the server are not kept.
    trim_cache(&cache, 0).unwrap();
    server.be(ServerFault::Flip);
    assert!(remote(&server).with_cache(&cache).load("a").is_err());
    requests();
    std::fs::write(&file, &original[..original.len() / 2]).unwrap();
    assert!(requests() > 1);
    assert_eq!(trim_cache(&cache, u64::MAX).unwrap(), 0);
    assert!(trim_cache(&cache, 0).unwrap() > 0);
    assert_eq!(requests(), cold);
}

#[test]
fn the_first_page_is_few_round_trips_away() {
    let server = Server::new();
    let dir = tempfile::tempdir().unwrap();
    let here = store(&dir.path().join("store"));
    // A stack of layers, and a working set in many pieces, some of them alike.
    let mut pages: Vec<u32> = (0..2000).collect();
    let of = |pages: &[u32]| {
        afresh_store::MemoryPages(pages.iter().flat_map(|seed| page_of(*seed)).collect())
    };
    here.save("a", &of(&pages), &options()).unwrap();
    for round in 1..=5 {
        for at in (round as usize..2000).step_by(37) {
            pages[at] = 2000 * round + at as u32 % 90;
        }
        let mut save = options();
        save.options.parent = Some(here.load("a").unwrap());
        save.options.working_set = (0..400).map(|n| PageRange::new(n * 5, 1 + n % 3)).collect();
        here.save("a", &of(&pages), &save).unwrap();
    }
    let whole = of(&pages).0;
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        server.be(ServerFault::Nothing);
        let plain = remote(&server);
        push(&plain, &(here.clone(), here.load("a").unwrap()), encoding).unwrap();
        let cache = dir.path().join(format!("cache-{encoding:?}"));
        let cached = plain.with_cache(&cache);
        let slow = ServerFault::Slow(Duration::from_millis(20));
        let rounds = || server.rounds.load(Ordering::Relaxed);
        // The name; the manifest; configuration and indexes; the working set.
        for (remote, opening, reading) in [(&plain, 3, 1), (&cached, 3, 1), (&cached, 1, 0)] {
            server.be(slow);
            let snapshot = remote.load("a").unwrap();
            assert_eq!(rounds(), opening, "{encoding:?}");
            server.be(slow);
            let mut seen = 0;
            snapshot
                .read_working_set::<OpenError>(|range, bytes| {
                    let at = range.start * PAGE;
                    assert!(bytes == &whole[at..at + range.byte_len()]);
                    seen += range.len;
                    Ok(())
                })
                .unwrap();
            assert_eq!(seen, snapshot.working_set().iter().map(|range| range.len).sum::<usize>());
            assert!(rounds() <= reading, "{} rounds for the set, {encoding:?}", rounds());
        }
        // Pages of all six layers at once.
        let snapshot = plain.load("a").unwrap();
        server.be(slow);
        let mut out = vec![0; 500 * PAGE];
        snapshot.read(700, &mut out).unwrap();
        assert!(out == whole[700 * PAGE..1200 * PAGE]);
        assert_eq!(rounds(), 1, "{encoding:?}");
        // By its digest, a snapshot is one round nearer.
        server.be(slow);
        plain.load(&snapshot.id().to_string()).unwrap();
        assert_eq!(rounds(), 2);
    }
}

#[test]
fn a_store_that_ignores_conditions_of_writes_is_refused() {
    for (create, update, condition) in
        [(true, true, "If-None-Match"), (true, false, "If-None-Match"), (false, true, "If-Match")]
    {
        let server = Server::new();
        server.be(ServerFault::Unconditional { create, update });
        let remote = remote(&server);
        let dir = tempfile::tempdir().unwrap();
        let from = local(dir.path());
        for _ in 0..2 {
            let error = push(&remote, &from, Encoding::Raw).unwrap_err();
            assert!(matches!(error, RemoteError::Unconditional { .. }), "{error}");
            assert!(error.to_string().contains(condition), "{error}");
        }
        let begun =
            remote.push_turns(&from.0, &from.1, "b", Encoding::Raw, ReplacedName::Any, &mut |_| {});
        assert!(matches!(begun, Err(RemoteError::Unconditional { .. })));
        assert!(remote.tags().unwrap().is_empty());
        // Once it keeps them, the names are set.
        server.be(ServerFault::Nothing);
        push(&remote, &from, Encoding::Raw).unwrap();
        assert_eq!(remote.tags().unwrap().len(), 1);
    }
}

#[test]
fn concurrent_pushes_to_a_directory_keep_all_names() {
    let dir = tempfile::tempdir().unwrap();
    let from = local(&dir.path().join("from"));
    let to = dir.path().join("to");
    std::fs::create_dir(&to).unwrap();
    let url = format!("file://{}", to.display());
    std::thread::scope(|threads| {
        for n in 0..12 {
            let (url, from) = (&url, &from);
            threads.spawn(move || {
                let remote = Remote::open(url, RetryPolicy::default()).unwrap();
                let name = format!("n{n}");
                remote.push(&from.0, &from.1, &name, Encoding::Raw, &mut |_| {}).unwrap();
            });
        }
    });
    let remote = Remote::open(&url, RetryPolicy::default()).unwrap();
    assert_eq!(remote.tags().unwrap().len(), 12);
}

#[test]
fn a_cache_is_readable_by_its_owner_only() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    let server = Server::new();
    let (dir, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    push(&remote(&server), &local(dir.path()), Encoding::Raw).unwrap();
    let cache = home.path().join("cache");
    let cached = remote(&server).with_cache(&cache);
    let files = || std::fs::read_dir(&cache).unwrap().map(|it| it.unwrap().path());
    bytes(&cached.load("a").unwrap());
    assert_eq!(mode(&cache), 0o700);
    assert!(files().count() > 0);
    assert!(files().all(|path| mode(&path) == 0o600));
    // Files of an earlier version followed the umask.
    files()
        .for_each(|path| std::fs::set_permissions(path, PermissionsExt::from_mode(0o644)).unwrap());
    bytes(&cached.load("a").unwrap());
    assert!(files().all(|path| mode(&path) == 0o600));
    // A symbolic link is not followed.
    let victim = home.path().join("victim");
    std::fs::write(&victim, b"victim").unwrap();
    for path in files() {
        std::fs::remove_file(&path).unwrap();
        symlink(&victim, &path).unwrap();
    }
    let refused = cached.load("a").unwrap_err();
    assert!(matches!(refused, RemoteError::Open(OpenError::Io { .. })), "{refused}");
    assert_eq!(std::fs::read(&victim).unwrap(), b"victim");
    files().for_each(|path| std::fs::remove_file(path).unwrap());
    // Nor is a directory that others write to.
    std::fs::set_permissions(&cache, PermissionsExt::from_mode(0o777)).unwrap();
    let refused = cached.load("a").unwrap_err().to_string();
    assert!(refused.contains("chmod go-w"), "{refused}");
    assert_eq!(files().count(), 0);
}
