//! A matrix of crashes: each operation that changes a name dies at each of its steps, during a
//! collection, a fold and saves of another writer. Every acknowledged state opens afterwards, and
//! the store can be used.

mod full_disk;
#[cfg(feature = "remote")]
mod servers;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;

use crate::support::{memory, options, store};
#[cfg(feature = "remote")]
use crate::turns::round;
use crate::turns::{append, is_round, session};
#[cfg(feature = "remote")]
use afresh_store::MemoryPages;
use afresh_store::{Access, CompactOptions, FoldOptions, ReplacedName, Snapshot, Store, archive};
use afresh_sys::{crash, power};

const CHILD: &str = "AFRESH_TEST_CRASH";
/// Holds the number of the other writer's last acknowledged save.
const ACKNOWLEDGED: &str = "../acknowledged";
const ROUNDS: usize = 3;
/// An archive of the session, which `export` writes again.
const ARCHIVE: &str = "a.afresh";

/// An operation on the session `a`, and the number of turns that it has afterwards.
type Operation = (&'static str, fn(&Store, &Snapshot), usize);

const OPERATIONS: &[Operation] = &[
    (
        "append",
        |_, open| append(&mut open.resume_turns().unwrap().unwrap(), ROUNDS + 1),
        ROUNDS + 1,
    ),
    (
        "fold",
        |store, open| {
            let journal = open.resume_turns().unwrap().unwrap();
            drop(store.fold_turns("a", &journal, &Access::new(), &FoldOptions::default()).unwrap());
        },
        ROUNDS,
    ),
    ("begin", |store, open| drop(store.begin_turns("a", open, ReplacedName::Any).unwrap()), ROUNDS),
    (
        "compact",
        |store, open| {
            store.compact("a", open, &CompactOptions::default()).unwrap();
        },
        ROUNDS,
    ),
    (
        "working set",
        |store, open| {
            store.set_working_set("a", open, &[afresh_sys::PageRange::new(1, 2)]).unwrap();
        },
        ROUNDS,
    ),
    (
        "save",
        |store, open| {
            let mut save = options();
            save.state = open.state().to_vec();
            save.options.parent = Some(open.clone());
            store.save("a", open, &save).unwrap();
        },
        ROUNDS,
    ),
    (
        // As many blobs as a save writes before its first sync.
        "save with a working set",
        |store, open| {
            let mut save = options();
            save.state = open.state().to_vec();
            save.options.parent = Some(open.clone());
            save.options.working_set = vec![afresh_sys::PageRange::new(0, 2)];
            store.save("a", open, &save).unwrap();
        },
        ROUNDS,
    ),
    ("untag", |store, _| assert!(store.untag("second").is_ok()), ROUNDS),
    ("tag", |store, open| store.tag("b", Some(open.id())).unwrap(), ROUNDS),
    (
        "import",
        |store, _| assert!(archive::import(&store.root().join(ARCHIVE), store, "a").is_ok()),
        ROUNDS,
    ),
    (
        "export",
        |store, open| archive::export(open, &store.root().join(ARCHIVE), Some("a")).unwrap(),
        ROUNDS,
    ),
    ("gc", |store, _| assert!(store.gc().unwrap().kept > 0), ROUNDS),
    #[cfg(feature = "seal")]
    (
        "sign",
        |store, _| {
            store.sign("plain", &afresh_store::seal::SigningKey::generate().unwrap()).unwrap();
        },
        ROUNDS,
    ),
];

/// Operations between the store and a remote.
#[cfg(feature = "remote")]
const TRANSFERS: &[Operation] = &[
    (
        "push",
        |store, open| {
            let encoding = afresh_store::Encoding::Zstd;
            remote(store).push(store, open, "a", encoding, &mut |_| {}).unwrap();
        },
        ROUNDS,
    ),
    (
        "push turns",
        |store, open| {
            let encoding = afresh_store::Encoding::Raw;
            drop(
                remote(store)
                    .push_turns(store, open, "a", encoding, ReplacedName::Any, &mut |_| {})
                    .unwrap(),
            );
        },
        ROUNDS,
    ),
    (
        "pull",
        |store, _| {
            let encoding = afresh_store::Encoding::Raw;
            remote(store).pull(store, "first", "pulled", encoding, &mut |_| {}).unwrap();
        },
        ROUNDS,
    ),
    (
        "remote append",
        |store, _| {
            let open = remote(store).load(SESSION).unwrap();
            append(&mut open.resume_turns().unwrap().unwrap(), ROUNDS + 1);
        },
        ROUNDS,
    ),
    (
        "remote fold",
        |store, open| {
            let journal = remote(store).load(SESSION).unwrap().resume_turns().unwrap().unwrap();
            let encoding = afresh_store::Encoding::Raw;
            let replaced = ReplacedName::Journal(&journal);
            let folded =
                remote(store).push_turns(store, open, SESSION, encoding, replaced, &mut |_| {});
            drop(folded.unwrap());
        },
        ROUNDS,
    ),
    (
        "remote gc",
        |store, _| {
            let collected = remote(store).gc(None, afresh_store::remote::GRACE_PERIOD).unwrap();
            assert!(collected.kept > 0 && collected.files > 0);
        },
        ROUNDS,
    ),
];

/// Local operations that die while another thread pushes.
#[cfg(feature = "remote")]
const BESIDE_PUSHES: [&str; 5] = ["append", "fold", "compact", "save", "gc"];

/// Name of a session in the remote, which has turns there.
#[cfg(feature = "remote")]
const SESSION: &str = "turns";

/// Name of a file next to the store: the URL of its remote on a server, then options, one a line.
#[cfg(feature = "remote")]
const ADDRESS: &str = "address";

/// The remote of a store: on a server if it has such an address, else in a directory.
#[cfg(feature = "remote")]
fn remote(store: &Store) -> afresh_store::remote::Remote {
    let beside = store.root().parent().unwrap();
    let in_directory = || format!("file://{}", beside.join("remote").display());
    let address = fs::read_to_string(beside.join(ADDRESS)).unwrap_or_else(|_| in_directory());
    let mut lines = address.lines();
    let url = lines.next().unwrap();
    let options: Vec<_> = lines.map(|line| line.split_once('=').unwrap()).collect();
    afresh_store::remote::Remote::open_with(url, Default::default(), &options).unwrap()
}

/// Pushes the session under two names, and once more with turns to follow. The remote has objects
/// without a name then, old enough for a collection.
#[cfg(feature = "remote")]
fn push_first(store: &Store) {
    let encoding = afresh_store::Encoding::Raw;
    std::fs::create_dir_all(store.root().parent().unwrap().join("remote")).unwrap();
    let (open, remote) = (store.load("a").unwrap(), remote(store));
    let other = store.load("plain").unwrap();
    let begin = |snapshot: &Snapshot| {
        let any = ReplacedName::Any;
        remote.push_turns(store, snapshot, SESSION, encoding, any, &mut |_| {}).unwrap()
    };
    for (name, snapshot) in [("first", &other), ("first", &open), ("a", &open)] {
        remote.push(store, snapshot, name, encoding, &mut |_| {}).unwrap();
    }
    let (pages, state) = round(0);
    let mut save = options();
    save.state = state;
    store.save("turnless", &MemoryPages(pages), &save).unwrap();
    let turnless = store.load("turnless").unwrap();
    for rounds in [1, ROUNDS] {
        let mut journal = begin(&turnless);
        (1..=rounds).for_each(|rounds| append(&mut journal, rounds));
    }
    age_remote(store);
}

/// Makes all objects of the remote older than the grace of a collection.
#[cfg(feature = "remote")]
fn age_remote(store: &Store) {
    let long_ago = std::time::SystemTime::now() - 2 * afresh_store::remote::GRACE_PERIOD;
    let mut folders = vec![store.root().parent().unwrap().join("remote")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true => folders.push(entry.path()),
                false => {
                    let file = File::options().append(true).open(entry.path()).unwrap();
                    file.set_modified(long_ago).unwrap();
                }
            }
        }
    }
}

/// Names of another writer in the remote.
#[cfg(feature = "remote")]
fn push_others(store: &Store) {
    for round in (0..=u8::MAX).cycle() {
        store.save("sent", &memory(&[round, 7]), &options()).unwrap();
        let open = store.load("sent").unwrap();
        let name = format!("other{}", round % 3);
        let encoding = afresh_store::Encoding::Raw;
        remote(store).push(store, &open, &name, encoding, &mut |_| {}).unwrap();
    }
}

/// Checks that every name in the remote opens, before and after a collection of everything that a
/// crash left, and that the session there accepts turns.
#[cfg(feature = "remote")]
fn check_remote(store: &Store, operation: &str, done: bool) {
    let remote = remote(store);
    let check = || {
        for name in ["first", "a"] {
            assert!(is_round(&remote.load(name).unwrap(), ROUNDS), "{operation}: {name}");
        }
        for tag in remote.tags().unwrap() {
            remote.load(&tag.name).unwrap().verify().unwrap();
        }
        let session = remote.load(SESSION).unwrap();
        let is_appended = is_round(&session, ROUNDS + 1);
        assert!(is_appended || is_round(&session, ROUNDS), "{operation}");
        assert!(!done || is_appended == (operation == "remote append"), "{operation}");
        (session, ROUNDS + usize::from(is_appended))
    };
    let (session, rounds) = check();
    age_remote(store);
    let grace = afresh_store::remote::GRACE_PERIOD;
    remote.gc(None, grace).unwrap();
    assert_eq!(remote.gc(None, grace).unwrap().files, 0, "{operation}");
    assert_eq!(check().1, rounds, "{operation}");
    let mut journal = session.resume_turns().unwrap().unwrap();
    // A fold closes the journal before the name means its result.
    if journal.is_nearly_full() {
        let (encoding, replaced) = (afresh_store::Encoding::Raw, ReplacedName::Journal(&journal));
        let again = remote.push_turns(store, &session, SESSION, encoding, replaced, &mut |_| {});
        journal = again.unwrap();
    }
    append(&mut journal, rounds + 1);
    assert!(is_round(&remote.load(SESSION).unwrap(), rounds + 1), "{operation}");
}

/// Runs the operation in this process, which dies at step `at` if there are so many.
fn crash(dir: &Path, operation: Operation, at: usize) -> ! {
    let store = Store::open(dir).unwrap();
    let open = store.load("a").unwrap();
    #[cfg(feature = "remote")]
    if dir.with_file_name("remote").exists() {
        let others = store.clone();
        std::thread::spawn(move || push_others(&others));
    }
    start_others(&store);
    crash::arm(at);
    operation.1(&store, &open);
    crash::disarm();
    std::process::exit(77);
}

/// As [`crash`] without another writer. The syncs of the process are recorded.
fn lose_power(dir: &Path, operation: Operation, at: usize) -> ! {
    let store = Store::open(dir).unwrap();
    let open = store.load("a").unwrap();
    power::record(dir, &dir.join("../record")).unwrap();
    crash::arm(at);
    operation.1(&store, &open);
    crash::disarm();
    std::process::exit(77);
}

/// A collection, and another writer with a separate session and snapshot.
fn start_others(store: &Store) {
    let others = store.clone();
    std::thread::spawn(move || {
        loop {
            others.gc().unwrap();
        }
    });
    let others = store.clone();
    std::thread::spawn(move || {
        let acknowledged = File::create(others.root().join(ACKNOWLEDGED)).unwrap();
        for round in 0_u32.. {
            let mut save = options();
            save.state = round.to_le_bytes().to_vec();
            others.save("other", &memory(&[round as u8, 1]), &save).unwrap();
            acknowledged.write_all_at(&save.state, 0).unwrap();
            let plain = others.load("long").unwrap();
            let journal = plain.resume_turns().unwrap().unwrap();
            let fold = FoldOptions::default();
            drop(others.fold_turns("long", &journal, &Access::new(), &fold).unwrap());
        }
    });
}

/// A run of the matrix: operations, this program's test that runs them in children, and the child's
/// part.
struct Matrix {
    operations: Vec<Operation>,
    test: &'static str,
    child: fn(&Path, Operation, usize) -> !,
}

impl Matrix {
    /// In a child: runs its operation.
    fn be_child(&self) {
        if let Some(wanted) = std::env::var_os(CHILD) {
            let wanted = wanted.into_string().unwrap();
            let [dir, number, at] = wanted.split('|').collect::<Vec<_>>()[..] else { panic!() };
            let operation = self.operations[number.parse::<usize>().unwrap()];
            (self.child)(Path::new(dir), operation, at.parse().unwrap());
        }
    }

    /// Runs the child for step `at`, and returns whether it passed all steps.
    fn run_child(&self, place: &Path, number: usize, at: usize) -> bool {
        let status = afresh_sys::test_command(self.test)
            .env(CHILD, format!("{}|{number}|{at}", place.display()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        let done = status.code() == Some(77);
        let died = std::os::unix::process::ExitStatusExt::signal(&status) == Some(6);
        assert!(done || died, "{}, step {at}: {status}", self.operations[number].0);
        done
    }

    /// Kills each operation at each of its steps while other writers run, and checks the store with
    /// `also`.
    fn run(&self, first: impl Fn(&Store), also: impl Fn(&Store, &str, bool)) {
        self.be_child();
        self.run_alone(first, also);
    }

    /// Kills each operation at each of its steps, and checks the store with `also`.
    fn run_alone(&self, first: impl Fn(&Store), also: impl Fn(&Store, &str, bool)) {
        for (number, operation) in self.operations.iter().enumerate() {
            let (name, (mut steps, mut saves)) = (operation.0, (0, 0));
            loop {
                let dir = scratch();
                let place = dir.path().join("store");
                let store = prepare(&place);
                first(&store);
                let done = self.run_child(&place, number, steps);
                saves += usize::from(check_other(&store, &place));
                check(&store, *operation, steps, done, &also);
                assert!(
                    !done || name != "pull" || is_round(&store.load("pulled").unwrap(), ROUNDS)
                );
                if done {
                    break;
                }
                steps += 1;
            }
            println!("{name}: {steps} steps, beside acknowledged saves at {saves}");
            assert!(steps > 1, "{name} passes no points");
        }
    }
}

/// A directory in memory where there is one, since a disk that syncs takes minutes for the matrix.
/// The kernel keeps what a process has written in both.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// The store that each operation begins with.
fn prepare(place: &Path) -> Store {
    let store = store(place);
    drop(session(&store, "a", ROUNDS));
    drop(session(&store, "long", 2));
    drop(session(&store, "second", 1));
    store.save("plain", &memory(&[5, 6]), &options()).unwrap();
    archive::export(&store.load("a").unwrap(), &place.join(ARCHIVE), Some("a")).unwrap();
    store
}

/// Checks the other writer's last acknowledged save, if there is one.
fn check_other(store: &Store, place: &Path) -> bool {
    let acknowledged = fs::read(place.join(ACKNOWLEDGED)).unwrap_or_default();
    let Ok(round) = acknowledged.try_into().map(u32::from_le_bytes) else { return false };
    let other = store.load("other").unwrap();
    let found = u32::from_le_bytes(other.state().try_into().unwrap());
    assert!(found == round || found == round + 1, "{found}, not {round}");
    assert_eq!(crate::support::bytes(&other), memory(&[found as u8, 1]).0);
    true
}

/// Checks that everything acknowledged opens, and that the session accepts turns.
fn check(
    store: &Store,
    (name, again, after): Operation,
    steps: usize,
    done: bool,
    also: impl Fn(&Store, &str, bool),
) {
    for _ in 0..2 {
        let found = store.load("a").unwrap();
        found.verify().unwrap();
        let new = is_round(&found, after);
        assert!(new || (!done && is_round(&found, ROUNDS)), "{name}, step {steps}");
        assert!(is_round(&store.load("long").unwrap(), 2), "{name}, step {steps}");
        store.load("plain").unwrap().verify().unwrap();
        for tag in store.tags().unwrap() {
            store.load(&tag.name).unwrap().verify().unwrap();
        }
        let archive = archive::open(&store.root().join(ARCHIVE)).unwrap();
        assert!(is_round(&archive, ROUNDS), "{name}, step {steps}");
        store.gc().unwrap();
    }
    also(store, name, done);
    let found = store.load("a").unwrap();
    if name == "export" {
        again(store, &found);
        let left = fs::read_dir(store.root()).unwrap().map(|entry| entry.unwrap().file_name());
        let is_left = |name: &std::ffi::OsString| name.to_str().unwrap().starts_with(".a.afresh");
        assert_eq!(left.filter(is_left).count(), 0, "step {steps}");
    }
    let rounds = if is_round(&found, after) { after } else { ROUNDS };
    append(&mut store.begin_turns("a", &found, ReplacedName::Any).unwrap(), rounds + 1);
    assert!(is_round(&store.load("a").unwrap(), rounds + 1), "{name}, step {steps}");
}

/// Checks that each blob with the name of its digest was synced: other writers share it.
fn check_named(place: &Path, record: &Path, operation: &str, steps: usize) {
    for blob in fs::read_dir(place.join("blobs/sha256")).unwrap().map(Result::unwrap) {
        let is_temporary = blob.file_name().to_str().unwrap().starts_with('.');
        let is_synced = || power::is_synced(&blob.path(), record).unwrap();
        assert!(is_temporary || is_synced(), "{operation}, step {steps}: {:?}", blob.file_name());
    }
}

#[test]
fn acknowledged_snapshots_open_after_a_crash_at_any_step_of_naming() {
    let matrix = Matrix {
        operations: OPERATIONS.to_vec(),
        test: "crashes::acknowledged_snapshots_open_after_a_crash_at_any_step_of_naming",
        child: crash,
    };
    matrix.run(|_| {}, |_, _, _| {});
}

#[cfg(feature = "remote")]
#[test]
fn acknowledged_snapshots_open_after_a_crash_at_any_step_of_a_transfer() {
    let matrix = Matrix {
        operations: TRANSFERS.to_vec(),
        test: "crashes::acknowledged_snapshots_open_after_a_crash_at_any_step_of_a_transfer",
        child: crash,
    };
    matrix.run(push_first, check_remote);
}

#[cfg(feature = "remote")]
#[test]
fn acknowledged_snapshots_open_after_a_crash_of_a_local_operation_beside_pushes() {
    let named = |name: &&str| *OPERATIONS.iter().find(|operation| operation.0 == *name).unwrap();
    let matrix = Matrix {
        operations: BESIDE_PUSHES.iter().map(named).collect(),
        test: "crashes::acknowledged_snapshots_open_after_a_crash_of_a_local_operation_beside_pushes",
        child: crash,
    };
    matrix.run(push_first, check_remote);
}

#[test]
fn acknowledged_snapshots_open_after_a_power_failure_at_any_step() {
    let matrix = Matrix {
        operations: OPERATIONS.to_vec(),
        test: "crashes::acknowledged_snapshots_open_after_a_power_failure_at_any_step",
        child: lose_power,
    };
    matrix.be_child();
    for (number, operation) in OPERATIONS.iter().enumerate() {
        for steps in 0.. {
            let dir = scratch();
            let (place, left) = (dir.path().join("store"), dir.path().join("left"));
            drop(prepare(&place));
            let done = matrix.run_child(&place, number, steps);
            check_named(&place, &dir.path().join("record"), operation.0, steps);
            power::survivors(&place, &dir.path().join("record"), &left).unwrap();
            check(&Store::open(&left).unwrap(), *operation, steps, done, |_, _, _| {});
            if done {
                break;
            }
        }
    }
}

/// Ends the power after three processes: `operation` dies when its name is in `index.json` and not
/// synced, `tag` dies at its step `middle` or does not run, and `gc` dies at its step `last`.
/// Returns whether the last two passed all steps, or `None` where no name was left so.
fn end_power_after_three(
    matrix: &Matrix,
    operation: usize,
    [first, middle, last]: [usize; 3],
) -> Option<[bool; 2]> {
    let number = |name| OPERATIONS.iter().position(|operation| operation.0 == name).unwrap();
    let dir = scratch();
    let (place, left) = (dir.path().join("store"), dir.path().join("left"));
    drop(prepare(&place));
    let index = || fs::read(place.join("index.json")).unwrap();
    let before = index();
    if matrix.run_child(&place, operation, first) || index() == before {
        return None;
    }
    let tagged = middle == 0 || matrix.run_child(&place, number("tag"), middle - 1);
    let collected = matrix.run_child(&place, number("gc"), last);
    power::survivors(&place, &dir.path().join("record"), &left).unwrap();
    let store = Store::open(&left).unwrap();
    check(&store, OPERATIONS[operation], first, false, |_, _, _| {});
    if middle > 0 && tagged {
        assert!(is_round(&store.load("b").unwrap(), ROUNDS), "steps {first}, {middle}, {last}");
    }
    Some([middle > 0 && tagged, collected])
}

#[test]
fn acknowledged_snapshots_open_after_a_power_failure_of_three_processes() {
    let matrix = Matrix {
        operations: OPERATIONS.to_vec(),
        test: "crashes::acknowledged_snapshots_open_after_a_power_failure_of_three_processes",
        child: lose_power,
    };
    matrix.be_child();
    for name in ["untag", "save", "fold"] {
        let operation = OPERATIONS.iter().position(|operation| operation.0 == name).unwrap();
        // The last step before the sync of the name.
        let first = (0..200)
            .find(|first| end_power_after_three(&matrix, operation, [*first, 0, 0]).is_some())
            .unwrap();
        let mut runs = 0;
        for middle in 0.. {
            let mut tagged = false;
            for last in 0.. {
                let steps = [first, middle, last];
                let ended = end_power_after_three(&matrix, operation, steps).unwrap();
                (tagged, runs) = (ended[0], runs + 1);
                if ended[1] {
                    break;
                }
            }
            if tagged {
                break;
            }
        }
        println!("{name}: {runs} runs");
    }
}

#[test]
fn names_before_a_sync_are_caught() {
    afresh_sys::planted::must_be_caught(
        &[afresh_sys::planted::Bug::EarlyName],
        &["crashes::acknowledged_snapshots_open_after_a_power_failure_at_any_step"],
    );
}
