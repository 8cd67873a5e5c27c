//! Turns of version 1, frozen: a session that was saved by the first release opens and takes
//! another turn, and its journal is written today byte for byte as then.
//!
//! `tests/golden/v1-turns` is never written again. A change that makes these tests fail needs a new
//! version. `AFRESH_WRITE_GOLDEN=1` writes a golden that is missing.

use std::fs;
use std::path::{Path, PathBuf};

use afresh_store::{Encoding, Journal, MemoryPages, Store};

use crate::support::{PAGE, bytes, options, page_of, store};
use crate::turns::turn;

const TURNS: usize = 3;
/// Length of the head of a journal.
const HEAD_BYTES: u64 = 64;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1-turns")
}

/// Memory and state after some turns: small changes, a page as a whole, a page of zeros, growth.
fn after(turns: usize) -> (Vec<u8>, Vec<u8>) {
    let mut pages = [page_of(1), vec![0; PAGE]].concat();
    if turns >= 1 {
        pages[5..9].copy_from_slice(b"turn");
        pages[PAGE + 100] = 1;
    }
    if turns >= 2 {
        pages.extend(page_of(2));
        pages[PAGE..2 * PAGE].fill(0);
    }
    if turns >= 3 {
        pages[..PAGE].fill(7);
    }
    if turns >= 4 {
        pages[4000] = 8;
    }
    (pages, format!("registers after {turns}").into_bytes())
}

fn append(journal: &mut Journal, number: usize) {
    let ((was, state_was), (now, state)) = (after(number - 1), after(number));
    let turn = turn((&was, &state_was), (&now, &state), journal.last());
    journal.append(&turn, None).unwrap();
}

fn write(store: &Store) {
    let (pages, state) = after(0);
    let mut save = options();
    (save.state, save.options.encoding) = (state, Encoding::Zstd);
    let id = store.save("session", &MemoryPages(pages), &save).unwrap();
    let mut journal = store.begin_turns("session", &store.load_id(id).unwrap()).unwrap();
    (1..=TURNS).for_each(|number| append(&mut journal, number));
}

/// The file of the one journal of a store.
fn journal(root: &Path) -> PathBuf {
    let mut journals = fs::read_dir(root.join("journals")).unwrap();
    let path = journals.next().unwrap().unwrap().path();
    assert!(journals.next().is_none());
    path
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

#[test]
fn a_session_of_version_1_opens_and_takes_another_turn() {
    if !golden().exists() && std::env::var_os("AFRESH_WRITE_GOLDEN").is_some() {
        write(&store(&golden()));
    }
    let dir = tempfile::tempdir().unwrap();
    copy(&golden(), dir.path());
    let there = Store::open(dir.path()).unwrap();
    let snapshot = there.load("session").unwrap();
    assert_eq!(snapshot.turns().unwrap().count, TURNS);
    snapshot.check(&mut |_, _| {}).unwrap();
    let (pages, state) = after(TURNS);
    assert!(bytes(&snapshot) == pages && snapshot.state() == state);
    let mut journal = snapshot.resume_turns().unwrap().unwrap();
    append(&mut journal, TURNS + 1);
    let (pages, state) = after(TURNS + 1);
    let snapshot = there.load("session").unwrap();
    assert!(bytes(&snapshot) == pages && snapshot.state() == state);
}

#[test]
fn turns_are_written_as_in_their_golden_journal() {
    let dir = tempfile::tempdir().unwrap();
    copy(&golden(), dir.path());
    let path = journal(dir.path());
    let golden = fs::read(&path).unwrap();
    // The name of a journal is random, and each turn follows from it: the same turns are appended
    // to the same head.
    fs::File::options().write(true).open(&path).unwrap().set_len(HEAD_BYTES).unwrap();
    let there = Store::open(dir.path()).unwrap();
    let mut journal = there.load("session").unwrap().resume_turns().unwrap().unwrap();
    (1..=TURNS).for_each(|number| append(&mut journal, number));
    assert!(fs::read(&path).unwrap() == golden, "turns have another form");
}
