//! Files of sessions: checkpointed, rolled back, forked, compared and saved with the memory.

use afresh::files::{Budget, Change, Layer, Time, Tree};
use afresh::{Call, Guest, Options, SaveOptions, Session, SessionError};

/// A guest that counts in its memory, and appends to a file that it keeps open.
const GUEST: &str = r#"(module
    (import "wasi_snapshot_preview1" "path_open"
        (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
    (memory (export "memory") 1)
    (data (i32.const 100) "log")
    (data (i32.const 200) "0123456789")
    (func (export "warm") (result i32)
        (call $open (i32.const 3) (i32.const 0) (i32.const 100) (i32.const 3) (i32.const 1)
            (i64.const 0x1fffffff) (i64.const 0) (i32.const 1) (i32.const 8)))
    ;; Writes the digit of the count; the answer is the count, or less than 0.
    (func (export "next") (result i32)
        (i32.store (i32.const 16) (i32.add (i32.const 200) (i32.load (i32.const 0))))
        (i32.store (i32.const 20) (i32.const 1))
        (if (call $write (i32.load (i32.const 8)) (i32.const 16) (i32.const 1) (i32.const 24))
            (then (return (i32.const -1))))
        (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (i32.const 1)))
        (i32.load (i32.const 0)))
    (func (export "trap") (result i32)
        (drop (call $write (i32.load (i32.const 8)) (i32.const 16) (i32.const 1) (i32.const 24)))
        (unreachable)))"#;

fn guest(tree: Tree) -> Guest {
    let options = Options::new().files(tree).warm(Call::text("warm", [""; 0]));
    Guest::from_bytes("appender", &wat::parse_str(GUEST).unwrap(), &options).unwrap()
}

fn next(session: &mut Session) -> String {
    session.invoke(&Call::text("next", [""; 0])).unwrap().text()
}

fn log(session: &mut Session) -> String {
    String::from_utf8(session.files().unwrap().read("/log").unwrap()).unwrap()
}

#[test]
fn files_go_with_the_memory_wherever_the_session_goes() {
    let mut session = guest(Tree::new(Budget::default())).session().unwrap();
    session.files().unwrap().write("/data/a.csv", b"1,2").unwrap();
    assert_eq!((next(&mut session), next(&mut session)), ("1".into(), "2".into()));
    let two = session.checkpoint("two").unwrap();
    assert_eq!(next(&mut session), "3");
    session.files().unwrap().remove("/data").unwrap();
    session.checkpoint("three").unwrap();
    assert_eq!(log(&mut session), "012");

    let found = session.diff_files("two", "three").unwrap();
    let said: Vec<(&[u8], Change, u64)> = found
        .changes
        .iter()
        .map(|change| (&change.path[..], change.change, change.bytes))
        .collect();
    assert_eq!(
        said,
        [
            (&b"/data"[..], Change::Removed, 0),
            (&b"/data/a.csv"[..], Change::Removed, 3),
            (&b"/log"[..], Change::Changed, 1),
        ]
    );

    session.rollback(two).unwrap();
    assert_eq!(log(&mut session), "01");
    assert_eq!(session.files().unwrap().read("data/a.csv").unwrap(), b"1,2");
    let mut forks = session.fork(2).unwrap();
    assert_eq!(next(&mut forks[0]), "3");
    forks[1].files().unwrap().write("/only/here", b"x").unwrap();
    assert_eq!((log(&mut forks[0]), log(&mut forks[1])), ("012".into(), "01".into()));
    assert!(forks[0].files().unwrap().stat("/only/here").is_err());
    assert_eq!(next(&mut session), "3");

    // A call that fails leaves nothing once the session is rolled back.
    session.invoke(&Call::text("trap", [""; 0])).unwrap_err();
    assert!(matches!(session.files(), Err(SessionError::Failed { .. })));
    session.rollback("two").unwrap();
    assert_eq!(log(&mut session), "01");
}

#[test]
fn a_saved_session_and_a_saved_guest_bring_their_files() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("base"), [5; 9000]).unwrap();
    let layer = Layer::directory(below.path()).unwrap();
    let guest = guest(Tree::new(Budget::default()).with_layer("/", &layer).unwrap());
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| format!("{}@{name}", place.path().join("store").display());
    let save = |name: &str| at(name).parse().unwrap();

    guest.save(&save("warm"), &SaveOptions::new()).unwrap();
    let mut session = guest.session().unwrap();
    assert_eq!((next(&mut session), next(&mut session)), ("1".into(), "2".into()));
    session.files().unwrap().write("/kept", b"kept").unwrap();
    session.save(&save("turn"), &SaveOptions::new()).unwrap();
    // Nothing but the snapshot is needed.
    drop((session, guest, below));

    let warm = afresh::open(at("warm"), &Options::new()).unwrap();
    let mut session = warm.session().unwrap();
    assert_eq!((next(&mut session), log(&mut session)), ("1".into(), "0".into()));
    assert_eq!(session.files().unwrap().read("/base").unwrap(), [5; 9000]);
    assert!(session.files().unwrap().read("/kept").is_err());

    let turn = afresh::open(at("turn"), &Options::new()).unwrap();
    let mut session = turn.session().unwrap();
    assert_eq!((next(&mut session), log(&mut session)), ("3".into(), "012".into()));
    assert_eq!(session.files().unwrap().read("/kept").unwrap(), b"kept");
    // Saved again, over what it came from.
    session.save(&save("turn"), &SaveOptions::new()).unwrap();
    let again = afresh::open(at("turn"), &Options::new()).unwrap();
    assert_eq!(log(&mut again.session().unwrap()), "012");
}

#[test]
fn a_guest_without_files_reports_it() {
    let wasm = wat::parse_str("(module (memory 1))").unwrap();
    let guest = Guest::from_bytes("none", &wasm, &Options::new()).unwrap();
    let mut session = guest.session().unwrap();
    let error = session.files().unwrap_err();
    assert!(error.to_string().contains("Options::files"), "{error}");
    let mut tree = Tree::new(Budget { bytes: 1000, files: 4 });
    tree.write_path("/x", b"x", Time::now()).unwrap();
    let guest = Guest::from_bytes("small", &wasm, &Options::new().files(tree)).unwrap();
    let mut session = guest.session().unwrap();
    let error = session.files().unwrap().write("/large", &[1; 4000]).unwrap_err();
    assert!(error.to_string().starts_with("/large: "), "{error}");
    assert_eq!(session.files().unwrap().list("/").unwrap().len(), 1);
}

#[test]
fn a_file_below_is_saved_once() {
    drop(lies_below_and_is_saved_once(|below| Layer::file(below.join("below"), "below").unwrap()));
}

#[test]
fn a_directory_below_is_saved_once() {
    let mut session = lies_below_and_is_saved_once(|below| Layer::directory(below).unwrap());
    // The directory is removed, and the session continues with its saved copy.
    assert_eq!(session.files().unwrap().read("/lib/below").unwrap().len(), 300_000);
}

fn lies_below_and_is_saved_once(layer: impl FnOnce(&std::path::Path) -> Layer) -> Session {
    let dir = tempfile::tempdir().unwrap();
    let below = dir.path().join("layer/below");
    let content: Vec<u8> = (0..300_000_u32).map(|n| (n / 11) as u8).collect();
    std::fs::create_dir(dir.path().join("layer")).unwrap();
    std::fs::write(&below, &content).unwrap();
    let layer = layer(&dir.path().join("layer"));
    let tree = Tree::new(Budget::default()).with_layer("/lib", &layer).unwrap();
    let mut session = guest(tree).session().unwrap();
    let to = format!("{}@a", dir.path().join("store").display()).parse().unwrap();
    session.files().unwrap().write("/own", b"1").unwrap();
    session.save_turn(&to, &SaveOptions::new()).unwrap();
    // Reading the layer again would find nothing.
    std::fs::write(&below, b"").unwrap();
    session.files().unwrap().write("/own", b"2").unwrap();
    let saved = session.save_turn(&to, &SaveOptions::new()).unwrap();
    assert!(saved.turns == 1 && saved.bytes < 1000, "{saved:?}");

    let mut again = afresh::open(to.to_string(), &Options::new()).unwrap().session().unwrap();
    assert_eq!(again.files().unwrap().read("/lib/below").unwrap(), content);
    assert_eq!(again.files().unwrap().read("/own").unwrap(), b"2");
    // Saved from the opened snapshot, it is the same.
    let whole = format!("{}@b", dir.path().join("store").display()).parse().unwrap();
    again.save(&whole, &SaveOptions::new()).unwrap();
    let mut third = afresh::open(whole.to_string(), &Options::new()).unwrap().session().unwrap();
    assert_eq!(third.files().unwrap().read("/lib/below").unwrap(), content);
    session
}

#[test]
fn a_whole_file_is_read_within_the_callers_budget() {
    use afresh::budget::Budget as MemoryBudget;
    let mut tree = Tree::new(Budget::default());
    tree.write_path("/large", &[7; 100_000], Time::now()).unwrap();
    let mut session = guest(tree).session().unwrap();
    let files = session.files().unwrap();
    let budget = MemoryBudget::new("request", 150_000);
    let content = files.read_within("/large", &budget).unwrap();
    assert_eq!((content.len(), budget.used()), (100_000, 100_000));
    let refused = files.read_within("/large", &budget).unwrap_err();
    assert!(matches!(&refused, SessionError::Budget { path, .. } if path == "/large"), "{refused}");
    assert!(refused.to_string().contains("request budget of 150000 bytes"), "{refused}");
    drop(content);
    assert_eq!(files.read_within("/large", &budget).unwrap().into_bytes(), [7; 100_000]);
    assert_eq!(budget.used(), 0);
    assert!(matches!(files.read_within("/none", &budget), Err(SessionError::Files { .. })));
}
