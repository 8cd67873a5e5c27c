//! Pipes in the directory of a stranger: an open fails instead of waiting for their other end.

use std::fs;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use afresh_store::{FilePages, Store, archive};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::support::store;
use crate::turns::{is_round, session};

fn put_pipe(path: &Path) {
    let _ = fs::remove_file(path);
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

/// Fails if `work` waits for the other end of a pipe.
fn check_returns(what: &str, work: impl FnOnce() + Send + 'static) {
    let (done, end) = channel();
    let thread = std::thread::spawn(move || {
        work();
        done.send(()).unwrap();
    });
    match end.recv_timeout(Duration::from_secs(60)) {
        Err(RecvTimeoutError::Timeout) => panic!("{what}: it waits"),
        _ => thread.join().unwrap(),
    }
}

#[test]
fn a_store_with_a_pipe_does_not_keep_its_readers_waiting() {
    let files = ["oci-layout", "index.json"].map(str::to_owned);
    let session_files = |dir: &Path| {
        let mut found = files.to_vec();
        for folder in ["blobs/sha256", "journals"] {
            let names = fs::read_dir(dir.join(folder)).unwrap().map(|it| it.unwrap().file_name());
            found.extend(names.map(|name| format!("{folder}/{}", name.to_str().unwrap())));
        }
        found
    };
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    drop(session(&store, "a", 2));
    // Later collections find nothing to remove.
    store.gc().unwrap();
    let all = session_files(dir.path());
    assert!(all.len() >= 6 && all.iter().any(|name| name.starts_with("journals")), "{all:?}");
    for name in all {
        let (root, path) = (dir.path().to_owned(), dir.path().join(&name));
        let aside = dir.path().join("aside");
        fs::rename(&path, &aside).unwrap();
        put_pipe(&path);
        let file = name.clone();
        check_returns(&name, move || {
            let found = Store::open(&root).and_then(|store| {
                let snapshot = store.load("a")?;
                snapshot.check(&mut |_, _| {})?;
                Ok(snapshot)
            });
            // The working set is a copy of pages.
            if let Ok(snapshot) = found {
                assert!(is_round(&snapshot, 2) && file.starts_with("blobs"), "{file}");
            }
            let _ = Store::open(&root).map(|store| store.gc());
        });
        fs::rename(&aside, &path).unwrap();
    }
}

#[test]
fn a_change_of_a_session_does_not_wait_for_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let journal = session(&store, "a", 2);
    let opened = store.load("a").unwrap();
    put_pipe(journal.path().unwrap());
    check_returns("a turn", move || drop(opened.resume_turns().unwrap_err()));
    check_returns("a name", move || drop(store.untag("a")));
}

#[test]
fn an_archive_or_an_image_of_memory_that_is_a_pipe_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.afresh");
    put_pipe(&path);
    let pipe = path.clone();
    check_returns("an archive", move || drop(archive::open(&pipe).unwrap_err()));
    check_returns("an image", move || drop(FilePages::open(&path).unwrap_err()));
}
