//! File trees of guests: every call starts from the warm one, and sessions take theirs along.
//!
//! The guest is a pair of hands: it exports WASI's functions as they are, and the test uses them.

use afresh_snapshot::{Branch, Tree as States};
use afresh_wasm::afresh_files::{Budget, Layer, Time, Tree};
use afresh_wasm::{
    Engine, EngineConfig, Frozen, Guest, GuestOptions, Lease, Mode, Session, Warm, WarmUp, Wasi,
};

use crate::passthrough::{self, ask, number};

/// Addresses of paths and buffers.
const PATH: usize = 1024;
const BUFFER: usize = 4096;

/// A module that passes calls on to WASI, with a warm-up that makes a file.
fn hands() -> Vec<u8> {
    let warm = format!(
        r#"(data (i32.const {PATH}) "/warm.txt")
            ;; Makes a file, writes into it, and leaves it open.
            (func (export "warm")
                (drop (call $path_open (i32.const 3) (i32.const 1) (i32.const {}) (i32.const 8) (i32.const 1)
                    (i64.const 0x1fffffff) (i64.const 0) (i32.const 0) (i32.const 8)))
                (i32.store (i32.const 16) (i32.const {PATH}))
                (i32.store (i32.const 20) (i32.const 5))
                (drop (call $fd_write (i32.load (i32.const 8)) (i32.const 16) (i32.const 1) (i32.const 24))))"#,
        PATH + 1
    );
    passthrough::module(4, &warm)
}

fn options(mode: Mode) -> GuestOptions {
    let tree = Tree::new(Budget::default());
    GuestOptions {
        mode,
        wasi: Wasi { files: Some(tree), ..Wasi::default() },
        ..GuestOptions::default()
    }
}

fn engine() -> Engine {
    Engine::new(EngineConfig::default()).unwrap()
}

fn warm(mode: Mode) -> Warm {
    let guest = Guest::with_options(&engine(), &hands(), options(mode)).unwrap();
    guest.warm(WarmUp::new().call("warm", &[])).unwrap()
}

/// Opens a path, making the file if `create`; the descriptor, or the error.
fn open(lease: &mut Lease<'_>, path: &str, create: bool) -> Result<u32, i32> {
    lease.write_memory(PATH, path.as_bytes()).unwrap();
    let (path, len, how) = (PATH as i64, path.len() as i64, i64::from(create));
    match ask(lease, "path_open", &[3, 1, path, len, how, 0x1fff_ffff, 0, 0, 8]) {
        0 => Ok(number(lease, 8)),
        error => Err(error),
    }
}

fn write(lease: &mut Lease<'_>, fd: u32, bytes: &[u8]) -> i32 {
    passthrough::write(lease, fd.into(), BUFFER, bytes)
}

fn read(lease: &mut Lease<'_>, fd: u32) -> Vec<u8> {
    passthrough::read(lease, fd.into(), BUFFER)
}

fn seek(lease: &mut Lease<'_>, fd: u32, to: i64) {
    assert_eq!(ask(lease, "fd_seek", &[i64::from(fd), to, 0, 32]), 0);
}

#[test]
fn every_call_starts_from_the_warm_files_and_what_was_open_is_open() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm = warm(mode);
        for round in 0..3 {
            let mut lease = warm.lease().unwrap();
            // Descriptors that the warm-up left open keep their position.
            assert_eq!(read(&mut lease, 4), b"", "{mode:?}");
            seek(&mut lease, 4, 0);
            assert_eq!(read(&mut lease, 4), b"/warm", "{mode:?} {round}");
            assert_eq!(write(&mut lease, 4, b" more"), 0);
            let new = open(&mut lease, "new.txt", true).unwrap();
            assert_eq!(new, 5);
            assert_eq!(write(&mut lease, new, b"mine"), 0);
            assert_eq!(open(&mut lease, "warm.txt", false), Ok(6));
            assert_eq!(read(&mut lease, 6), b"/warm more");
            assert_eq!(ask(&mut lease, "fd_close", &[4]), 0);
        }
    }
}

#[test]
fn nothing_leads_out_of_the_tree() {
    let warm = warm(Mode::Reset);
    let mut lease = warm.lease().unwrap();
    for path in ["..", "../etc/passwd", "/etc/passwd", "a/../../b"] {
        let error = open(&mut lease, path, false).unwrap_err();
        assert!([63, 44].contains(&error), "{path}: {error}");
    }
    // Nor does a link, for any target.
    lease.write_memory(PATH, b"../../etc/passwdlink").unwrap();
    let (target, name) = (PATH as i64, PATH as i64 + 16);
    assert_eq!(ask(&mut lease, "path_symlink", &[target, 16, 3, name, 4]), 0);
    assert_eq!(open(&mut lease, "link", false), Err(63));
}

#[test]
fn a_budget_that_is_spent_is_no_space_and_nothing_else() {
    let tree = Tree::new(Budget { bytes: 20_000, files: 8 });
    let options = GuestOptions {
        wasi: Wasi { files: Some(tree), ..Wasi::default() },
        ..options(Mode::Reset)
    };
    let guest = Guest::with_options(&engine(), &hands(), options).unwrap();
    let warm = guest.warm(WarmUp::new()).unwrap();
    for _ in 0..2 {
        let mut lease = warm.lease().unwrap();
        let fd = open(&mut lease, "a", true).unwrap();
        let mut last = 0;
        for _ in 0..8 {
            last = write(&mut lease, fd, &[1; 4096]);
        }
        assert_eq!(last, 51);
        assert_eq!(write(&mut lease, fd, b""), 0);
    }
}

#[test]
fn directories_are_listed_in_parts_and_standard_streams_can_be_renumbered() {
    let warm = warm(Mode::Reset);
    let mut lease = warm.lease().unwrap();
    for index in 0..40 {
        let fd = open(&mut lease, &format!("file-{index:02}"), true).unwrap();
        assert_eq!(ask(&mut lease, "fd_close", &[i64::from(fd)]), 0);
    }
    let (mut cookie, mut names) = (0_i64, Vec::new());
    loop {
        assert_eq!(ask(&mut lease, "fd_readdir", &[3, BUFFER as i64, 200, cookie, 24]), 0);
        let used = number(&mut lease, 24) as usize;
        let mut bytes = vec![0; used];
        lease.read_memory(BUFFER, &mut bytes).unwrap();
        let mut rest = &bytes[..];
        while rest.len() >= 24 {
            let len = u32::from_le_bytes(rest[16..20].try_into().unwrap()) as usize;
            let Some(name) = rest.get(24..24 + len) else { break };
            names.push(String::from_utf8(name.to_vec()).unwrap());
            cookie = i64::from_le_bytes(rest[..8].try_into().unwrap());
            rest = &rest[24 + len..];
        }
        if used < 200 {
            break;
        }
    }
    assert_eq!(names.len(), 2 + 40 + 1, "{names:?}");
    // Standard output goes into a file.
    let fd = open(&mut lease, "log", true).unwrap();
    assert_eq!(ask(&mut lease, "fd_renumber", &[i64::from(fd), 1]), 0);
    assert_eq!(write(&mut lease, 1, b"said"), 0);
    let fd = open(&mut lease, "log", false).unwrap();
    assert_eq!(read(&mut lease, fd), b"said");
}

#[test]
fn a_file_has_only_the_rights_that_its_directory_passes_on() {
    const READ: i64 = 1 << 1;
    const WRITE: i64 = 1 << 6;
    const CREATE: i64 = 1;
    const DIRECTORY: i64 = 2;
    const ENOTCAPABLE: i32 = 76;
    let warm = warm(Mode::Reset);
    let mut lease = warm.lease().unwrap();
    let path = PATH as i64;
    lease.write_memory(PATH, b"dir").unwrap();
    assert_eq!(ask(&mut lease, "path_create_directory", &[3, path, 3]), 0);
    let everything_but_write = 0x1fff_ffff & !WRITE;
    let open = [3, 1, path, 3, DIRECTORY, everything_but_write, READ, 0, 8];
    assert_eq!(ask(&mut lease, "path_open", &open), 0);
    let dir = i64::from(number(&mut lease, 8));
    lease.write_memory(PATH, b"new").unwrap();
    let open = [dir, 1, path, 3, CREATE, READ | WRITE, 0x1fff_ffff, 0, 8];
    assert_eq!(ask(&mut lease, "path_open", &open), 0);
    let file = number(&mut lease, 8);
    assert_ne!(write(&mut lease, file, b"bytes"), 0);
    assert_eq!(read(&mut lease, file), b"");
    assert_eq!(ask(&mut lease, "fd_fdstat_get", &[i64::from(file), 32]), 0);
    assert_eq!(number(&mut lease, 40), READ as u32);
    let open = [dir, 1, path, 3, CREATE, WRITE, 0, 0, 8];
    assert_eq!(ask(&mut lease, "path_open", &open), ENOTCAPABLE);
}

#[test]
fn a_session_takes_its_files_along() {
    // Also where each state is stored anew.
    for states in [States::new(), States::with_budget(1)] {
        takes_its_files_along(&states);
    }
}

fn takes_its_files_along(states: &States<afresh_wasm::SessionState>) {
    let warm = warm(Mode::Reset);
    let mut branch: Branch<Session> =
        Branch::from_state(states, warm.clone(), warm.root().unwrap());
    {
        let session = branch.guest_mut().unwrap();
        let mut lease = session.lease();
        let fd = open(&mut lease, "a", true).unwrap();
        assert_eq!((fd, write(&mut lease, fd, b"one")), (5, 0));
    }
    let one = branch.checkpoint().unwrap();
    {
        let mut lease = branch.guest_mut().unwrap().lease();
        // Open descriptors keep their position.
        assert_eq!(write(&mut lease, 5, b"two"), 0);
        let fd = open(&mut lease, "b", true).unwrap();
        assert_eq!(write(&mut lease, fd, b"other"), 0);
    }
    let two = branch.checkpoint().unwrap();
    let (first, second) = (states.get(one).unwrap(), states.get(two).unwrap());
    let found = first.state.diff_files(&second.state).unwrap();
    let paths: Vec<&[u8]> = found.changes.iter().map(|change| &change.path[..]).collect();
    assert_eq!(paths, [&b"/a"[..], b"/b"]);
    assert_eq!(found.bytes, 8);

    branch.rollback(one).unwrap();
    {
        let session = branch.guest_mut().unwrap();
        assert_eq!(session.files().unwrap().read_path("/a", 100).unwrap(), b"one");
        let mut lease = session.lease();
        assert_eq!(open(&mut lease, "b", false), Err(44));
        assert_eq!(write(&mut lease, 5, b"!"), 0);
    }
    let mut fork = branch.fork(two).unwrap();
    let session = fork.guest_mut().unwrap();
    assert_eq!(session.files().unwrap().read_path("/a", 100).unwrap(), b"onetwo");
    session
        .change_files(|tree| tree.write_path("/from/outside", b"x", Time::now()).unwrap())
        .unwrap();
    let mut lease = session.lease();
    let fd = open(&mut lease, "from/outside", false).unwrap();
    assert_eq!(read(&mut lease, fd), b"x");
    assert_eq!(branch.guest().unwrap().files().unwrap().read_path("/a", 100).unwrap(), b"one!");
}

#[test]
fn a_frozen_guest_has_its_files_and_what_is_open_in_them() {
    let warm = warm(Mode::Reset);
    let mut lease = warm.lease().unwrap();
    let fd = open(&mut lease, "big", true).unwrap();
    let big: Vec<u8> = (0..8000_u32).map(|i| i as u8).collect();
    assert_eq!(write(&mut lease, fd, &big), 0);
    let frozen = lease.freeze().unwrap();
    let bytes = frozen.bytes().unwrap();
    let again = Frozen::from_parts(frozen.memory().clone(), &bytes).unwrap();
    let thawed = Warm::thaw(&engine(), &GuestOptions::default(), &again).unwrap();
    // The opener limits further writes.
    let tight = Tree::new(Budget { bytes: 3000, files: 2 });
    let wasi = Wasi { files: Some(tight), ..Wasi::default() };
    let tight = GuestOptions { wasi, ..GuestOptions::default() };
    let small = Warm::thaw(&engine(), &tight, &again).unwrap();
    let files = small.lease().unwrap().host().files().unwrap();
    let left = files.tree().budget().bytes - files.tree().used().bytes;
    assert!(left <= 3000, "{left}");
    for _ in 0..2 {
        let mut lease = thawed.lease().unwrap();
        seek(&mut lease, fd, 0);
        assert_eq!(read(&mut lease, fd), big);
        seek(&mut lease, 4, 1);
        assert_eq!(read(&mut lease, 4), b"warm");
        assert_eq!(write(&mut lease, fd, b"gone with the call"), 0);
    }
    // Damaged ones are refused, and never a panic.
    for at in (0..bytes.len()).step_by(7) {
        let mut bytes = bytes.clone();
        bytes[at] ^= 0x55;
        if let Ok(frozen) = Frozen::from_parts(frozen.memory().clone(), &bytes) {
            let _ = Warm::thaw(&engine(), &GuestOptions::default(), &frozen);
        }
    }
}

#[test]
fn a_tree_and_host_directories_are_not_given_together() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = options(Mode::Reset);
    options.wasi.dirs.push((directory.path().to_owned(), "/data".into(), false));
    let guest = Guest::with_options(&engine(), &hands(), options).unwrap();
    let error = guest.warm(WarmUp::new()).unwrap_err();
    assert!(format!("{error:?}").contains("layers of the tree"), "{error:?}");
}

#[test]
fn a_snapshot_leaves_out_layers_that_say_what_they_are_and_needs_them_again() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("library");
    std::fs::write(&library, [7; 100_000]).unwrap();
    let tree = |known: &str| {
        let layer = Layer::file(&library, "library").unwrap().known_as(known);
        Tree::new(Budget::default()).with_layer("/lib", &layer).unwrap()
    };
    let mut options = options(Mode::Reset);
    options.wasi.files = Some(tree("one"));
    let guest = Guest::with_options(&engine(), &hands(), options).unwrap();
    let warm = guest.warm(WarmUp::new().call("warm", &[])).unwrap();
    let mut lease = warm.lease().unwrap();
    let fd = open(&mut lease, "lib/library", false).unwrap();
    assert_eq!(read(&mut lease, fd), [7; 8192]);
    let frozen = lease.freeze().unwrap();
    let bytes = frozen.bytes().unwrap();
    assert!(frozen.memory().pages().pages() < 64 + 16, "the library is in the snapshot");

    let again = Frozen::from_parts(frozen.memory().clone(), &bytes).unwrap();
    let below =
        |known: &str| GuestOptions { files_below: Some(tree(known)), ..GuestOptions::default() };
    let thawed = Warm::thaw(&engine(), &below("one"), &again).unwrap();
    let mut lease = thawed.lease().unwrap();
    assert_eq!(read(&mut lease, fd), [7; 8192], "it goes on where it was");
    assert!(open(&mut lease, "warm.txt", false).is_ok());
    for options in [below("two"), GuestOptions::default()] {
        let refused = Warm::thaw(&engine(), &options, &again).unwrap_err();
        assert!(refused.to_string().contains("known:one"), "{refused}");
    }
}
