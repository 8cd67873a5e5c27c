//! A store on a disk that is full: what was acknowledged stays, and the same operation succeeds
//! once there is room.

use std::error::Error;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use afresh_store::{MemoryPages, ReplacedName, SaveError};

use crate::support::small_disk::SmallDisk;
use crate::support::{bytes, memory, options, store};
use crate::turns::{is_round, next_turn, session};

fn is_full(error: &SaveError) -> bool {
    let mut causes =
        std::iter::successors(Some(error as &(dyn Error + 'static)), |error| (*error).source());
    causes.any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == ErrorKind::StorageFull)
    })
}

/// Temporary files that a failed save has left.
fn left(dir: &Path) -> usize {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.path().is_dir() {
            true => left(&entry.path()),
            false => usize::from(entry.file_name().as_encoded_bytes().starts_with(b".tmp-")),
        })
        .sum()
}

#[test]
fn a_save_that_finds_the_disk_full_names_that_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path(), 16) else { return };
    let store = store(dir.path());
    let (old, new) = (memory(&[1, 2, 3]), memory(&(4..=250).collect::<Vec<u8>>()));
    store.save("a", &old, &options()).unwrap();
    // Not enough for the pages; then enough for these, but not for the manifest.
    for free in [0, 4096, 64 << 10, 256 << 10, 1000 << 10, 1004 << 10, 1008 << 10, 1012 << 10] {
        disk.fill(free);
        let saved = store.save("a", &new, &options());
        let meaning = bytes(&store.load("a").unwrap());
        match saved {
            Ok(_) => assert!(meaning == new.0, "{free}"),
            Err(error) => {
                assert!(is_full(&error), "{free}: {error:?}");
                assert!(meaning == old.0, "{free}");
                assert_eq!(left(dir.path()), 0, "{free}");
            }
        }
        disk.empty();
        store.save("a", &new, &options()).unwrap();
        assert!(bytes(&store.load("a").unwrap()) == new.0);
        store.save("a", &old, &options()).unwrap();
        store.gc().unwrap();
    }
}

#[test]
fn a_turn_that_finds_the_disk_full_is_refused_and_appended_once_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path(), 16) else { return };
    let store = store(dir.path());
    let mut journal = session(&store, "a", 3);
    disk.fill(0);
    // The last block of the journal may have room for some.
    let mut rounds = 3;
    let error = loop {
        match journal.append(&next_turn(&journal, rounds + 1), None) {
            Ok(_) => rounds += 1,
            Err(error) => break error,
        }
        assert!(rounds < 100, "a full disk takes a hundred turns");
    };
    assert!(is_full(&error), "{error:?}");
    assert!(is_round(&store.load("a").unwrap(), rounds), "what was acknowledged is there");
    assert!(journal.append(&next_turn(&journal, rounds + 1), None).is_err());
    disk.empty();
    // Of this writer, and of one that opens the session afterwards.
    journal.append(&next_turn(&journal, rounds + 1), None).unwrap();
    assert!(is_round(&store.load("a").unwrap(), rounds + 1));
    let mut again = store.load("a").unwrap().resume_turns().unwrap().unwrap();
    again.append(&next_turn(&again, rounds + 2), None).unwrap();
    let opened = store.load("a").unwrap();
    assert!(is_round(&opened, rounds + 2));
    opened.verify().unwrap();
}

#[test]
fn a_session_that_begins_on_a_full_disk_leaves_the_snapshot_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path(), 16) else { return };
    let store = store(dir.path());
    let id = store.save("a", &MemoryPages(memory(&[1, 2, 3]).0), &options()).unwrap();
    let snapshot = store.load_id(id).unwrap();
    disk.fill(0);
    let error = store.begin_turns("a", &snapshot, ReplacedName::Any).unwrap_err();
    assert!(is_full(&error), "{error:?}");
    assert_eq!(left(dir.path()), 0);
    assert!(store.load("a").unwrap().turns().is_none());
    disk.empty();
    store.begin_turns("a", &snapshot, ReplacedName::Any).unwrap();
    assert_eq!(store.load("a").unwrap().turns().unwrap().count, 0);
}
