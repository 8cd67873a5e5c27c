//! A granted directory against the tree: the same calls give the same answers, and nothing leads
//! out.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use afresh_files::{
    Access, Budget, HostHandle, HostKind, HostOpening, Kind, New, Node, Refused, Rename, Time,
    Tree, Walk,
};
use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};

/// A granted directory, and another with a file that must not be read or changed.
struct OutsideDirectory {
    root: tempfile::TempDir,
}

const SECRET: &[u8] = b"secret";

impl OutsideDirectory {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("out")).unwrap();
        fs::create_dir(root.path().join("in")).unwrap();
        fs::write(root.path().join("out/secret"), SECRET).unwrap();
        Self { root }
    }

    fn granted(&self) -> PathBuf {
        self.root.path().join("in")
    }

    fn handle(&self, writable: bool) -> HostHandle {
        HostHandle::grant(&self.granted(), writable).unwrap()
    }

    fn check(&self) {
        let mut names: Vec<_> = fs::read_dir(self.root.path().join("out"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["secret"], "something was made or removed outside");
        let secret = self.root.path().join("out/secret");
        assert_eq!(fs::read(&secret).unwrap(), SECRET);
        assert_eq!(fs::metadata(secret).unwrap().nlink(), 1);
    }
}

/// Opening with everything that changes a file.
fn making(path_is_followed: bool) -> HostOpening {
    HostOpening {
        access: Access::both(),
        follow: path_is_followed,
        create: true,
        truncate: true,
        ..HostOpening::default()
    }
}

fn reading() -> HostOpening {
    HostOpening { access: Access::reading(), follow: true, ..HostOpening::default() }
}

/// Paths of the outside file and its directory, from the granted directory.
fn ways_out(root: &Path) -> Vec<String> {
    let root = root.to_str().unwrap();
    let mut ways: Vec<String> = [
        "../out/secret",
        "../out/secret/",
        "./../out/secret",
        "d/../../out/secret",
        "..//out/secret",
        "up/out/secret",
        "absolute/secret",
        "absolute/secret/",
        "file",
        "file/",
        "chain",
        "d/e/climb/secret",
        "../in/../out/secret",
        "proc/root",
    ]
    .map(str::to_owned)
    .into();
    ways.push(format!("{root}/out/secret"));
    ways.push(format!("//{root}/out/secret"));
    ways
}

#[test]
fn no_path_and_no_link_leads_out() {
    let outside = OutsideDirectory::new();
    let (inside, root) = (outside.granted(), outside.root.path());
    fs::create_dir_all(inside.join("d/e")).unwrap();
    symlink("..", inside.join("up")).unwrap();
    symlink(root.join("out"), inside.join("absolute")).unwrap();
    symlink("../out/secret", inside.join("file")).unwrap();
    symlink("file", inside.join("chain")).unwrap();
    symlink("../../../out", inside.join("d/e/climb")).unwrap();
    symlink("/proc/self", inside.join("proc")).unwrap();
    let handle = outside.handle(true);
    let mut made = handle.open(b"mine", making(true)).unwrap();
    made.write(b"x").unwrap();
    for way in ways_out(root) {
        let path = way.as_bytes();
        let refusals = [
            handle.open(path, reading()).err(),
            handle.open(path, making(true)).err(),
            handle.open(path, HostOpening { exclusive: true, ..making(true) }).err(),
            handle.stat_at(path, true).err(),
            handle.set_times_at(path, true, Some(Time::now()), None).err(),
        ];
        for (number, refusal) in refusals.into_iter().enumerate() {
            let refusal = refusal.unwrap_or_else(|| panic!("{way}: {number} is not refused"));
            let known = [
                Refused::NotPermitted,
                Refused::NotDirectory,
                Refused::Exists,
                Refused::IsDirectory,
            ];
            assert!(known.contains(&refusal), "{way}: {number}: {refusal:?}");
        }
        // These concern the link, if the last name is one, and never its target.
        let _ = handle.rename(b"mine", &handle, format!("{way}-new").as_bytes());
        let _ = handle.rename(format!("{way}-new").as_bytes(), &handle, b"mine");
        let _ = handle.link(path, &handle, b"hard");
        if let Ok(stat) = handle.stat_at(b"hard", false) {
            assert_eq!(stat.kind, HostKind::Link, "{way}");
            handle.remove_file(b"hard").unwrap();
        }
        let _ = handle.link(b"mine", &handle, format!("{way}2").as_bytes());
        let _ = handle.create_directory(format!("{way}3").as_bytes());
        let _ = handle.create_link(b"mine", format!("{way}4").as_bytes());
        let _ = handle.read_link(path);
        outside.check();
    }
    for way in ways_out(root) {
        let _ = handle.remove_file(way.as_bytes());
        let _ = handle.remove_directory(way.as_bytes());
        outside.check();
    }
}

#[test]
fn a_file_is_made_through_a_dangling_link_only_beneath() {
    let outside = OutsideDirectory::new();
    let inside = outside.granted();
    symlink("../out/new", inside.join("leads-out")).unwrap();
    symlink(outside.root.path().join("out/new"), inside.join("absolute")).unwrap();
    symlink("d/new", inside.join("stays")).unwrap();
    fs::create_dir(inside.join("d")).unwrap();
    let handle = outside.handle(true);
    for path in [&b"leads-out"[..], b"absolute"] {
        assert_eq!(handle.open(path, making(true)).unwrap_err(), Refused::NotPermitted);
        assert_eq!(handle.open(path, making(false)).unwrap_err(), Refused::Loop);
        let exclusive = HostOpening { exclusive: true, ..making(true) };
        assert_eq!(handle.open(path, exclusive).unwrap_err(), Refused::Exists);
    }
    handle.open(b"stays", making(true)).unwrap();
    assert!(inside.join("d/new").is_file());
    outside.check();
}

#[test]
fn files_granted_for_reading_change_through_no_handle() {
    let outside = OutsideDirectory::new();
    let inside = outside.granted();
    fs::create_dir(inside.join("d")).unwrap();
    fs::write(inside.join("d/file"), b"kept").unwrap();
    let free = tempfile::tempdir().unwrap();
    let (read, write) = (outside.handle(false), HostHandle::grant(free.path(), true).unwrap());
    let below = read.open(b"d", HostOpening { directory: true, ..reading() }).unwrap();
    write.open(b"own", making(true)).unwrap();
    for (handle, path) in [(&read, &b"d/file"[..]), (&below, b"file")] {
        let file = handle.open(path, reading()).unwrap();
        let refusals = [
            handle.open(path, making(true)).err(),
            handle.open(path, HostOpening { truncate: true, ..reading() }).err(),
            handle.open(b"new", HostOpening { create: true, ..reading() }).err(),
            handle.create_directory(b"new").err(),
            handle.create_link(b"x", b"new").err(),
            handle.link(path, &write, b"alias").err(),
            write.link(b"own", handle, b"new").err(),
            handle.rename(path, &write, b"taken").err(),
            write.rename(b"own", handle, b"new").err(),
            handle.remove_file(path).err(),
            handle.remove_directory(b"d").err(),
            handle.set_times_at(path, true, Some(Time::now()), None).err(),
            handle.set_times(Some(Time::now()), None).err(),
            file.set_times(Some(Time::now()), None).err(),
        ];
        for (number, refusal) in refusals.into_iter().enumerate() {
            assert_eq!(refusal, Some(Refused::NotPermitted), "{number}");
        }
        assert_eq!(file.write_at(0, b"x"), Err(Refused::NotOpen));
        assert!(file.set_size(0).is_err());
        let mut bytes = [0; 8];
        assert_eq!(file.read_at(0, &mut bytes), Ok(4));
    }
    assert_eq!(fs::read(inside.join("d/file")).unwrap(), b"kept");
}

#[test]
fn pipes_devices_and_sockets_are_shown_and_never_opened() {
    let outside = OutsideDirectory::new();
    let inside = outside.granted();
    mknodat(CWD, inside.join("pipe"), FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(inside.join("socket")).unwrap();
    let handle = outside.handle(true);
    for (path, kind) in [(&b"pipe"[..], HostKind::Fifo), (b"socket", HostKind::Socket)] {
        assert_eq!(handle.stat_at(path, true).unwrap().kind, kind);
        for how in [reading(), making(true), HostOpening { create: false, ..making(true) }] {
            assert_eq!(handle.open(path, how).unwrap_err(), Refused::NotPermitted);
        }
        let directory = HostOpening { directory: true, ..reading() };
        assert_eq!(handle.open(path, directory).unwrap_err(), Refused::NotDirectory);
        handle.rename(path, &handle, b"moved").unwrap();
        handle.remove_file(b"moved").unwrap();
    }
    // Devices cannot be made without privileges, so those of the host serve.
    let devices = HostHandle::grant(Path::new("/dev"), true).unwrap();
    assert_eq!(devices.stat_at(b"null", true).unwrap().kind, HostKind::CharacterDevice);
    assert_eq!(devices.open(b"null", reading()).unwrap_err(), Refused::NotPermitted);
    assert_eq!(devices.open(b"zero", making(true)).unwrap_err(), Refused::NotPermitted);
}

#[test]
fn a_directory_that_becomes_a_link_during_the_walk_leads_nowhere() {
    let outside = OutsideDirectory::new();
    let inside = outside.granted();
    fs::create_dir(inside.join("a")).unwrap();
    fs::write(inside.join("a/secret"), b"inside").unwrap();
    symlink("../out", inside.join("b")).unwrap();
    let handle = outside.handle(true);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let exchange = rustix::fs::RenameFlags::EXCHANGE;
            while !stop.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(CWD, inside.join("a"), CWD, inside.join("b"), exchange)
                    .unwrap();
            }
        });
        let mut opened = 0;
        for round in 0..2000_u32 {
            let path: &[u8] = if round % 2 == 0 { b"a/secret" } else { b"a/../b/secret" };
            if let Ok(file) = handle.open(path, reading()) {
                let mut bytes = [0; 16];
                let len = file.read_at(0, &mut bytes).unwrap();
                assert_eq!(&bytes[..len], b"inside");
                opened += 1;
            }
            // Each concerns the outside file, if it follows the link.
            let _ = handle.open(b"a/new", making(true));
            let _ = handle.remove_file(b"a/new");
            let _ = handle.rename(b"a/secret", &handle, b"a/secret");
            let _ = handle.link(b"a/secret", &handle, b"alias");
            if let Ok(stat) = handle.stat_at(b"alias", false) {
                assert_eq!(stat.size, 6);
                handle.remove_file(b"alias").unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(opened > 0);
    });
    outside.check();
}

#[test]
fn entries_come_in_buffers_and_a_position_is_where_reading_continues() {
    let outside = OutsideDirectory::new();
    let inside = outside.granted();
    for number in 0..3000 {
        fs::write(inside.join(format!("a-rather-long-name-{number}")), b"").unwrap();
    }
    let mut directory = outside.handle(false);
    let (mut at, mut names, mut calls) = (0, std::collections::BTreeSet::new(), 0);
    loop {
        let read = directory.entries(at).unwrap();
        assert!(read.len() < 1500, "{}", read.len());
        let Some(middle) = read.get(read.len() / 2) else { break };
        // Continue in the middle.
        at = middle.next;
        names.extend(read[..=read.len() / 2].iter().map(|entry| entry.name.clone()));
        calls += 1;
    }
    assert_eq!(names.len(), 3000 + 2);
    assert!(calls > 3, "{calls}");
    for position in [1, 7, u64::from(u32::MAX), i64::MAX as u64, u64::MAX] {
        let _ = directory.entries(position);
    }
}

#[test]
fn long_paths_and_odd_ones_are_refused_as_everywhere() {
    let outside = OutsideDirectory::new();
    let handle = outside.handle(true);
    let long = [b'x'; 256];
    let deep = b"x/".repeat(3000);
    for path in [&long[..], &deep] {
        assert_eq!(handle.open(path, making(true)).unwrap_err(), Refused::NameTooLong);
        assert_eq!(handle.create_directory(path).unwrap_err(), Refused::NameTooLong);
        assert_eq!(handle.rename(path, &handle, path).unwrap_err(), Refused::NameTooLong);
    }
    assert_eq!(handle.create_link(&deep, b"link").unwrap_err(), Refused::NameTooLong);
    for (path, refusal) in [
        (&b""[..], Refused::Missing),
        (b"/", Refused::NotPermitted),
        (b"///", Refused::NotPermitted),
        (b"a\0b", Refused::Invalid),
        (b"new/", Refused::IsDirectory),
    ] {
        assert_eq!(handle.open(path, making(true)).unwrap_err(), refusal, "{path:?}");
    }
    // A chain of directories that is deeper than a path is long can be made, and left.
    let mut at = handle;
    for _ in 0..20 {
        let name = [b'd'; 250];
        at.create_directory(&name).unwrap();
        at = at.open(&name, reading()).unwrap();
    }
    at.open(b"file", making(true)).unwrap();
    assert_eq!(at.stat_at(b"..", true).unwrap_err(), Refused::NotPermitted);
}

#[derive(Clone, Debug)]
enum Step {
    Directory(String),
    Link(String, String),
    HardLink(String, String),
    Rename(String, String),
    Remove(String),
    RemoveDirectory(String),
    Open(String, u8, Vec<u8>),
    Stat(String, bool),
    ReadLink(String),
    List(String),
}

/// Paths that start at the directory, or at one below it.
fn path() -> impl Strategy<Value = String> {
    let name = prop_oneof![8 => "[pqr]", 2 => Just("..".to_owned()), 1 => Just(".".to_owned())];
    (prop::collection::vec(name, 1..5), prop::bool::weighted(0.15), prop::bool::weighted(0.03))
        .prop_map(|(names, slash, absolute)| {
            let path = names.join("/") + if slash { "/" } else { "" };
            if absolute { format!("/{path}") } else { path }
        })
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop::collection::vec(any::<u8>(), 1..40);
    prop_oneof![
        4 => path().prop_map(Step::Directory),
        4 => (path(), path()).prop_map(|(target, at)| Step::Link(target, at)),
        2 => (path(), path()).prop_map(|(old, new)| Step::HardLink(old, new)),
        3 => (path(), path()).prop_map(|(old, new)| Step::Rename(old, new)),
        2 => path().prop_map(Step::Remove),
        2 => path().prop_map(Step::RemoveDirectory),
        6 => (path(), any::<u8>(), bytes).prop_map(|(at, how, bytes)| Step::Open(at, how, bytes)),
        2 => (path(), any::<bool>()).prop_map(|(at, follow)| Step::Stat(at, follow)),
        1 => path().prop_map(Step::ReadLink),
        1 => path().prop_map(Step::List),
    ]
}

/// The answer to a step: kind, size and text.
type Answer = Result<(String, u64, Vec<u8>), i32>;

fn plain_answer<T>(result: Result<T, Refused>) -> Answer {
    answer_of(result.map(|_| (String::new(), 0, Vec::new())))
}

fn answer_of(result: Result<(String, u64, Vec<u8>), Refused>) -> Answer {
    result.map_err(|refused| refused.errno().raw_os_error())
}

fn opening(how: u8) -> HostOpening {
    HostOpening {
        access: Access { read: true, write: how & 1 != 0, append: how & 3 == 3 },
        follow: how & 4 != 0,
        create: how & 8 != 0,
        exclusive: how & 24 == 24,
        truncate: how & 33 == 33,
        directory: how & 72 == 64,
    }
}

fn in_tree(tree: &mut Tree, from: Node, step: &Step) -> Answer {
    let now = Time::default();
    let walk = Walk::beneath(from);
    let find = |tree: &Tree, path: &str, follow| {
        tree.walk(path.as_bytes(), walk.follow(follow)).and_then(|place| place.node())
    };
    let name = |tree: &Tree, path: &str| tree.walk(path.as_bytes(), walk.name());
    match step {
        Step::Directory(path) => plain_answer(
            name(tree, path).and_then(|at| tree.create_at(&at, New::Directory, 0o755, now)),
        ),
        Step::Link(target, _) if target.starts_with('/') => {
            plain_answer::<()>(Err(Refused::NotPermitted))
        }
        Step::Link(target, path) => plain_answer(
            name(tree, path)
                .and_then(|at| tree.create_at(&at, New::Link(target.as_bytes()), 0o777, now)),
        ),
        Step::HardLink(old, new) => plain_answer((|| {
            let node = find(tree, old, false)?;
            if old.ends_with('/') {
                return Err(Refused::NotPermitted);
            }
            let at = name(tree, new)?;
            tree.link_at(node, &at, now)
        })()),
        Step::Rename(old, new) => plain_answer((|| {
            let (from, to) = (name(tree, old)?, name(tree, new)?);
            tree.rename_at(&from, &to, Rename::Replace, now)
        })()),
        Step::Remove(path) => {
            plain_answer(name(tree, path).and_then(|at| tree.remove_file_at(&at, now)))
        }
        Step::RemoveDirectory(path) => {
            plain_answer(name(tree, path).and_then(|at| tree.remove_directory_at(&at, now)))
        }
        Step::Open(path, how, bytes) => {
            answer_of(open_in_tree(tree, walk, path, opening(*how), bytes))
        }
        Step::Stat(path, follow) => answer_of(find(tree, path, *follow).and_then(|node| {
            let stat = tree.stat(node)?;
            let size = if stat.kind == Kind::Directory { 0 } else { stat.size };
            Ok((format!("{:?}", stat.kind), size, Vec::new()))
        })),
        Step::ReadLink(path) => answer_of(
            find(tree, path, false)
                .and_then(|node| tree.read_link(node))
                .map(|target| (String::new(), 0, target.to_vec())),
        ),
        Step::List(path) => answer_of(find(tree, path, true).and_then(|node| {
            let mut text: Vec<String> = tree
                .list(node)?
                .iter()
                .map(|one| format!("{:?} {:?}", String::from_utf8_lossy(&one.name), one.kind))
                .collect();
            text.sort();
            Ok((text.join(" "), 0, Vec::new()))
        })),
    }
}

fn open_in_tree(
    tree: &mut Tree,
    walk: Walk,
    path: &str,
    how: HostOpening,
    bytes: &[u8],
) -> Result<(String, u64, Vec<u8>), Refused> {
    let now = Time::default();
    let mut walk = walk.follow(how.follow);
    if how.exclusive {
        walk = walk.name();
    }
    let place = tree.walk(path.as_bytes(), walk)?;
    let changes = how.access.write || how.create || how.truncate;
    let node = match place.found {
        None if how.create => tree.create_at(&place, New::File, 0o644, now)?,
        None => return Err(Refused::Missing),
        Some(_) if how.exclusive => return Err(Refused::Exists),
        Some((_, Kind::Link)) => return Err(Refused::Loop),
        Some((_, Kind::Directory)) if changes => return Err(Refused::IsDirectory),
        Some((_, kind)) if kind != Kind::Directory && how.directory => {
            return Err(Refused::NotDirectory);
        }
        Some((node, _)) => node,
    };
    if how.truncate {
        tree.set_size(node, 0, now)?;
    }
    let mut open = tree.open(node, how.access)?;
    let kind = tree.stat(node)?.kind;
    if how.access.write {
        open.offset = 3;
        open.write(tree, bytes, now)?;
    }
    let mut content = vec![0; 4096];
    let len = if kind == Kind::File { open.read_at(tree, 0, &mut content)? } else { 0 };
    content.truncate(len);
    let at = open.offset;
    tree.close(open);
    Ok((format!("{kind:?}"), at, content))
}

fn on_host(handle: &HostHandle, step: &Step) -> Answer {
    match step {
        Step::Directory(path) => plain_answer(handle.create_directory(path.as_bytes())),
        Step::Link(target, path) => {
            plain_answer(handle.create_link(target.as_bytes(), path.as_bytes()))
        }
        Step::HardLink(old, new) => {
            plain_answer(handle.link(old.as_bytes(), handle, new.as_bytes()))
        }
        Step::Rename(old, new) => {
            plain_answer(handle.rename(old.as_bytes(), handle, new.as_bytes()))
        }
        Step::Remove(path) => plain_answer(handle.remove_file(path.as_bytes())),
        Step::RemoveDirectory(path) => plain_answer(handle.remove_directory(path.as_bytes())),
        Step::Open(path, how, bytes) => answer_of((|| {
            let how = opening(*how);
            let mut open = handle.open(path.as_bytes(), how)?;
            if how.access.write {
                open.offset = 3;
                open.write(bytes)?;
            }
            let mut content = vec![0; 4096];
            let len = if open.is_directory() { 0 } else { open.read_at(0, &mut content)? };
            content.truncate(len);
            Ok((format!("{:?}", open.stat()?.kind), open.offset, content))
        })()),
        Step::Stat(path, follow) => {
            answer_of(handle.stat_at(path.as_bytes(), *follow).map(|stat| {
                let size = if stat.kind == HostKind::Directory { 0 } else { stat.size };
                (format!("{:?}", stat.kind), size, Vec::new())
            }))
        }
        Step::ReadLink(path) => {
            answer_of(handle.read_link(path.as_bytes()).map(|target| (String::new(), 0, target)))
        }
        Step::List(path) => answer_of((|| {
            let mut directory = handle.open(path.as_bytes(), reading())?;
            let mut text: Vec<String> = directory
                .entries(0)?
                .iter()
                .filter(|one| one.name != b"." && one.name != b"..")
                .map(|one| format!("{:?} {:?}", String::from_utf8_lossy(&one.name), one.kind))
                .collect();
            text.sort();
            Ok((text.join(" "), 0, Vec::new()))
        })()),
    }
}

/// Whether the two answers differ only in which of several faults of one call is reported.
fn is_same(step: &Step, tree: &Answer, host: &Answer) -> bool {
    let dotted = |path: &str| {
        let last = path.trim_end_matches('/').rsplit('/').next();
        matches!(last, Some("." | ".."))
    };
    match step {
        _ if tree == host => true,
        // A path has a slash behind it, or ends in a directory's own name, and is refused anyway.
        Step::Open(path, ..)
        | Step::Directory(path)
        | Step::Remove(path)
        | Step::RemoveDirectory(path) => {
            tree.is_err() && host.is_err() && (path.ends_with('/') || dotted(path))
        }
        Step::Link(_, path) => {
            tree.is_err() && host.is_err() && (path.ends_with('/') || dotted(path))
        }
        Step::HardLink(..) | Step::Rename(..) => tree.is_err() && host.is_err(),
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_granted_directory_answers_as_a_tree(steps in prop::collection::vec((any::<bool>(), step()), 1..40)) {
        let outside = OutsideDirectory::new();
        // Two below the top, so that a path that leaves it by mistake is still within the test's
        // own directory.
        let handle = outside.handle(true);
        let mut tree = Tree::new(Budget::default());
        for (below, step) in &steps {
            let directory = HostOpening { directory: true, ..reading() };
            let sub = handle.open(b"p", directory).ok().filter(|_| *below);
            let node = tree.walk(b"p", Walk::beneath(Tree::ROOT)).ok().and_then(|at| at.found);
            let node = node.filter(|(_, kind)| *below && *kind == Kind::Directory);
            prop_assert_eq!(sub.is_some(), node.is_some());
            let expected = in_tree(&mut tree, node.map_or(Tree::ROOT, |(node, _)| node), step);
            let found = on_host(sub.as_ref().unwrap_or(&handle), step);
            prop_assert!(is_same(step, &expected, &found), "{:?}: the tree {:?}, the host {:?}", step, expected, found);
        }
        outside.check();
    }
}
