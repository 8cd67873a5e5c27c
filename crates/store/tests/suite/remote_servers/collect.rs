//! Collection of objects of a real S3 server during writes.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use afresh_store::remote::{GRACE_PERIOD, GcRoot, Remote, RemoteError, ReplacedName};
use afresh_store::{Encoding, Sha256, Snapshot, Store};

use super::local;
use super::servers::{Kind, Server, retry};
use crate::support::bytes;

/// Every file below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Makes everything that the server has older than any grace.
fn age(root: &Path) {
    for file in files(root) {
        let long_ago = SystemTime::now() - GRACE_PERIOD - Duration::from_secs(3600);
        fs::File::options().append(true).open(file).unwrap().set_modified(long_ago).unwrap();
    }
}

fn keep(remote: &Remote, local: &(Store, Snapshot, Vec<u8>)) -> Sha256 {
    remote.keep(&local.0, &local.1, Encoding::Raw, &mut |_| {}).unwrap()
}

fn is_whole(remote: &Remote, id: Sha256, content: &[u8]) -> bool {
    remote.load(&id.to_string()).is_ok_and(|snapshot| bytes(&snapshot) == content)
}

/// Collects for a fleet that has these names.
fn collect(remote: &Remote, names: &[Sha256]) -> afresh_store::CollectionReport {
    let mut names = || Ok(names.to_vec());
    remote.gc(Some(GcRoot { name: "fleet", names: &mut names }), GRACE_PERIOD).unwrap()
}

#[test]
fn only_old_unnamed_objects_are_removed() {
    let Some(server) = Server::start(Kind::S3) else { return };
    let remote = server.remote(server.address, retry());
    let root = server.folder();
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<_> = (1..=4).map(|n| local(&dir.path().join(n.to_string()), n, 200)).collect();
    let named = remote.push(&all[0].0, &all[0].1, "named", Encoding::Raw, &mut |_| {}).unwrap();
    let [kept, dead] = [keep(&remote, &all[1]), keep(&remote, &all[2])];
    remote.claim("fleet").unwrap();
    let journal = remote
        .push_turns(&all[0].0, &all[0].1, "session", Encoding::Raw, ReplacedName::Any, &mut |_| {})
        .map(drop);
    journal.unwrap();
    // Turns of that session, of one that nothing names, and of one to which a turn was just added.
    let manifests = files(&root.join("blobs/sha256")).into_iter();
    let texts = manifests.filter_map(|file| fs::read_to_string(file).ok());
    let session = texts
        .filter_map(|text| serde_json::from_str::<serde_json::Value>(&text).ok())
        .find_map(|json| {
            let notes = json["annotations"].as_object()?.values();
            notes
                .into_iter()
                .find_map(|note| note.as_str().filter(|it| it.len() == 64).map(str::to_owned))
        })
        .unwrap();
    let journals = [session, "d".repeat(64), "e".repeat(64)];
    let turn = |journal: &str, number: u32| {
        let dir = root.join("journals").join(journal);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(format!("{number:08}")), "a turn").unwrap();
    };
    for journal in &journals {
        turn(journal, 0);
        turn(journal, 1);
    }
    assert_eq!(collect(&remote, &[kept]).files, 0, "all of it is young");
    age(&root);
    turn(&journals[2], 2);
    let young = keep(&remote, &all[3]);
    let collected = collect(&remote, &[kept]);
    // Two layers, a working set, a configuration and a manifest; and the dead session's two turns.
    assert_eq!(collected.files, 7, "{collected:?}");
    assert!(collected.bytes > 200 * 4096);
    for (id, content) in [(named, &all[0].2), (kept, &all[1].2), (young, &all[3].2)] {
        assert!(is_whole(&remote, id, content));
    }
    assert!(remote.load(&dead.to_string()).is_err());
    let left: Vec<bool> = journals
        .iter()
        .map(|it| root.join("journals").join(it).join("00000000").exists())
        .collect();
    assert_eq!(left, [true, false, true]);
    assert_eq!(collect(&remote, &[kept]).files, 0);
    assert!(files(&root).iter().all(|file| !file.to_string_lossy().contains("collecting")));
}

#[test]
fn objects_of_a_running_writer_survive_a_collection() {
    let Some(server) = Server::start(Kind::S3) else { return };
    let remote = server.remote(server.address, retry());
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (local(&dir.path().join("1"), 1, 100), local(&dir.path().join("2"), 2, 100));
    let (id, named) = (keep(&remote, &one), keep(&remote, &other));
    remote.claim("fleet").unwrap();
    age(&server.folder());
    // The same is saved again after everything was listed, and is named after the names were read.
    let mut names = || {
        assert_eq!(keep(&remote, &one), id);
        Ok(vec![named])
    };
    let collected =
        remote.gc(Some(GcRoot { name: "fleet", names: &mut names }), GRACE_PERIOD).unwrap();
    assert_eq!(collected.files, 0, "{collected:?}");
    assert!(is_whole(&remote, id, &one.2));
    assert!(is_whole(&remote, named, &other.2));
}

#[test]
fn a_writer_waits_for_a_collector_and_sends_again_what_it_removed() {
    let Some(server) = Server::start(Kind::S3) else { return };
    let remote = server.remote(server.address, retry());
    let root = server.folder();
    let dir = tempfile::tempdir().unwrap();
    let one = local(dir.path(), 1, 100);
    keep(&remote, &one);
    let mark = root.join("collecting").join("a");
    fs::create_dir_all(mark.parent().unwrap()).unwrap();
    fs::write(&mark, "").unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| keep(&remote, &one));
        std::thread::sleep(Duration::from_millis(700));
        assert!(!writer.is_finished(), "it does not wait");
        // The collector had chosen these files before the writer looked.
        for file in files(&root.join("blobs")) {
            fs::remove_file(file).unwrap();
        }
        fs::remove_file(&mark).unwrap();
        let id = writer.join().unwrap();
        assert!(is_whole(&remote, id, &one.2));
    });
}

#[test]
fn a_collection_that_would_remove_too_much_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let one = local(&dir.path().join("store"), 1, 20);
    if let Some(server) = Server::start(Kind::Registry) {
        let remote = server.remote(server.address, retry());
        assert!(matches!(remote.gc(None, GRACE_PERIOD), Err(RemoteError::NoCollection)));
    }
    // The files of a local store, seen as a remote: who saves there holds locks that this knows
    // nothing of.
    let url = format!("file://{}", dir.path().join("store").display());
    let local = Remote::open(&url, retry()).unwrap();
    assert!(matches!(local.gc(None, GRACE_PERIOD), Err(RemoteError::Kept { .. })));
    let place = dir.path().join("remote");
    fs::create_dir(&place).unwrap();
    let remote = Remote::open(&format!("file://{}", place.display()), retry()).unwrap();
    let id = keep(&remote, &one);
    age(&place);
    let short = remote.gc(None, Duration::from_secs(3600));
    assert!(matches!(short, Err(RemoteError::Grace { .. })));
    assert!(matches!(remote.gc(None, GRACE_PERIOD), Err(RemoteError::NoNames)));
    remote.claim("fleet-a").unwrap();
    remote.push(&one.0, &one.1, "name", Encoding::Raw, &mut |_| {}).unwrap();
    let error = remote.gc(None, GRACE_PERIOD).unwrap_err();
    assert!(error.to_string().contains("`fleet-a`"), "{error}");
    let mut fails = || Err("no ledger".into());
    let failing = remote.gc(Some(GcRoot { name: "fleet-a", names: &mut fails }), GRACE_PERIOD);
    assert!(matches!(failing, Err(RemoteError::Names(_))));
    assert!(is_whole(&remote, id, &one.2));
}
