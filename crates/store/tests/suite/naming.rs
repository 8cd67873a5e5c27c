//! Changes of names during `gc`, folds and other writers' saves: each acknowledged state opens.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{memory, options, store};
use crate::turns::{append, is_round, session};
use afresh_store::{Access, CompactOptions, FoldOptions, ReplacedName, SaveError, Sha256, Store};
use afresh_sys::planted::Bug;

#[test]
fn turns_begin_on_a_snapshot_whose_blobs_were_collected() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    drop(session(&store, "first", 0));
    let plain = store.save("warm", &memory(&[1, 2, 3]), &options()).unwrap();
    let opened = store.load("warm").unwrap();
    store.save("warm", &memory(&[4, 5]), &options()).unwrap();
    store.gc().unwrap();
    assert!(!store.blob_path(plain).exists());
    drop(store.begin_turns("work", &opened, ReplacedName::Any).unwrap());
    store.gc().unwrap();
    let found = store.load("work").unwrap();
    found.verify().unwrap();
    assert!(crate::support::bytes(&found) == memory(&[1, 2, 3]).0);
    // So does a session that was folded, whose layers were removed since.
    drop(session(&store, "long", 3));
    let long = store.load("long").unwrap();
    store.untag("long").unwrap();
    store.gc().unwrap();
    drop(store.begin_turns("again", &long, ReplacedName::Any).unwrap());
    store.gc().unwrap();
    assert!(is_round(&store.load("again").unwrap(), 3));
    // A name for missing blobs is refused.
    assert!(matches!(store.tag("gone", Some(plain)), Err(SaveError::Io { .. })));
}

#[test]
fn a_fold_from_an_outdated_journal_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let outdated = session(&store, "a", 3);
    let before = store.load("a").unwrap();
    let mut other = before.resume_turns().unwrap().unwrap();
    append(&mut other, 4);
    let fold = FoldOptions::default();
    let refused = store.fold_turns("a", &outdated, &Access::new(), &fold).unwrap_err();
    assert!(matches!(refused, SaveError::Moved(_)), "{refused}");
    assert!(is_round(&store.load("a").unwrap(), 4));
    let refused = store.compact("a", &before, &CompactOptions::default()).unwrap_err();
    assert!(matches!(refused, SaveError::Moved(_)), "{refused}");
    let refused = store.set_working_set("a", &before, &[]).unwrap_err();
    assert!(matches!(refused, SaveError::Moved(_)), "{refused}");
    assert!(is_round(&store.load("a").unwrap(), 4));
    let mut folded = store.fold_turns("a", &other, &Access::new(), &fold).unwrap();
    append(&mut folded, 5);
    assert!(is_round(&store.load("a").unwrap(), 5));
}

#[test]
fn a_turn_behind_a_fold_is_refused_also_where_the_fold_left_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut late = session(&store, "a", 3);
    let path = late.path().unwrap().to_owned();
    // As after a crash between the two: a second name of the file stands for the one that was not
    // removed.
    fs::hard_link(&path, dir.path().join("kept")).unwrap();
    let journal = store.load("a").unwrap().resume_turns().unwrap().unwrap();
    let mut folded =
        store.fold_turns("a", &journal, &Access::new(), &FoldOptions::default()).unwrap();
    fs::rename(dir.path().join("kept"), &path).unwrap();
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| append(&mut late, 4)));
    assert!(refused.is_err(), "a turn was acknowledged that no name leads to");
    append(&mut folded, 4);
    assert!(is_round(&store.load("a").unwrap(), 4));
}

#[test]
fn a_session_survives_folds_beside_collections_and_a_second_writer() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    drop(session(&store, "a", 0));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                store.gc().unwrap();
            }
        });
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let open = store.load("a").unwrap();
                let Ok(Some(journal)) = open.resume_turns() else { continue };
                let folded =
                    store.fold_turns("a", &journal, &Access::new(), &FoldOptions::default());
                assert!(matches!(folded, Ok(_) | Err(SaveError::Moved(_))), "{folded:?}");
            }
        });
        let appended = std::panic::catch_unwind(|| {
            let mut rounds = 0;
            while rounds < 40 {
                let open = store.load("a").unwrap();
                assert!(is_round(&open, rounds), "turn {rounds} was lost");
                let Ok(Some(mut journal)) = open.resume_turns() else { continue };
                let turn = crate::turns::next_turn(&journal, rounds + 1);
                match journal.append(&turn, None) {
                    Ok(_) => rounds += 1,
                    Err(SaveError::Moved(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        stop.store(true, Ordering::Relaxed);
        appended.unwrap();
    });
    assert!(is_round(&store.load("a").unwrap(), 40));
}

#[test]
fn all_names_of_a_session_follow_a_fold() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut older = session(&store, "a", 2);
    store.tag("b", Some(older.base())).unwrap();
    let fold = FoldOptions::default();
    let journal = store.load("b").unwrap().resume_turns().unwrap().unwrap();
    let mut folded = store.fold_turns("b", &journal, &Access::new(), &fold).unwrap();
    // A turn of the older handle would belong to neither name.
    let turn = crate::turns::next_turn(&older, 3);
    assert!(matches!(older.append(&turn, None), Err(SaveError::Moved(_))));
    append(&mut folded, 3);
    store.gc().unwrap();
    for name in ["a", "b"] {
        assert!(is_round(&store.load(name).unwrap(), 3), "{name}");
    }
}

#[test]
fn a_journal_belongs_to_the_name_that_it_was_opened_by() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut created = session(&store, "a", 2);
    store.tag("b", Some(created.base())).unwrap();
    let mut opened = store.load("a").unwrap().resume_turns().unwrap().unwrap();
    let mut other = store.load("b").unwrap().resume_turns().unwrap().unwrap();
    store.save("a", &memory(&[9]), &options()).unwrap();
    // The journal is still that of `b`, but `a` would not open with the turn.
    for outdated in [&mut created, &mut opened] {
        let turn = crate::turns::next_turn(outdated, 3);
        assert!(matches!(outdated.append(&turn, None), Err(SaveError::Moved(_))));
    }
    append(&mut other, 3);
    assert!(is_round(&store.load("b").unwrap(), 3));
}

#[test]
fn a_compaction_keeps_what_was_saved_after_its_snapshot_was_opened() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1]), &options()).unwrap();
    let opened = store.load("a").unwrap();
    let newer = store.save("a", &memory(&[2]), &options()).unwrap();
    let refused = store.compact("a", &opened, &CompactOptions::default()).unwrap_err();
    assert!(matches!(refused, SaveError::Moved(_)), "{refused}");
    let refused = store.set_working_set("a", &opened, &[]).unwrap_err();
    assert!(matches!(refused, SaveError::Moved(_)), "{refused}");
    assert_eq!(store.resolve("a").unwrap(), newer);
    // The same snapshot can get another name.
    store.compact("b", &opened, &CompactOptions::default()).unwrap();
    assert!(crate::support::bytes(&store.load("b").unwrap()) == memory(&[1]).0);
}

#[test]
fn a_compaction_compares_the_load_however_the_store_is_spelled() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1]), &options()).unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    for (root, seed) in [(dir.path().join("."), 2), (link, 3)] {
        let opened = Store::open(root).unwrap().load("a").unwrap();
        let newer = store.save("a", &memory(&[seed]), &options()).unwrap();
        let refused = store.compact("a", &opened, &CompactOptions::default()).unwrap_err();
        assert!(matches!(refused, SaveError::Moved(_)), "{refused}");
        assert_eq!(store.resolve("a").unwrap(), newer);
    }
}

#[test]
fn the_only_snapshot_can_be_compacted_as_the_latest() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1]), &options()).unwrap();
    let opened = store.load("latest").unwrap();
    let id = store.compact("latest", &opened, &CompactOptions::default()).unwrap();
    assert_eq!(store.resolve("latest").unwrap(), id);
    // `latest` is an own name now, and is compared like others.
    let opened = store.load("latest").unwrap();
    store.save("latest", &memory(&[2]), &options()).unwrap();
    let refused = store.compact("latest", &opened, &CompactOptions::default()).unwrap_err();
    assert!(matches!(refused, SaveError::Moved(_)), "{refused}");
}

#[test]
fn turns_follow_on_a_session_that_was_opened_as_the_latest() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    drop(session(&store, "a", 2));
    let mut journal = store.load("latest").unwrap().resume_turns().unwrap().unwrap();
    append(&mut journal, 3);
    assert!(is_round(&store.load("a").unwrap(), 3));
}

#[test]
fn a_compaction_of_one_name_leaves_the_session_of_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut created = session(&store, "a", 2);
    store.tag("b", Some(created.base())).unwrap();
    let mut other = store.load("b").unwrap().resume_turns().unwrap().unwrap();
    let opened = store.load("a").unwrap();
    append(&mut created, 3);
    // The turn came after the load.
    let refused = store.compact("a", &opened, &CompactOptions::default()).unwrap_err();
    assert!(matches!(refused, SaveError::Moved(_)), "{refused}");
    let opened = store.load("a").unwrap();
    store.compact("a", &opened, &CompactOptions::default()).unwrap();
    // Handles of `a` are refused. One of `b` has missed a turn.
    for outdated in [&mut created, &mut other] {
        let turn = crate::turns::next_turn(outdated, 4);
        assert!(matches!(outdated.append(&turn, None), Err(SaveError::Moved(_))));
    }
    let mut other = store.load("b").unwrap().resume_turns().unwrap().unwrap();
    append(&mut other, 4);
    store.gc().unwrap();
    assert!(is_round(&store.load("a").unwrap(), 3));
    assert!(is_round(&store.load("b").unwrap(), 4));
}

#[cfg(feature = "seal")]
#[test]
fn a_signature_never_brings_an_older_snapshot_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[0]), &options()).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let key = afresh_store::seal::SigningKey::generate().unwrap();
            while !stop.load(Ordering::Relaxed) {
                store.sign("a", &key).unwrap();
            }
        });
        let saved = std::panic::catch_unwind(|| {
            for round in 1..60 {
                let mut save = options();
                save.state = vec![round];
                store.save("a", &memory(&[round]), &save).unwrap();
                std::thread::yield_now();
                assert_eq!(store.load("a").unwrap().state(), [round], "the save was lost");
            }
        });
        stop.store(true, Ordering::Relaxed);
        saved.unwrap();
    });
}

#[test]
fn a_journal_refuses_turns_that_its_readers_would_refuse() {
    const STATE: usize = 60 << 20;
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut save = options();
    save.state = vec![7; STATE];
    store.save("a", &memory(&[1]), &save).unwrap();
    let mut journal = store.begin_turns("a", &store.load("a").unwrap(), ReplacedName::Any).unwrap();
    let append = |journal: &mut afresh_store::Journal| {
        let mut builder = afresh_store::TurnBuilder::new(1);
        builder.copy(0, 1);
        let turn = builder.finish(&save.state, &save.state, journal.last()).unwrap();
        journal.append(&turn, None)
    };
    let refused = loop {
        match append(&mut journal) {
            Ok(_) => assert!(journal.turns() < 20, "no limit was met"),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, SaveError::TooLarge { .. }), "{refused}");
    assert!(journal.is_nearly_full());
    // The session opens, knows how full it is, and can be folded.
    let open = store.load("a").unwrap();
    assert_eq!(open.turns().unwrap().count, journal.turns());
    let mut resumed = open.resume_turns().unwrap().unwrap();
    assert_eq!(resumed.states(), journal.states());
    assert!(matches!(append(&mut resumed), Err(SaveError::TooLarge { .. })));
    let fold = FoldOptions::default();
    let mut folded = store.fold_turns("a", &resumed, &Access::new(), &fold).unwrap();
    append(&mut folded).unwrap();
    assert_eq!(store.load("a").unwrap().state().len(), STATE);
}

#[test]
fn the_programs_of_all_turns_together_are_limited() {
    const PAGES: usize = 512;
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[0; PAGES]), &options()).unwrap();
    let mut journal = store.begin_turns("a", &store.load("a").unwrap(), ReplacedName::Any).unwrap();
    let state = options().state;
    for round in 1..=3 {
        let mut builder = afresh_store::TurnBuilder::new(PAGES);
        (0..PAGES).for_each(|_| builder.page(None, &[round; 4096]));
        journal.append(&builder.finish(&state, &state, journal.last()).unwrap(), None).unwrap();
    }
    assert!(journal.size() < 64 << 10, "a small file");
    let limits = |content| afresh_store::Limits { content, ..afresh_store::Limits::default() };
    let with = |content| store.load_with("a", &Access::new().with_limits(limits(content)));
    with(8 << 20).unwrap();
    let refused = with(4 << 20).unwrap_err();
    assert!(matches!(refused, afresh_store::OpenError::Limit { name: "content", .. }), "{refused}");
}

#[test]
fn a_planted_bug_of_names_is_caught() {
    afresh_sys::planted::must_be_caught(
        &[Bug::Expected],
        &["naming::a_fold_from_an_outdated_journal_is_refused"],
    );
}

/// A stranger's manifest names the journal of another session.
#[test]
fn a_journal_stays_when_a_manifest_that_it_does_not_follow_loses_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    drop(session(&store, "a", 3));
    let own = fs::read(store.blob_path(store.load("a").unwrap().id())).unwrap();
    let other = String::from_utf8(own).unwrap() + "\n";
    let id = Sha256::of(other.as_bytes());
    fs::write(store.blob_path(id), other).unwrap();
    store.tag("b", Some(id)).unwrap();
    store.untag("b").unwrap();
    assert!(is_round(&store.load("a").unwrap(), 3));
    let journal = store.load("a").unwrap().resume_turns().unwrap().unwrap();
    store.untag("a").unwrap();
    assert!(!journal.path().unwrap().exists());
}

/// A remote in the directory `there`, and a session to save there.
#[cfg(feature = "remote")]
fn directory_remote(
    dir: &std::path::Path,
) -> (afresh_store::remote::Remote, Store, afresh_store::Snapshot) {
    let (there, from) = (dir.join("there"), store(&dir.join("from")));
    fs::create_dir(&there).unwrap();
    let url = format!("file://{}", there.display());
    let remote = afresh_store::remote::Remote::open(&url, Default::default()).unwrap();
    drop(session(&from, "a", 0));
    let base = from.load("a").unwrap();
    (remote, from, base)
}

#[cfg(feature = "remote")]
#[test]
fn a_save_closes_a_session_that_was_saved_through_a_file_address() {
    use afresh_store::{Encoding, OpenError};
    use std::time::{Duration, SystemTime};
    let dir = tempfile::tempdir().unwrap();
    let (remote, from, base) = directory_remote(dir.path());
    let there = dir.path().join("there");
    for turns in [0, 2] {
        let any = ReplacedName::Any;
        let mut journal =
            remote.push_turns(&from, &base, "a", Encoding::Raw, any, &mut |_| {}).unwrap();
        (1..=turns).for_each(|rounds| append(&mut journal, rounds));
        let local = Store::open(&there).unwrap();
        if turns > 0 {
            let error = local.load("a").unwrap_err();
            assert!(matches!(error, OpenError::RemoteJournal { .. }), "{error}");
        }
        local.save("a", &memory(&[9]), &options()).unwrap();
        let late = crate::turns::next_turn(&journal, turns + 1);
        let refused = journal.append(&late, None);
        assert!(matches!(refused, Err(SaveError::Moved(_))), "{turns}: {refused:?}");
        assert!(crate::support::bytes(&remote.load("a").unwrap()) == memory(&[9]).0);
    }
    // A writer that is away learns from their last frames that they are closed.
    let local = Store::open(&there).unwrap();
    local.gc().unwrap();
    let journals = || fs::read_dir(there.join("journals")).unwrap().flatten();
    assert_eq!(journals().count(), 2);
    let long_ago = SystemTime::now() - Duration::from_secs(49 * 3600);
    for journal in journals() {
        let turns = fs::read_dir(journal.path()).unwrap().flatten().map(|turn| turn.path());
        for path in turns.chain([journal.path()]) {
            fs::File::open(path).unwrap().set_modified(long_ago).unwrap();
        }
    }
    local.gc().unwrap();
    assert_eq!(journals().count(), 0);
}

#[cfg(feature = "remote")]
#[test]
fn snapshots_that_a_fleet_names_elsewhere_are_not_collected() {
    use afresh_store::Encoding;
    let dir = tempfile::tempdir().unwrap();
    let (remote, from, base) = directory_remote(dir.path());
    let id = remote.keep(&from, &base, Encoding::Raw, &mut |_| {}).unwrap();
    remote.claim("fleet-a").unwrap();
    let other = from.save("b", &memory(&[1]), &options()).unwrap();
    let other = from.load_id(other).unwrap();
    remote.push(&from, &other, "b", Encoding::Raw, &mut |_| {}).unwrap();
    let error = Store::open(dir.path().join("there")).unwrap().gc().unwrap_err();
    assert!(error.to_string().contains("`fleet-a`"), "{error}");
    assert!(is_round(&remote.load(&id.to_string()).unwrap(), 0));
}

#[cfg(feature = "remote")]
#[test]
fn a_manifest_that_is_collected_before_it_has_a_name_gets_none() {
    use afresh_store::Encoding;
    use afresh_store::remote::RemoteError;
    let dir = tempfile::tempdir().unwrap();
    let (remote, from, base) = directory_remote(dir.path());
    let there = dir.path().join("there");
    remote.push(&from, &base, "a", Encoding::Raw, &mut |_| {}).unwrap();
    let plain = remote.load("a").unwrap();
    let blobs = || fs::read_dir(there.join("blobs/sha256")).unwrap().flatten();
    let before = blobs().count();
    // As a collection that removes the new manifest and keeps the layers, which have a name.
    let lock = fs::File::options().write(true).open(there.join(".index-lock")).unwrap();
    lock.lock().unwrap();
    std::thread::scope(|scope| {
        let begun = scope.spawn(|| remote.begin_turns("a", &plain, ReplacedName::Any).map(drop));
        while blobs().filter(|blob| !blob.file_name().to_string_lossy().contains('#')).count()
            <= before
        {
            std::thread::yield_now();
        }
        let time = |blob: &fs::DirEntry| blob.metadata().unwrap().modified().unwrap();
        fs::remove_file(blobs().max_by_key(time).unwrap().path()).unwrap();
        lock.unlock().unwrap();
        let refused = begun.join().unwrap();
        assert!(matches!(refused, Err(RemoteError::Collected)), "{refused:?}");
    });
    assert!(is_round(&remote.load("a").unwrap(), 0));
}
