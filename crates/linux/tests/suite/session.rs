//! Checkpoints, rollbacks, forks and snapshots: every state is preserved, in every host process.

use crate::common;

use std::time::Duration;

use afresh_linux::{Frozen, Incompatible, Instance, Program, ProgramState, ThawError, Warm};
use afresh_memory::PageRange;
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;
use afresh_sys::planted::{self, Bug};

fn canary() -> Option<Warm> {
    let path = common::compiled("canary.c", &["-static"])?;
    let program = Program::new(path).time_limit(Duration::from_secs(20));
    common::here(program.warm())
}

fn ask(branch: &mut Branch<Instance>, request: &str) -> String {
    let answer = branch.guest_mut().unwrap().call(request.as_bytes()).unwrap();
    String::from_utf8(answer).unwrap()
}

/// The program's view, except for the number of its calls, which each look raises.
fn look(branch: &mut Branch<Instance>) -> String {
    let text = ask(branch, "look\n");
    let rest = text.split_once(" data ").map(|(_, rest)| rest.to_owned());
    rest.unwrap_or(text)
}

#[test]
fn every_state_of_a_tree_is_what_it_was() {
    let Some(warm) = canary() else { return };
    // With the smallest budget each state is stored anew.
    for tree in [Tree::new(), Tree::with_budget(1)] {
        every_state_is_what_it_was(&warm, &tree);
    }
}

fn every_state_is_what_it_was(warm: &Warm, tree: &Tree<ProgramState>) {
    let mut line = Branch::<Instance>::from_state(tree, warm.home(), warm.state());
    let root = line.at();
    let clean = ask(&mut line, "look\n");
    assert!(clean.starts_with("calls 1 data 42 "), "{clean}");
    let looked = line.checkpoint().unwrap();
    assert_eq!(ask(&mut line, "dirty\n"), "done\n");
    let dirtied = line.checkpoint().unwrap();
    let dirty = look(&mut line);
    assert!(dirty.starts_with("1 zero 2 local 3 heap dirty map "), "{dirty}");
    // Files, descriptors and signals are part of it: cwd, a file made, one hidden, a handler.
    assert!(dirty.contains("cwd /tmp/directory file dirty at 3 made 1 new fd 0"), "{dirty}");
    assert_eq!(ask(&mut line, "scribble\n"), "done\n");
    let poked = line.checkpoint().unwrap();
    let after = look(&mut line);
    assert!(after.starts_with("97 zero 2 local 3 heap Dirty map 99 stack 98"), "{after}");
    let mut forks: Vec<_> =
        [root, looked, dirtied, poked].into_iter().map(|id| line.fork(id).unwrap()).collect();
    for round in 0..6 {
        line.rollback(dirtied).unwrap();
        assert_eq!(look(&mut line), dirty, "round {round}");
        line.rollback(root).unwrap();
        assert_eq!(ask(&mut line, "look\n"), clean, "round {round}");
        line.rollback(poked).unwrap();
        assert_eq!(look(&mut line), after, "round {round}");
        assert_eq!(ask(&mut line, "heavy\n"), "heavy\n");
        line.rollback(looked).unwrap();
        assert!(ask(&mut line, "look\n").starts_with("calls 2 data 42 "), "round {round}");
        line.guest_mut().unwrap().verify().unwrap();
    }
    let used = line.guest_mut().unwrap().stats().processes;
    assert_eq!(used, 1, "all of them were reached within one process");
    for (fork, expected) in forks.iter_mut().zip([&clean, &clean, &dirty, &after]) {
        let seen = look(fork);
        assert!(expected.ends_with(&seen), "{seen} is not of {expected}");
        fork.guest_mut().unwrap().verify().unwrap();
    }
}

#[test]
fn memory_that_was_empty_in_a_state_is_empty_again_however_often_it_is_written() {
    let Some(warm) = canary() else { return };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    assert_eq!(ask(&mut line, "reserve\n"), "done\n");
    let reserved = line.checkpoint().unwrap();
    let empty = look(&mut line);
    assert!(empty.contains(" left 0 "), "{empty}");
    for round in 0..8 {
        line.rollback(reserved).unwrap();
        assert_eq!(ask(&mut line, "scribble\n"), "done\n", "round {round}");
        assert!(look(&mut line).contains(" left 3 "), "round {round}");
        line.rollback(reserved).unwrap();
        assert_eq!(look(&mut line), empty, "round {round}");
        line.guest_mut().unwrap().verify().unwrap();
    }
    assert_eq!(line.guest_mut().unwrap().stats().processes, 1);
}

#[test]
fn a_long_line_of_checkpoints_goes_back_to_each() {
    let Some(warm) = canary() else { return };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let mut states = Vec::new();
    for round in 1..=40 {
        // Every third also changes mappings.
        let request = if round % 3 == 0 { "dirty\n" } else { "scribble\n" };
        assert_eq!(ask(&mut line, request), "done\n");
        let id = line.checkpoint().unwrap();
        // Looking also changes something.
        states.push((id, look(&mut line)));
    }
    for (id, seen) in states.iter().rev().step_by(3).chain(states.iter().step_by(7)) {
        line.rollback(*id).unwrap();
        assert_eq!(look(&mut line), *seen);
        line.rollback(*id).unwrap();
        line.guest_mut().unwrap().verify().unwrap();
    }
}

#[test]
fn dropped_checkpoints_change_no_other_state() {
    let Some(warm) = canary() else { return };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let (mut states, mut random) = (Vec::new(), 5_usize);
    for round in 1..=36 {
        let request = ["scribble\n", "dirty\n", "reserve\n", "heavy\n"][round % 4];
        ask(&mut line, request);
        let id = line.checkpoint().unwrap();
        states.push((id, look(&mut line)));
        random = (random * 37 + 11) % 1009;
        if states.len() > 4 {
            let (dropped, _) = states.swap_remove(random % states.len());
            line.drop_snapshot(dropped).unwrap();
        }
        let (id, seen) = &states[random / 7 % states.len()];
        line.rollback(*id).unwrap();
        assert_eq!(look(&mut line), *seen, "round {round}");
        line.rollback(*id).unwrap();
        line.guest_mut().unwrap().verify().unwrap();
    }
    for (id, seen) in &states {
        line.rollback(*id).unwrap();
        assert_eq!(look(&mut line), *seen);
    }
}

#[test]
fn a_call_that_was_cut_short_leaves_an_instance_that_waits_for_its_reset() {
    let Some(warm) = canary() else { return };
    let mut instance = warm.instance();
    let clean = instance.call(b"look\n").unwrap();
    for request in [&b"exit\n"[..], b"crash\n", b"abort\n"] {
        instance.call(request).unwrap_err();
        assert!(instance.needs_reset());
        let error = instance.call(b"look\n").unwrap_err().to_string();
        assert!(error.contains("reset it"), "{error}");
        instance.freeze().unwrap_err();
        assert_eq!(instance.call_pristine(b"look\n").unwrap(), clean);
    }
}

#[test]
fn planted_bugs_are_caught() {
    if canary().is_none() {
        return;
    }
    planted::must_be_caught(
        &[Bug::Freeze, Bug::Switch, Bug::Reclaim],
        &[
            "session::dropped_checkpoints_change_no_other_state",
            "session::every_state_of_a_tree_is_what_it_was",
            "session::a_long_line_of_checkpoints_goes_back_to_each",
        ],
    );
}

/// Saves `frozen`, and takes it out of the directory again.
fn through_a_file(frozen: &Frozen, name: &str) -> Frozen {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    frozen.save(&store, name, &SnapshotOptions::default()).unwrap();
    let loaded = Frozen::load(store.load(name).unwrap(), &Options::default()).unwrap();
    loaded.memory().wait(Duration::from_secs(60)).unwrap();
    assert_eq!(loaded.build(), frozen.build());
    loaded
}

#[test]
fn a_frozen_program_continues_where_it_was() {
    let Some(warm) = canary() else { return };
    let clean = warm.instance().call(b"look\n").unwrap();
    let nothing = Program::new("/");
    let thawed = Warm::thaw(&through_a_file(&warm.freeze().unwrap(), "warm"), &nothing).unwrap();
    let mut instance = thawed.instance();
    for _ in 0..3 {
        assert_eq!(instance.call_pristine(b"look\n").unwrap(), clean);
        assert_eq!(instance.call(b"dirty\n").unwrap(), b"done\n");
        instance.verify().unwrap();
    }
    // Also the state after calls.
    assert_eq!(instance.call(b"dirty\n").unwrap(), b"done\n");
    let frozen = instance.freeze().unwrap();
    let expected = instance.call(b"look\n").unwrap();
    let mut other = Warm::thaw(&through_a_file(&frozen, "dirty"), &nothing).unwrap().instance();
    assert_eq!(other.call(b"look\n").unwrap(), expected);
    assert_eq!(instance.call_pristine(b"look\n").unwrap(), clean);
    other.verify().unwrap();
}

#[test]
fn python_thaws_with_the_files_it_was_granted_and_without_them_is_refused() {
    let Some(program) = common::python() else { return };
    let script = "import sys\nsource = open(sys.__file__ if hasattr(sys, '__file__') else __import__('json').__file__)\n\
        seen = []\nfor line in sys.stdin:\n    seen.append(line.strip())\n    import string\n    \
        print(len(seen), source.tell(), string.digits, flush=True)\n";
    let program = program.arg("/app.py").file("/app.py", script).request("one\n");
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    assert_eq!(instance.call(b"two\n").unwrap(), b"2 0 0123456789\n");
    let frozen = through_a_file(&instance.freeze().unwrap(), "python");
    let mut thawed = Warm::thaw(&frozen, &program).unwrap().instance();
    for _ in 0..3 {
        assert_eq!(thawed.call_pristine(b"three\n").unwrap(), b"3 0 0123456789\n");
    }
    thawed.verify().unwrap();
    // Only files below the system's own directories are granted by default. Which program is named
    // means nothing.
    if Warm::thaw(&frozen, &Program::new("/usr/bin/python3")).is_ok() {
        println!("SKIPPED: this python is in the system's own directories");
        return;
    }
    for path in ["/usr/bin/python3", "/", "/root"] {
        let refused = Warm::thaw(&frozen, &Program::new(path));
        let Err(ThawError::Guest(Incompatible::NotGranted(named))) = refused else {
            panic!("{path}")
        };
        assert!(named.is_absolute());
    }
}

#[test]
fn a_forged_path_reads_nothing_that_was_not_granted() {
    let Some(path) = common::compiled("canary.c", &["-static"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    for directory in ["granted/aaaa", "secret"] {
        std::fs::create_dir_all(top.join(directory)).unwrap();
    }
    std::os::unix::fs::symlink(top.join("secret"), top.join("granted/bbbb")).unwrap();
    let program = Program::new(&path).grant(top.join("granted/aaaa"));
    let Some(warm) = common::here(program.warm()) else { return };
    let frozen = warm.freeze().unwrap();
    let opener = Program::new(&path).grant(top.join("granted"));
    Warm::thaw(&frozen, &opener).unwrap();
    for named in ["bbbb", "cccc"] {
        let mut bytes = frozen.bytes().unwrap();
        let at = bytes.windows(4).position(|four| four == b"aaaa").unwrap();
        bytes[at..at + 4].copy_from_slice(named.as_bytes());
        let forged = Frozen::from_parts(frozen.memory().clone(), &bytes).unwrap();
        let error = Warm::thaw(&forged, &opener).unwrap_err();
        assert!(matches!(error, ThawError::Guest(Incompatible::File { .. })), "{named}: {error}");
    }
}

#[test]
fn the_openers_limits_hold_whatever_a_snapshot_has() {
    let Some(path) = common::compiled("canary.c", &["-static"]) else { return };
    let program = Program::new(&path).memory_limit(512 << 20).file("/big", vec![7; 4 << 20]);
    let Some(warm) = common::here(program.warm()) else { return };
    let frozen = warm.freeze().unwrap();
    for (opener, limited) in [
        (Program::new(&path).memory_limit(64 << 10), "memory"),
        (Program::new(&path).storage_limit(1 << 20), "storage"),
    ] {
        let error = Warm::thaw(&frozen, &opener).unwrap_err();
        let ThawError::Guest(Incompatible::Limit { what, .. }) = &error else { panic!("{error}") };
        assert_eq!(*what, limited);
    }
    let thawed = Warm::thaw(&frozen, &Program::new(&path)).unwrap();
    thawed.instance().call(b"look\n").unwrap();
}

/// The warm canary, saved in a folder.
fn saved(warm: &Warm, with: &SnapshotOptions) -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    warm.freeze().unwrap().save(&store, "warm", with).unwrap();
    (folder, store)
}

/// A snapshot whose pages come only when touched.
fn untouched(store: &Store) -> Frozen {
    let options = Options { background: false, window: Some(1), ..Options::default() };
    Frozen::load(store.load("warm").unwrap(), &options).unwrap()
}

#[test]
fn a_thawed_program_answers_while_pages_are_still_on_their_way() {
    let Some(warm) = canary() else { return };
    let clean = warm.instance().call(b"look\n").unwrap();
    let (_folder, store) = saved(&warm, &SnapshotOptions::default());
    for request in [&b"dirty\n"[..], b"scribble\n", b"heavy\n", b"exit\n", b"crash\n"] {
        let frozen = untouched(&store);
        let thawed = Warm::thaw(&frozen, &Program::new("/")).unwrap();
        if thawed.image().is_complete() {
            println!("SKIPPED: this host fills images before they are used");
            return;
        }
        // Two at a time, which share the pages that have come.
        let (mut one, mut other) = (thawed.instance(), thawed.instance());
        for _ in 0..3 {
            assert_eq!(one.call_pristine(b"look\n").unwrap(), clean);
            assert!(!thawed.image().is_complete());
            let _ = one.call_pristine(request);
            let _ = other.call_pristine(request);
        }
        assert_eq!(other.call_pristine(b"look\n").unwrap(), clean);
        assert!(!thawed.image().is_complete());
        // Compared pages must have arrived.
        one.verify().unwrap();
        other.verify().unwrap();
        assert!(thawed.image().is_complete());
        assert_eq!(one.call_pristine(b"look\n").unwrap(), clean);
        one.verify().unwrap();
    }
}

#[test]
fn the_recorded_working_set_is_filled_before_the_next_call() {
    let Some(warm) = canary() else { return };
    let (_folder, store) = saved(&warm, &SnapshotOptions::default());
    let frozen = Frozen::record(store.load("warm").unwrap()).unwrap();
    let thawed = Warm::thaw(&frozen, &Program::new("/")).unwrap();
    if thawed.image().is_complete() {
        println!("SKIPPED: this host fills images before they are used");
        return;
    }
    let clean = thawed.instance().call(b"look\n").unwrap();
    let touched = frozen.memory().touched();
    // Its memory: the files it has written are read as a whole.
    let memory = PageRange::new(0, thawed.image().pages());
    let pages = |runs: &[PageRange]| -> usize {
        runs.iter().filter_map(|run| run.intersect(memory)).map(|run| run.len).sum()
    };
    let (few, all) = (pages(&touched), thawed.image().stored_pages());
    assert!(few > 0 && few < all / 2, "{few} of {all} pages");
    let with = SnapshotOptions { working_set: touched.clone(), ..SnapshotOptions::default() };
    let (_folder, store) = saved(&warm, &with);
    let frozen = untouched(&store);
    let before = pages(&frozen.memory().touched());
    let thawed = Warm::thaw(&frozen, &Program::new("/")).unwrap();
    assert_eq!(thawed.instance().call(b"look\n").unwrap(), clean);
    assert_eq!(pages(&frozen.memory().touched()), before);
}

/// Changes a bit in the first half of the layer: of the memory, which comes before the files.
fn damage(folder: &std::path::Path) {
    let blobs = std::fs::read_dir(folder.join("blobs/sha256")).unwrap().map(|blob| blob.unwrap());
    let layer = blobs.max_by_key(|blob| blob.metadata().unwrap().len()).unwrap().path();
    let mut bytes = std::fs::read(&layer).unwrap();
    let place = bytes.len() / 4;
    bytes[place] ^= 1;
    std::fs::remove_file(&layer).unwrap();
    std::fs::write(&layer, bytes).unwrap();
}

#[test]
fn damage_that_is_met_late_ends_the_call_and_says_so() {
    let Some(warm) = canary() else { return };
    let (folder, store) = saved(&warm, &SnapshotOptions::default());
    damage(folder.path());
    let frozen = untouched(&store);
    let thawed = match Warm::thaw(&frozen, &Program::new("/")) {
        Ok(thawed) => thawed,
        // On a busy host, pages that stream in behind the guest's back may be there first.
        Err(error) => {
            let error =
                std::error::Error::source(&error).map_or(error.to_string(), |e| e.to_string());
            return assert!(error.contains("digest"), "{error}");
        }
    };
    let mut instance = thawed.instance();
    // Somewhere between its first page and its last.
    let called = instance.call(b"look\n");
    let verified = instance.verify();
    let said = format!("{:?} {}", called.err(), verified.unwrap_err());
    assert!(said.contains("reading the image") && said.contains("digest"), "{said}");
    // The error stays, for all that share the pages.
    assert!(thawed.instance().verify().is_err());
    assert!(thawed.image().failure().is_some());
}

/// A forged state of a snapshot is refused, or becomes a harmless guest.
#[test]
fn a_snapshot_of_a_stranger_is_refused_or_harmless() {
    let Some(warm) = canary() else { return };
    let mut instance = warm.instance();
    instance.call(b"dirty\n").unwrap();
    let frozen = instance.freeze().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    frozen.save(&store, "good", &SnapshotOptions::default()).unwrap();
    let good = store.load("good").unwrap().state().to_vec();
    let mut random = 11u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as usize % below
    };
    let (mut refused, mut ran) = (0, 0);
    for round in 0..150 {
        let mut state = good.clone();
        // Registers and frames make up most of it; the checked fields are around them.
        let place = if round % 2 == 0 { next(600) } else { state.len() - 1 - next(900) };
        match next(4) {
            0 => state[place] ^= 1 << next(8),
            1 => state[place] = [0, 1, 127, 255][next(4)],
            2 => drop(state.splice(place..place, [255; 9])),
            _ => drop(state.remove(place)),
        }
        let options =
            afresh_store::SaveRequest { state, ..afresh_store::SaveRequest::new(frozen.build()) };
        store.save("bad", frozen.image(), &options).unwrap();
        let loaded = Frozen::load(store.load("bad").unwrap(), &Options::default()).unwrap();
        let limits = Program::new("/").time_limit(Duration::from_millis(300));
        match Warm::thaw(&loaded, &limits) {
            Err(_) => refused += 1,
            Ok(warm) => {
                let mut instance = warm.instance();
                let _ = instance.call(b"look\n");
                let _ = instance.verify();
                ran += 1;
            }
        }
    }
    assert!(refused > 20, "{refused} refused, {ran} ran");
    let mut other = Warm::thaw(&frozen, &Program::new("/")).unwrap().instance();
    assert!(other.call(b"look\n").unwrap().starts_with(b"calls "));
}
