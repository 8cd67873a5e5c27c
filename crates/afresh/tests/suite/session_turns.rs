//! Sessions saved turn by turn, and deltas of them, open elsewhere in the same state.

use std::path::Path;

use crate::common::{Random, WASM_PAGE, ints, machine, val, words};
use afresh::files::{Budget, Layer, Tree};
use afresh::wasm::{GuestOptions, Mode, Val};
use afresh::{Call, Guest, OpenError, Options, Reference, SaveOptions, Session, SessionError};
use afresh_sys::planted::{self, Bug};

/// Everything that a state of a module can hold: memory that grows, globals, a table that grows, a
/// segment that is dropped, files.
const GUEST: &str = r#"(module
    (import "wasi_snapshot_preview1" "path_open"
        (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
    (memory (export "memory") 3 40)
    (memory $second 1 8)
    (global $g (mut i64) (i64.const 5))
    (global $v (mut v128) (v128.const i64x2 1 2))
    (table $t 4 12 funcref)
    (type $f (func (result i32)))
    (data (i32.const 100) "log")
    (data (i32.const 200) "0123456789")
    (data $d "hello")
    (elem declare func $one)
    (func $one (result i32) (i32.const 1))
    (func (export "warm") (result i32)
        (call $open (i32.const 3) (i32.const 0) (i32.const 100) (i32.const 3) (i32.const 1)
            (i64.const 0x1fffffff) (i64.const 0) (i32.const 1) (i32.const 8)))
    (func (export "log") (param i32) (result i32)
        (i32.store (i32.const 16) (i32.const 200))
        (i32.store (i32.const 20) (local.get 0))
        (call $write (i32.load (i32.const 8)) (i32.const 16) (i32.const 1) (i32.const 24)))
    (func (export "fill") (param i32 i32 i32)
        (memory.fill (local.get 0) (local.get 1) (local.get 2)))
    (func (export "fill_second") (param i32 i32 i32)
        (memory.fill $second (local.get 0) (local.get 1) (local.get 2)))
    (func (export "set") (param i64)
        (global.set $g (local.get 0))
        (global.set $v (i64x2.splat (local.get 0))))
    (func (export "get") (result i64)
        (i64.add (global.get $g) (i64x2.extract_lane 1 (global.get $v))))
    (func (export "put") (param i32) (table.set $t (local.get 0) (ref.func $one)))
    (func (export "at") (param i32) (result i32)
        (if (ref.is_null (table.get $t (local.get 0))) (then (return (i32.const 0))))
        (call_indirect $t (type $f) (local.get 0)))
    (func (export "grow") (param i32) (result i32) (memory.grow (local.get 0)))
    (func (export "size") (result i32) (memory.size))
    (func (export "grow_second") (param i32) (result i32) (memory.grow $second (local.get 0)))
    (func (export "size_second") (result i32) (memory.size $second))
    (func (export "load_second") (param i32) (result i64) (i64.load $second (local.get 0)))
    (func (export "grow_table") (param i32) (result i32)
        (table.grow $t (ref.func $one) (local.get 0)))
    (func (export "table_size") (result i32) (table.size $t))
    (func (export "init") (param i32) (memory.init $d (local.get 0) (i32.const 0) (i32.const 5)))
    (func (export "drop") (data.drop $d)))"#;

fn guest() -> Guest {
    guest_of(Tree::new(Budget::default()))
}

fn guest_of(files: Tree) -> Guest {
    let wasm = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
    let options = Options::new().wasm(wasm).files(files);
    let options = options.warm(Call::text("warm", [""; 0]));
    Guest::from_bytes("everything", &wat::parse_str(GUEST).unwrap(), &options).unwrap()
}

fn open(reference: &Reference) -> Guest {
    let wasm = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
    afresh::open(reference.to_string(), &Options::new().wasm(wasm)).unwrap()
}

/// All that can be seen of a session.
#[derive(Clone, PartialEq, Debug)]
struct SessionState {
    bytes: Vec<u8>,
    second: Vec<i64>,
    global: i64,
    table: Vec<i64>,
    dropped: bool,
    files: Vec<(String, Vec<u8>)>,
}

/// Looks at a fork, since looking leaves traces.
fn look(session: &mut Session) -> SessionState {
    let session = &mut session.fork(1).unwrap()[0];
    let size = val(session, "size", &[]).unwrap() as usize;
    let mut bytes = vec![0; size * WASM_PAGE];
    session
        .with(|lease| {
            lease.as_module().unwrap().read_memory(0, &mut bytes).unwrap();
            Ok::<_, SessionError>(())
        })
        .unwrap();
    let second = val(session, "size_second", &[]).unwrap() as usize * WASM_PAGE;
    let second = (0..second / 512).map(|n| val(session, "load_second", &ints([n * 512])).unwrap());
    let second = second.collect();
    let global = val(session, "get", &[]).unwrap();
    let entries = val(session, "table_size", &[]).unwrap() as usize;
    let table = (0..entries).map(|at| val(session, "at", &ints([at])).unwrap()).collect();
    let files = session.files().unwrap();
    let names: Vec<String> = files
        .list("/")
        .unwrap()
        .iter()
        .map(|it| String::from_utf8_lossy(&it.name).into())
        .collect();
    let files = names.into_iter().map(|name| {
        let bytes = files.read(&name).unwrap();
        (name, bytes)
    });
    let files = files.collect();
    let dropped = val(session, "init", &ints([1000])).is_err();
    SessionState { bytes, second, global, table, dropped, files }
}

/// Changes something.
fn change(session: &mut Session, random: &mut Random) {
    let size = val(session, "size", &[]).unwrap() as usize * WASM_PAGE;
    match random.below(12) {
        0..=3 => {
            // Not what the guest keeps of its files.
            let at = 4096 + random.below(size - 4096);
            let len = random.below(9000).min(size - at);
            val(session, "fill", &ints([at, random.below(4), len])).unwrap();
        }
        4 => {
            let at = random.below(WASM_PAGE - 50);
            val(session, "fill_second", &ints([at, random.below(9), 40])).unwrap();
        }
        5 => drop(val(session, "set", &[Val::I64(random.below(1 << 40) as i64)]).unwrap()),
        6 => drop(val(session, "put", &ints([random.below(4)])).unwrap()),
        7 => drop(val(session, "grow", &ints([random.below(3)])).unwrap()),
        8 => drop(val(session, "grow_second", &ints([1])).unwrap()),
        9 => drop(val(session, "grow_table", &ints([1])).unwrap()),
        10 if random.below(4) == 0 => drop(val(session, "drop", &[]).unwrap()),
        10 => drop(val(session, "log", &ints([1 + random.below(9)])).unwrap()),
        _ => {
            let name = format!("f{}", random.below(5));
            let mut files = session.files().unwrap();
            match random.below(4) {
                0 => drop(files.remove(&name)),
                size => files.write(&name, &vec![random.below(200) as u8; size * 3000]).unwrap(),
            }
        }
    }
}

fn reference(dir: &Path, name: &str) -> Reference {
    format!("{}@{name}", dir.join("store").display()).parse().unwrap()
}

fn remote(dir: &Path, name: &str) -> Reference {
    let there = dir.join("remote");
    std::fs::create_dir_all(&there).unwrap();
    format!("file://{}@{name}", there.display()).parse().unwrap()
}

const ELSEWHERE: &str = "AFRESH_TEST_OPEN_ELSEWHERE";

/// The state that another process sees, in short.
fn digest(seen: &SessionState) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    format!("{seen:?}").hash(&mut hasher);
    format!("seen {:x}", hasher.finish())
}

#[test]
fn a_session_opens_as_it_was_saved_after_any_history() {
    if let Some(reference) = std::env::var_os(ELSEWHERE) {
        let reference = reference.into_string().unwrap().parse().unwrap();
        println!("{}", digest(&look(&mut open(&reference).session().unwrap())));
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // Files of the guest, which may be over a layer that the next reader does not have.
    let below = dir.path().join("below");
    std::fs::write(&below, vec![7; 50_000]).unwrap();
    let layer = Layer::file(&below, "f3").unwrap();
    let over = Tree::new(Budget::default()).with_layer("/", &layer).unwrap();
    for seed in 1..=3 {
        let guest = guest_of(if seed == 1 { Tree::new(Budget::default()) } else { over.clone() });
        let mut random = Random(seed * 1001);
        let to = match seed == 3 && cfg!(feature = "remote") {
            true => remote(dir.path(), "s3"),
            false => reference(dir.path(), &format!("s{seed}")),
        };
        let mut session = guest.session().unwrap();
        let mut states = vec![session.at()];
        let mut reopened = false;
        for turn in 0..14 {
            for _ in 0..1 + random.below(3) {
                change(&mut session, &mut random);
            }
            match random.below(6) {
                0 => states.push(session.checkpoint("kept").unwrap()),
                1 => drop(session.rollback(states[random.below(states.len())]).unwrap()),
                // A fork of a session that continues from disk is another session of that name.
                2 if !reopened => session = session.fork(1).unwrap().remove(0),
                // Continues from disk.
                3 if turn > 3 => {
                    session = open(&to).session().unwrap();
                    states = vec![session.at()];
                    reopened = true;
                }
                _ => {}
            }
            let saved = session.save_turn(&to, &SaveOptions::new()).unwrap();
            let here = look(&mut session);
            let there = look(&mut open(&to).session().unwrap());
            assert_eq!(here.bytes.len(), there.bytes.len());
            assert!(here == there, "seed {seed}, turn {turn}: {saved:?}");
        }
        let child = afresh_sys::test_command(
            "session_turns::a_session_opens_as_it_was_saved_after_any_history",
        )
        .env(ELSEWHERE, to.to_string())
        .output()
        .unwrap();
        let said = String::from_utf8_lossy(&child.stdout).into_owned();
        assert!(said.contains(&digest(&look(&mut session))), "{said}");
    }
}

#[test]
fn planted_bugs_of_saved_sessions_are_caught() {
    planted::must_be_caught(
        &[Bug::Patch, Bug::Turn, Bug::PageOrigins],
        &["session_turns::a_session_opens_as_it_was_saved_after_any_history"],
    );
}

#[test]
fn a_turn_costs_what_it_changed_and_many_turns_are_folded() {
    let dir = tempfile::tempdir().unwrap();
    let guest = guest();
    let to = reference(dir.path(), "a");
    let mut session = guest.session().unwrap();
    let at = |turn: usize| 4096 + turn * 4001 % 90_000;
    let mut most = 0;
    let (mut folds, mut base) = (0, None);
    for turn in 0..600 {
        val(&mut session, "fill", &ints([at(turn), turn % 250 + 1, 30])).unwrap();
        let saved = session.save_turn(&to, &SaveOptions::new()).unwrap();
        most = most.max(saved.bytes);
        folds += usize::from(base.is_some_and(|base| base != saved.id));
        base = Some(saved.id);
        assert!(saved.turns <= 256, "{saved:?}");
    }
    assert!(most < 700, "a turn took {most} bytes");
    assert!(folds >= 2, "{folds}");
    assert!(session.tree().len() <= 2, "turns leave nothing in the tree: {:?}", session.tree());
    let mut again = open(&to).session().unwrap();
    assert!(look(&mut again) == look(&mut session));
    let journals = std::fs::read_dir(dir.path().join("store/journals")).unwrap().count();
    assert_eq!(journals, 1, "folded journals are gone");

    // Two sessions continue from one state: the first wins, the second gets an error.
    val(&mut again, "fill", &ints([5000, 9, 9])).unwrap();
    again.save_turn(&to, &SaveOptions::new()).unwrap();
    val(&mut session, "fill", &ints([6000, 9, 9])).unwrap();
    let error = session.save_turn(&to, &SaveOptions::new()).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("somebody else"), "{cause}");
    assert!(look(&mut open(&to).session().unwrap()) == look(&mut again));
    // Under another name it continues.
    let other = reference(dir.path(), "b");
    session.save_turn(&other, &SaveOptions::new()).unwrap();
    val(&mut session, "fill", &ints([7000, 9, 9])).unwrap();
    session.save_turn(&other, &SaveOptions::new()).unwrap();
    assert!(look(&mut open(&other).session().unwrap()) == look(&mut session));
}

/// One number more in the memory of a session.
fn write_once(session: &mut Session, number: usize) {
    val(session, "fill", &ints([4096 + number * 40, number % 250 + 1, 30])).unwrap();
}

#[test]
fn a_session_in_a_directory_is_saved_by_one_writer_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let options = SaveOptions::new();
    let whole = SaveOptions::new().encoding(afresh::Encoding::Zstd);
    for (name, turns) in [("plain", 0), ("turns", 3)] {
        let to = reference(dir.path(), name);
        let mut first = guest().session().unwrap();
        first.save(&to, &options).unwrap();
        for number in 0..turns {
            write_once(&mut first, number);
            first.save_turn(&to, &options).unwrap();
        }
        let (mut next, mut late) = (open(&to).session().unwrap(), open(&to).session().unwrap());
        // One writer may use several names, and save whole between its turns.
        let other = reference(dir.path(), "other");
        for number in 3..6 {
            write_once(&mut next, number);
            next.save_turn(&to, &options).unwrap();
            next.save_turn(&other, &options).unwrap();
            write_once(&mut next, number + 10);
            next.save_turn(&to, &options).unwrap();
            next.save(&to, &options).unwrap();
        }
        write_once(&mut next, 6);
        next.save_turn(&to, &options).unwrap();
        // Sessions of an earlier state are refused, however they save turns.
        for options in [&options, &whole, &options] {
            write_once(&mut late, 200);
            late.save_turn(&to, options).unwrap_err();
        }
        assert!(look(&mut open(&to).session().unwrap()) == look(&mut next));
        write_once(&mut next, 7);
        next.save_turn(&to, &options).unwrap();
        assert!(look(&mut open(&to).session().unwrap()) == look(&mut next));
    }
}

#[cfg(feature = "remote")]
#[test]
fn a_session_in_a_remote_is_saved_by_one_writer_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let options = SaveOptions::new();
    let to = remote(dir.path(), "a");
    let mut first = guest().session().unwrap();
    for number in 0..4 {
        write_once(&mut first, number);
        first.save_turn(&to, &options).unwrap();
    }
    // A session that was opened with turns is saved whole once they are many, in place of them.
    let (mut next, mut late) = (open(&to).session().unwrap(), open(&to).session().unwrap());
    let (mut whole, mut most) = (0, 0);
    for number in 4..150 {
        write_once(&mut next, number);
        let saved = next.save_turn(&to, &options).unwrap();
        whole += usize::from(saved.turns == 0);
        most = most.max(saved.turns);
    }
    assert!(whole == 2 && most <= 64, "{whole} {most}");
    let seen = look(&mut next);
    assert!(look(&mut open(&to).session().unwrap()) == seen);
    // Sessions of an earlier state are refused, however they save.
    for session in [&mut first, &mut late] {
        for _ in 0..2 {
            write_once(session, 200);
            session.save_turn(&to, &options).unwrap_err();
        }
    }
    let whole = SaveOptions::new().encoding(afresh::Encoding::Zstd);
    open(&to).session().unwrap().save_turn(&to, &whole).unwrap();
    late.save_turn(&to, &whole).unwrap_err();
    assert!(look(&mut open(&to).session().unwrap()) == seen);
    // One writer may use several names, and replaces its own meanings.
    let other = remote(dir.path(), "b");
    let mut session = open(&to).session().unwrap();
    for number in 0..3 {
        write_once(&mut session, number);
        session.save_turn(&to, &options).unwrap();
        session.save_turn(&other, &options).unwrap();
        session.save(&to, &options).unwrap();
    }
    assert!(look(&mut open(&other).session().unwrap()) == look(&mut session));
}

#[cfg(feature = "remote")]
#[test]
fn a_session_is_saved_on_in_a_remote_that_failed_to_answer() {
    let dir = tempfile::tempdir().unwrap();
    let options = SaveOptions::new();
    let to = remote(dir.path(), "a");
    let mut session = guest().session().unwrap();
    for number in 0..2 {
        write_once(&mut session, number);
        session.save_turn(&to, &options).unwrap();
    }
    let (turns, aside) = (dir.path().join("remote/journals"), dir.path().join("aside"));
    for number in 2..6 {
        // The place of the turns is a file.
        std::fs::rename(&turns, &aside).unwrap();
        std::fs::write(&turns, "").unwrap();
        for part in 0..2 {
            write_once(&mut session, number * 10 + part);
            session.save_turn(&to, &options).unwrap_err();
        }
        std::fs::remove_file(&turns).unwrap();
        std::fs::rename(&aside, &turns).unwrap();
        write_once(&mut session, number);
        session.save_turn(&to, &options).unwrap();
        assert!(look(&mut open(&to).session().unwrap()) == look(&mut session));
    }
}

#[test]
fn a_failed_fold_is_reported_and_loses_no_turn() {
    let dir = tempfile::tempdir().unwrap();
    let guest = guest();
    let to = reference(dir.path(), "a");
    let mut session = guest.session().unwrap();
    let turn = |session: &mut Session, turn: usize| {
        val(session, "fill", &ints([4096 + turn, turn % 250 + 1, 1])).unwrap();
        session.save_turn(&to, &SaveOptions::new()).unwrap()
    };
    turn(&mut session, 0);
    // A fold takes this lock, and an append does not.
    let lock = dir.path().join("store/blobs/sha256/.blob-lock");
    let lock = if lock.exists() { lock } else { dir.path().join("store/.blob-lock") };
    std::fs::remove_file(&lock).unwrap();
    std::fs::create_dir(&lock).unwrap();
    let mut turns = 0;
    while session.fold_error().is_none() {
        turns = turn(&mut session, turns + 1).turns;
        assert!(turns < 300, "no fold was tried");
    }
    assert_eq!(turn(&mut session, turns + 1).turns, turns + 1, "further turns are saved");
    std::fs::remove_dir(&lock).unwrap();
    assert!(look(&mut open(&to).session().unwrap()) == look(&mut session));
    turn(&mut session, turns + 2);
    assert!(session.fold_error().is_none(), "the next turn folds: {:?}", session.fold_error());
    assert_eq!(turn(&mut session, turns + 3).turns, 1);
    assert!(look(&mut open(&to).session().unwrap()) == look(&mut session));
}

#[test]
fn a_delta_applies_to_an_equal_state_and_to_no_other() {
    // Two that warm up for themselves have files of different times.
    let dir = tempfile::tempdir().unwrap();
    let warm = reference(dir.path(), "warm");
    guest().save(&warm, &SaveOptions::new()).unwrap();
    let (one, two) = (open(&warm), open(&warm));
    let mut random = Random(4242);
    let mut here = one.session().unwrap();
    (0..6).for_each(|_| change(&mut here, &mut random));
    let first = here.delta(one.session().unwrap().at()).unwrap_err();
    assert!(matches!(first, SessionError::Tree(_)), "another tree's state: {first}");
    let root = here.tree()[0].id;
    let first = here.delta(root).unwrap();
    let clean = here.checkpoint("clean").unwrap();
    (0..6).for_each(|_| change(&mut here, &mut random));
    let second = here.delta(clean).unwrap();

    // In another guest out of the same snapshot.
    let mut there = two.apply(&first).unwrap();
    let mut fork = here.fork(1).unwrap().remove(0);
    fork.rollback(clean).unwrap();
    assert!(look(&mut there) == look(&mut fork));
    there.apply(&second).unwrap();
    assert!(look(&mut there) == look(&mut here));
    // It continues from there, and back.
    change(&mut there, &mut random);
    there
        .save_turn(&reference(tempfile::tempdir().unwrap().path(), "x"), &SaveOptions::new())
        .unwrap();

    let before = look(&mut there);
    for (what, bytes) in [("again", second.clone()), ("from the root", first.clone())] {
        let error = there.apply(&bytes).unwrap_err();
        assert!(matches!(error, SessionError::Delta(_)), "{what}: {error}");
    }
    for at in (0..first.len()).step_by(7) {
        let mut bytes = first.clone();
        bytes[at] ^= 0x10;
        assert!(two.apply(&bytes).is_err(), "byte {at}");
        assert!(two.apply(&bytes[..at]).is_err(), "cut at {at}");
    }
    assert!(look(&mut there) == before);
    let other = Guest::from_bytes(
        "other",
        &wat::parse_str("(module (memory 1) (func (export \"f\")))").unwrap(),
        &Options::new(),
    );
    assert!(other.unwrap().apply(&first).is_err());
}

#[test]
fn a_program_is_saved_turn_by_turn() {
    let Some(path) = ["/usr/bin/sed", "/bin/sed"].into_iter().find(|it| Path::new(it).exists())
    else {
        println!("SKIPPED: no sed");
        return;
    };
    let options = || Options::new().linux(|program| program.arg("-u").arg("="));
    let guest = match afresh::open(path, &options()) {
        Ok(guest) => guest,
        Err(OpenError::Guest { source, .. }) if source.to_string().contains("this host") => {
            println!("SKIPPED: {source}");
            return;
        }
        Err(error) => panic!("{error:?}"),
    };
    let dir = tempfile::tempdir().unwrap();
    let to = reference(dir.path(), "p");
    let mut session = guest.session().unwrap();
    for turn in 1..8 {
        let line = format!("{turn}\nturn {turn}\n");
        assert_eq!(session.call("", format!("turn {turn}\n").as_bytes()).unwrap(), line.as_bytes());
        let saved = session.save_turn(&to, &SaveOptions::new()).unwrap();
        let there = afresh::open(to.to_string(), &options()).unwrap();
        let next = format!("{}\nx\n", turn + 1);
        assert_eq!(there.call("", b"x\n").unwrap(), next.as_bytes(), "{saved:?}");
    }
    let root = session.tree()[0].id;
    let delta = session.delta(root).unwrap();
    assert_eq!(guest.apply(&delta).unwrap().call("", b"x\n").unwrap(), b"8\nx\n");
    assert_eq!(session.call("", b"x\n").unwrap(), b"8\nx\n");
}

#[test]
fn a_micro_vm_is_saved_turn_by_turn() {
    let Some(dirty) = machine::find("dirty") else { return };
    let guest = afresh::open(dirty.display().to_string(), &Options::new().memory(4 << 20)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let to = reference(dir.path(), "m");
    let mut session = guest.session().unwrap();
    let sum = |guest: &Guest| {
        let sum = guest.call("", &words(&[2, 0, 20, 1])).unwrap();
        u64::from_le_bytes(sum.try_into().unwrap())
    };
    for value in 1..6 {
        session.call("", &words(&[1, 0, 20, 1, value])).unwrap();
        let saved = session.save_turn(&to, &SaveOptions::new()).unwrap();
        let there = afresh::open(to.to_string(), &Options::new()).unwrap();
        assert_eq!(sum(&there), 20 * value);
        assert!(value == 1 || saved.bytes < 4000, "{saved:?}");
    }
    let root = session.tree()[0].id;
    let mut again = guest.apply(&session.delta(root).unwrap()).unwrap();
    let found = again.call("", &words(&[2, 0, 20, 1])).unwrap();
    assert_eq!(u64::from_le_bytes(found.try_into().unwrap()), 100);
}

/// This process's proportional share of memory, in KiB.
fn pss_kib() -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find(|line| line.starts_with("Pss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_thousand_forks_cost_at_most_twice_the_pages_that_they_changed() {
    // The memory of other tests would count as well.
    afresh_sys::run_isolated(
        "session_turns::a_thousand_forks_cost_at_most_twice_the_pages_that_they_changed",
        || {
            let wasm = wat::parse_str(
                r#"(module (memory 1024)
                (func (export "fill") (param i32 i32 i32)
                    (memory.fill (local.get 0) (local.get 1) (local.get 2))))"#,
            );
            let guest = Guest::from_bytes("large", &wasm.unwrap(), &Options::new()).unwrap();
            let mut session = guest.session().unwrap();
            val(&mut session, "fill", &ints([0, 7, 64 << 20])).unwrap();
            session.checkpoint("full").unwrap();
            let before = pss_kib();
            let mut forks = session.fork(1000).unwrap();
            for (number, fork) in forks.iter_mut().enumerate() {
                for page in 0..10 {
                    val(fork, "fill", &ints([(number + page * 500) * 4096, number, 9])).unwrap();
                }
            }
            let cost = pss_kib().saturating_sub(before);
            println!("a thousand forks cost {cost} KiB for 40000 KiB of pages");
            assert!(
                cost <= 2 * 1000 * 40,
                "a thousand forks cost {cost} KiB, twice the pages are 80000"
            );
        },
    );
}
