//! Host directories of guests: written through, and never left, by modules and components.
//!
//! Both guests pass calls on to WASI, and the tests use them.

mod component;

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afresh_wasm::wasmtime::component::Val as ComponentVal;
use afresh_wasm::{
    CallError, ComponentLease, Engine, EngineConfig, Guest, GuestOptions, Lease, LeaseOptions,
    Mode, Val, Warm, WarmComponent, WarmUp, Wasi, Watch,
};

use crate::passthrough::{self, ask, number};

/// Errors of preview 1.
const BADF: i32 = 8;
const ISDIR: i32 = 31;
const LOOP: i32 = 32;
const MFILE: i32 = 33;
const NAMETOOLONG: i32 = 37;
const NOENT: i32 = 44;
const NOTDIR: i32 = 54;
const PERM: i32 = 63;

/// Flags of `path_open`.
const CREATE: i32 = 1;
const DIRECTORY: i32 = 2;
const TRUNCATE: i32 = 8;

const PATH: usize = 1024;
const OTHER: usize = 9216;
const BUFFER: usize = 20_480;

/// Two granted directories, and one that is not granted.
struct GrantedDirs {
    root: tempfile::TempDir,
}

impl GrantedDirs {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        for name in ["one", "two", "out"] {
            fs::create_dir(root.path().join(name)).unwrap();
        }
        fs::write(root.path().join("out/secret"), b"secret").unwrap();
        Self { root }
    }

    fn path(&self, below: &str) -> PathBuf {
        self.root.path().join(below)
    }

    /// `/one` for writing, and `/two` as `writable` has it.
    fn options(&self, writable: bool) -> GuestOptions {
        let dirs = vec![
            (self.path("one"), "/one".to_owned(), true),
            (self.path("two"), "/two".to_owned(), writable),
        ];
        GuestOptions { wasi: Wasi { dirs, ..Wasi::default() }, ..GuestOptions::default() }
    }

    /// The directory that is not granted is as it was.
    fn check(&self) {
        let names: Vec<_> = fs::read_dir(self.path("out"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names, ["secret"]);
        let secret = self.path("out/secret");
        assert_eq!(fs::read(&secret).unwrap(), b"secret");
        assert_eq!(fs::metadata(&secret).unwrap().nlink(), 1);
    }
}

fn engine() -> Engine {
    Engine::new(EngineConfig::default()).unwrap()
}

fn module(options: GuestOptions) -> Warm {
    let guest = Guest::with_options(&engine(), &passthrough::module(64, ""), options).unwrap();
    guest.warm(WarmUp::new()).unwrap()
}

fn text(lease: &mut Lease<'_>, at: usize, text: &str) -> [i64; 2] {
    lease.write_memory(at, text.as_bytes()).unwrap();
    [at as i64, text.len() as i64]
}

/// Opens a path from a descriptor with rights to everything; `how` has no `CREATE` for reading.
fn open(lease: &mut Lease<'_>, fd: i64, path: &str, how: i32) -> Result<i64, i32> {
    let [at, len] = text(lease, PATH, path);
    let rights = if how & (CREATE | TRUNCATE) == 0 { 0x1fff_ffbf } else { 0x1fff_ffff };
    match ask(lease, "path_open", &[fd, 1, at, len, i64::from(how), rights, 0x1fff_ffff, 0, 8]) {
        0 => Ok(i64::from(number(lease, 8))),
        error => Err(error),
    }
}

fn write(lease: &mut Lease<'_>, fd: i64, bytes: &[u8]) -> i32 {
    passthrough::write(lease, fd, BUFFER, bytes)
}

fn read(lease: &mut Lease<'_>, fd: i64) -> Vec<u8> {
    passthrough::read(lease, fd, BUFFER)
}

fn with_path(lease: &mut Lease<'_>, name: &str, fd: i64, path: &str) -> i32 {
    let [at, len] = text(lease, PATH, path);
    ask(lease, name, &[fd, at, len])
}

fn symlink_to(lease: &mut Lease<'_>, target: &str, fd: i64, path: &str) -> i32 {
    let ([old, old_len], [new, new_len]) = (text(lease, PATH, target), text(lease, OTHER, path));
    ask(lease, "path_symlink", &[old, old_len, fd, new, new_len])
}

fn rename(lease: &mut Lease<'_>, from: i64, old: &str, into: i64, new: &str) -> i32 {
    let ([old, old_len], [new, new_len]) = (text(lease, PATH, old), text(lease, OTHER, new));
    ask(lease, "path_rename", &[from, old, old_len, into, new, new_len])
}

fn link(lease: &mut Lease<'_>, from: i64, old: &str, into: i64, new: &str) -> i32 {
    let ([old, old_len], [new, new_len]) = (text(lease, PATH, old), text(lease, OTHER, new));
    ask(lease, "path_link", &[from, 0, old, old_len, into, new, new_len])
}

#[test]
fn writes_reach_the_host_and_stay_after_the_lease() {
    let place = GrantedDirs::new();
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm = module(GuestOptions { mode, ..place.options(true) });
        let mut lease = warm.lease().unwrap();
        let at = BUFFER as i64;
        for (fd, name) in [(3, "/one"), (4, "/two")] {
            assert_eq!(ask(&mut lease, "fd_prestat_dir_name", &[fd, at, 4]), 0);
            let mut bytes = [0; 4];
            lease.read_memory(BUFFER, &mut bytes).unwrap();
            assert_eq!(bytes, name.as_bytes());
        }
        assert_eq!(with_path(&mut lease, "path_create_directory", 3, "d"), 0);
        let file = open(&mut lease, 3, "d/file", CREATE).unwrap();
        assert_eq!(file, 5);
        assert_eq!(write(&mut lease, file, b"kept"), 0);
        assert_eq!(ask(&mut lease, "fd_allocate", &[file, 0, 10]), 0);
        assert_eq!(ask(&mut lease, "fd_sync", &[file]), 0);
        assert_eq!(ask(&mut lease, "fd_sync", &[3]), 0);
        // Appends, with each write on the disk.
        assert_eq!(ask(&mut lease, "fd_fdstat_set_flags", &[file, 1 | 16]), 0);
        assert_eq!(write(&mut lease, file, b"!"), 0);
        assert_eq!(rename(&mut lease, 3, "d/file", 4, "moved"), 0);
        assert_eq!(link(&mut lease, 4, "moved", 3, "twin"), 0);
        drop(lease);
        assert_eq!(fs::read(place.path("two/moved")).unwrap(), b"kept\0\0\0\0\0\0!");
        assert_eq!(fs::metadata(place.path("one/twin")).unwrap().nlink(), 2);
        let mut lease = warm.lease().unwrap();
        assert_eq!(ask(&mut lease, "fd_close", &[file]), BADF, "it was closed with its lease");
        for name in ["fd_read", "fd_write"] {
            assert_eq!(ask(&mut lease, name, &[file, 16, 0, 24]), BADF, "{name} without buffers");
        }
        let file = open(&mut lease, 4, "moved", 0).unwrap();
        assert_eq!(read(&mut lease, file).len(), 11);
        assert_eq!(with_path(&mut lease, "path_unlink_file", 3, "twin"), 0);
        assert_eq!(with_path(&mut lease, "path_unlink_file", 4, "moved"), 0);
        assert_eq!(with_path(&mut lease, "path_remove_directory", 3, "d"), 0);
        assert_eq!(fs::read_dir(place.path("one")).unwrap().count(), 0);
    }
    place.check();
}

#[test]
fn nothing_leads_a_module_out() {
    let place = GrantedDirs::new();
    let warm = module(place.options(false));
    fs::create_dir(place.path("one/d")).unwrap();
    fs::write(place.path("two/given"), b"given").unwrap();
    symlink(place.path("out"), place.path("one/absolute")).unwrap();
    let mut lease = warm.lease().unwrap();
    let mine = open(&mut lease, 3, "mine", CREATE).unwrap();
    assert_eq!(write(&mut lease, mine, b"mine"), 0);
    // The guest makes links, one of them dangling.
    assert_eq!(symlink_to(&mut lease, "../out/secret", 3, "secret"), 0);
    assert_eq!(symlink_to(&mut lease, "../out/new", 3, "dangling"), 0);
    assert_eq!(symlink_to(&mut lease, "..", 3, "d/up"), 0);
    assert_eq!(symlink_to(&mut lease, "/etc", 3, "etc"), PERM);
    let below = open(&mut lease, 3, "d", DIRECTORY).unwrap();
    let out = place.path("out/secret");
    let paths = [
        (3, "../out/secret"),
        (3, "secret"),
        (3, "secret/"),
        (3, "dangling"),
        (3, "absolute/secret"),
        (3, "d/up/../out/secret"),
        (3, "../two/given"),
        (3, out.to_str().unwrap()),
        (below, ".."),
        (below, "../mine"),
        (below, "up/mine"),
        (4, "../out/secret"),
    ];
    for (fd, path) in paths {
        for how in [0, CREATE, CREATE | TRUNCATE, DIRECTORY] {
            let error = open(&mut lease, fd, path, how).unwrap_err();
            assert!([PERM, NOTDIR].contains(&error), "{path}: {error}");
        }
        let [at, len] = text(&mut lease, PATH, path);
        assert_eq!(ask(&mut lease, "path_filestat_get", &[fd, 1, at, len, 64]), PERM, "{path}");
        let times = ask(&mut lease, "path_filestat_set_times", &[fd, 1, at, len, 0, 0, 1]);
        assert_eq!(times, PERM, "{path}");
        let _ = link(&mut lease, fd, path, 3, "hard");
        place.check();
    }
    for (fd, path) in paths {
        let _ = rename(&mut lease, 3, "mine", fd, path);
        let _ = rename(&mut lease, fd, path, 3, "mine");
        let _ = with_path(&mut lease, "path_unlink_file", fd, path);
        place.check();
    }
    assert_eq!(fs::read(place.path("two/given")).unwrap(), b"given");
    // The second directory is granted for reading.
    assert_eq!(open(&mut lease, 4, "given", TRUNCATE), Err(PERM));
    assert_eq!(open(&mut lease, 4, "new", CREATE), Err(PERM));
    assert_eq!(rename(&mut lease, 4, "given", 3, "taken"), PERM);
    assert_eq!(link(&mut lease, 4, "given", 3, "alias"), PERM);
    assert_eq!(with_path(&mut lease, "path_unlink_file", 4, "given"), PERM);
    let given = open(&mut lease, 4, "given", 0).unwrap();
    assert_eq!(read(&mut lease, given), b"given");
    assert_eq!(write(&mut lease, given, b"x"), BADF);
}

#[test]
fn odd_files_and_paths_are_refused_and_block_nothing() {
    let place = GrantedDirs::new();
    let fifo = place.path("one/pipe");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let _socket = std::os::unix::net::UnixListener::bind(place.path("one/socket")).unwrap();
    let mut options = place.options(true);
    options.wasi.dirs.push(("/dev".into(), "/dev".to_owned(), true));
    let warm = module(options);
    let mut lease = warm.lease().unwrap();
    for (fd, path) in [(3, "pipe"), (3, "socket"), (5, "null"), (5, "zero")] {
        for how in [0, CREATE, TRUNCATE] {
            assert_eq!(open(&mut lease, fd, path, how), Err(PERM), "{path}");
        }
    }
    for path in ["x".repeat(256), "x/".repeat(2049)] {
        assert_eq!(open(&mut lease, 3, &path, CREATE), Err(NAMETOOLONG));
    }
    for (path, error) in [("", NOENT), ("/", PERM), ("new/", ISDIR), ("absent/x", NOENT)] {
        assert_eq!(open(&mut lease, 3, path, CREATE), Err(error), "{path:?}");
    }
    symlink("loop", place.path("one/loop")).unwrap();
    assert_eq!(open(&mut lease, 3, "loop", 0), Err(LOOP));
}

#[test]
fn a_large_directory_is_listed_whole_into_small_buffers() {
    let place = GrantedDirs::new();
    for number in 0..2000 {
        fs::write(place.path(&format!("one/file-{number}")), b"").unwrap();
    }
    let warm = module(place.options(true));
    let mut lease = warm.lease().unwrap();
    for room in [300_i64, 40_000, 200_000] {
        let (mut cookie, mut names) = (0_i64, std::collections::BTreeSet::new());
        loop {
            assert_eq!(ask(&mut lease, "fd_readdir", &[3, BUFFER as i64, room, cookie, 24]), 0);
            let mut bytes = vec![0; number(&mut lease, 24) as usize];
            lease.read_memory(BUFFER, &mut bytes).unwrap();
            let mut rest = &bytes[..];
            while rest.len() >= 24 {
                let len = u32::from_le_bytes(rest[16..20].try_into().unwrap()) as usize;
                let Some(name) = rest.get(24..24 + len) else { break };
                names.insert(name.to_vec());
                cookie = i64::from_le_bytes(rest[..8].try_into().unwrap());
                rest = &rest[24 + len..];
            }
            if (bytes.len() as i64) < room {
                break;
            }
        }
        assert_eq!(names.len(), 2002, "{room}");
    }
}

#[test]
fn a_guest_has_so_many_descriptors_and_gets_them_back() {
    let place = GrantedDirs::new();
    let warm = module(place.options(true));
    for _ in 0..2 {
        let mut lease = warm.lease().unwrap();
        let opened = (0..).find_map(|count| match open(&mut lease, 3, "file", CREATE) {
            Ok(_) => None,
            Err(error) => Some((count, error)),
        });
        assert_eq!(opened, Some((256, MFILE)));
        assert_eq!(ask(&mut lease, "fd_close", &[77]), 0);
        assert_eq!(open(&mut lease, 3, "file", CREATE), Ok(77));
    }
}

#[test]
fn a_guest_that_waits_has_its_directories_too() {
    let place = GrantedDirs::new();
    let options = GuestOptions { asynchronous: true, ..place.options(true) };
    let warm = module(options);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut lease = warm.lease_async(&LeaseOptions::new()).await.unwrap();
        let synced = lease.call_async("fd_sync", &[Val::I32(3)]).await.unwrap();
        assert!(matches!(synced[..], [Val::I32(0)]), "{synced:?}");
    });
}

#[test]
fn directories_and_a_file_tree_are_not_mixed_in_a_lease() {
    use afresh_wasm::afresh_files::{Budget, Tree};
    let place = GrantedDirs::new();
    let tree = || Some(Tree::new(Budget::default()));
    let files =
        GuestOptions { wasi: Wasi { files: tree(), ..Wasi::default() }, ..GuestOptions::default() };
    let warm = module(files);
    let mut own = place.options(true).wasi;
    for files in [None, tree()] {
        own.files = files;
        let refused = warm.lease_with(&LeaseOptions::new().wasi(own.clone())).unwrap_err();
        assert!(refused.to_string().contains("layers of the tree"), "{refused}");
    }
}

#[test]
fn a_missing_directory_fails_the_call_that_needs_it() {
    let place = GrantedDirs::new();
    let warm = module(place.options(true));
    let component = component::warm_component(place.options(true));
    fs::remove_dir(place.path("two")).unwrap();
    let refused = warm.lease().unwrap().call("fd_sync", &[Val::I32(3)]);
    assert!(matches!(&refused, Err(CallError::Wasi(why)) if why.contains("/two")), "{refused:?}");
    let refused = component.lease().unwrap().call("list", &[ComponentVal::U32(0)]);
    assert!(refused.is_err(), "{refused:?}");
    fs::create_dir(place.path("two")).unwrap();
    assert_eq!(ask(&mut warm.lease().unwrap(), "fd_sync", &[3]), 0);
}

#[test]
fn a_long_read_ends_with_the_limits_of_the_call() {
    let place = GrantedDirs::new();
    // A hole of 4 GiB is read at the speed of memory, into buffers that are the same.
    fs::File::create(place.path("one/hole")).unwrap().set_len(4 << 30).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stops = stop.clone();
    let watch = Watch::new(move |_| !stops.load(Ordering::Relaxed));
    let warm = module(GuestOptions { watch, ..place.options(true) });
    let mut lease = warm.lease().unwrap();
    let file = open(&mut lease, 3, "hole", 0).unwrap();
    let parts: Vec<u8> =
        (0..1024).flat_map(|_| [131_072_u32, 3 << 20]).flat_map(u32::to_le_bytes).collect();
    lease.write_memory(65_536, &parts).unwrap();
    let file = i32::try_from(file).unwrap();
    stop.store(true, Ordering::Relaxed);
    let ended = lease.call("fd_read", &[file, 65_536, 1024, 24].map(Val::I32));
    assert!(matches!(ended, Err(CallError::Stopped)), "{ended:?}");
}

#[test]
fn a_long_read_of_a_call_that_gives_way_ends_with_its_time_limit() {
    let place = GrantedDirs::new();
    fs::File::create(place.path("one/hole")).unwrap().set_len(4 << 30).unwrap();
    let timeout = Some(Duration::from_millis(200));
    let options = GuestOptions { asynchronous: true, gives_way: true, ..place.options(true) };
    let options = GuestOptions { timeout, ..options };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let module = passthrough::module(64, "");
        let guest = Guest::with_options(&engine(), &module, options).unwrap();
        let warm = guest.warm_async(WarmUp::new()).await.unwrap();
        let mut lease = warm.lease_async(&LeaseOptions::default()).await.unwrap();
        let [path, len] = text(&mut lease, PATH, "hole").map(|number| Val::I32(number as i32));
        let [dir, follow, none, to] = [3, 1, 0, 8].map(Val::I32);
        let rights = Val::I64(1 << 1);
        let open = [dir, follow, path, len, none, rights, rights, none, to];
        let answer = lease.call_async("path_open", &open).await.unwrap();
        assert_eq!(answer[0].unwrap_i32(), 0);
        let file = number(&mut lease, 8) as i32;
        let parts: Vec<u8> =
            (0..1024).flat_map(|_| [131_072_u32, 3 << 20]).flat_map(u32::to_le_bytes).collect();
        lease.write_memory(65_536, &parts).unwrap();
        let read = [file, 65_536, 1024, 24].map(Val::I32);
        let ended = lease.call_async("fd_read", &read).await;
        assert!(matches!(ended, Err(CallError::Timeout(_))), "{ended:?}");
    });
}

/// Where the guest of this crate's tests is built.
fn files_guest() -> Option<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests/files.wasm");
    let wasm = fs::read(&path).ok();
    if wasm.is_none() {
        println!(
            "SKIPPED: {} is missing; `cargo xtask guests --only files` builds it",
            path.display()
        );
    }
    wasm
}

#[test]
fn a_program_uses_a_directory_in_every_way_that_rusts_library_has() {
    let Some(wasm) = files_guest() else { return };
    let place = GrantedDirs::new();
    let dirs = vec![(place.path("one"), "/".to_owned(), true)];
    let wasi = Wasi { dirs, output: afresh_wasm::Output::Capture(1 << 16), ..Wasi::default() };
    let options = GuestOptions { wasi, ..GuestOptions::default() };
    let warm = Guest::with_options(&engine(), &wasm, options).unwrap().warm_component().unwrap();
    let run = warm.command().unwrap();
    for _ in 0..2 {
        let mut lease = warm.lease().unwrap();
        let ended = lease.call(&run, &[]);
        let said = String::from_utf8_lossy(&lease.host().stderr()).into_owned();
        assert!(matches!(ended, Ok(_) | Err(CallError::Exit(0))), "{ended:?}\n{said}");
        assert!(lease.host().files().is_none());
        assert_eq!(fs::read(place.path("one/left/copy")).unwrap(), b"hello");
        fs::remove_dir_all(place.path("one/left")).unwrap();
    }
}
