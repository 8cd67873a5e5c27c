//! Pushes and pulls that are killed leave the old snapshot or the new one.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use afresh_store::remote::{Remote, RetryPolicy};
use afresh_store::{Encoding, MemoryPages, Snapshot, Store};

use super::content;
use super::servers::{KINDS, Server, retry};
use crate::support::{bytes, options, store};

const CHILD: &str = "AFRESH_TEST_KILLED";
/// More than one part of an upload.
const PAGES: u32 = 2200;
const ATTEMPTS: u64 = 8;

/// A remote that a child can open too.
struct RemoteAddress {
    url: String,
    options: Vec<(&'static str, String)>,
    /// Lives as long as the place.
    _server: Option<Server>,
}

fn places(dir: &Path) -> Vec<RemoteAddress> {
    std::fs::create_dir(dir.join("remote")).unwrap();
    let url = format!("file://{}", dir.join("remote").display());
    let mut places = vec![RemoteAddress { url, options: Vec::new(), _server: None }];
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let (url, options) = server.url(server.address);
        places.push(RemoteAddress { url, options, _server: Some(server) });
    }
    places
}

impl RemoteAddress {
    fn open(&self) -> Remote {
        let options: Vec<_> = self.options.iter().map(|(k, v)| (*k, v.as_str())).collect();
        Remote::open_with(&self.url, retry(), &options).unwrap()
    }

    /// Runs `test` in a child, and kills it so long after it said that it did its work once.
    fn kill(&self, test: &str, dir: &Path, after: Duration) {
        let options = self.options.iter().map(|(key, value)| format!("|{key}={value}"));
        let task = format!("{}|{}{}", dir.display(), self.url, options.collect::<String>());
        let mut child = afresh_sys::test_command(test)
            .env(CHILD, task)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let worked = lines.any(|line| line.unwrap().contains("did it"));
        std::thread::sleep(after);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(worked, "the child failed before it was killed");
    }
}

/// In the child: the local store and the remote.
fn task() -> Option<(Store, Remote)> {
    let task = std::env::var(CHILD).ok()?;
    let words: Vec<_> = task.split('|').collect();
    let [dir, url, options @ ..] = &words[..] else { panic!("{task}") };
    let options: Vec<_> = options.iter().map(|o| o.split_once('=').unwrap()).collect();
    let remote = Remote::open_with(url, RetryPolicy::default(), &options).unwrap();
    Some((Store::open(dir).unwrap(), remote))
}

fn save(store: &Store, seed: u32) -> Snapshot {
    let mut save = options();
    save.state = seed.to_le_bytes().to_vec();
    store.save("a", &MemoryPages(content(seed, PAGES)), &save).unwrap();
    store.load("a").unwrap()
}

/// The snapshot is whole, and one of those that were made.
fn check(snapshot: &Snapshot) -> u32 {
    let seed = u32::from_le_bytes(snapshot.state().try_into().unwrap());
    assert!(bytes(snapshot) == content(seed, PAGES), "seed {seed}");
    seed
}

#[test]
fn kill_during_push_leaves_old_or_new() {
    if let Some((local, remote)) = task() {
        // Contents that no earlier child had, so that each child sends something.
        for seed in std::process::id() * 1000.. {
            let snapshot = save(&local, seed);
            remote.push(&local, &snapshot, "a", Encoding::Raw, &mut |_| {}).unwrap();
            println!("did it");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let mut interrupted = 0;
    for (number, place) in places(dir.path()).iter().enumerate() {
        let here = dir.path().join(format!("push-{number}"));
        let local = store(&here);
        let remote = place.open();
        // More, on a machine so busy that every kill came at another moment.
        for attempt in 0..10 * ATTEMPTS {
            if attempt >= ATTEMPTS && interrupted > 0 {
                break;
            }
            let after = Duration::from_micros(attempt % ATTEMPTS * 17_731 + attempt * 499);
            place.kill("remote_servers::kill::kill_during_push_leaves_old_or_new", &here, after);
            let there = check(&remote.load("a").unwrap());
            let mine = local.load("a").unwrap();
            mine.verify().unwrap();
            interrupted += u32::from(check(&mine) != there);
            remote.push(&local, &mine, "a", Encoding::Raw, &mut |_| {}).unwrap();
            assert_eq!(check(&remote.load("a").unwrap()), check(&mine));
            local.gc().unwrap();
            local.load("a").unwrap().verify().unwrap();
        }
    }
    assert!(interrupted > 0, "no kill came between a save and the end of its push");
}

#[test]
fn kill_during_pull_leaves_old_or_new() {
    if let Some((local, remote)) = task() {
        for name in ["one", "two"].iter().cycle() {
            remote.pull(&local, name, "a", Encoding::Raw, &mut |_| {}).unwrap();
            println!("did it");
            // So that the other one has to be fetched anew.
            local.gc().unwrap();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let source = store(&dir.path().join("source"));
    let mut left_behind = 0;
    for (number, place) in places(dir.path()).iter().enumerate() {
        let remote = place.open();
        for (name, seed) in [("one", 1), ("two", 2)] {
            let snapshot = save(&source, seed);
            remote.push(&source, &snapshot, name, Encoding::Zstd, &mut |_| {}).unwrap();
        }
        let here = dir.path().join(format!("pull-{number}"));
        let local = store(&here);
        for attempt in 0..ATTEMPTS {
            let after = Duration::from_micros(attempt * 13_337);
            place.kill("remote_servers::kill::kill_during_pull_leaves_old_or_new", &here, after);
            let mine = local.load("a").unwrap();
            mine.verify().unwrap();
            let other = if check(&mine) == 1 { "two" } else { "one" };
            left_behind += local.gc().unwrap().files;
            remote.pull(&local, other, "a", Encoding::Raw, &mut |_| {}).unwrap();
            assert_ne!(check(&local.load("a").unwrap()), check(&mine));
        }
    }
    assert!(left_behind > 0, "no kill left anything for gc: nothing was interrupted");
}
