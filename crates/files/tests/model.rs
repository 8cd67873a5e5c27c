//! The tree against a host directory: the same calls give the same answers and leave the same
//! files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

mod common;

use afresh_files::{Budget, Kind, Layer, New, Refused, Rename, Time, Tree, Walk};
use common::LayerStore;
use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, RenameFlags, linkat, renameat_with, unlinkat};

/// The start of both, deep enough that a few `..` lead nowhere else.
const TOP: &str = "a/b/c/d/e/f/g/h";

#[derive(Clone, Debug)]
enum Step {
    File(String),
    Directory(String),
    Link(String, String),
    HardLink(String, String),
    Remove(String),
    RemoveDirectory(String),
    Rename(String, String, u8),
    Write(String, u64, Vec<u8>),
    SetSize(String, u64),
    Mode(String, u32),
    Read(String, u64, usize),
    Checkpoint,
    Rollback,
}

fn path() -> impl Strategy<Value = String> {
    let name = prop_oneof![8 => "[pqrs]", 1 => Just("..".to_owned()), 1 => Just(".".to_owned())];
    (prop::collection::vec(name, 1..4), prop::bool::weighted(0.1))
        .prop_map(|(names, slash)| names.join("/") + if slash { "/" } else { "" })
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop::collection::vec(any::<u8>(), 1..6000);
    prop_oneof![
        4 => path().prop_map(Step::File),
        4 => path().prop_map(Step::Directory),
        2 => (path(), path()).prop_map(|(a, b)| Step::Link(a, b)),
        2 => (path(), path()).prop_map(|(a, b)| Step::HardLink(a, b)),
        2 => path().prop_map(Step::Remove),
        2 => path().prop_map(Step::RemoveDirectory),
        3 => (path(), path(), 0u8..3).prop_map(|(a, b, how)| Step::Rename(a, b, how)),
        4 => (path(), 0u64..20_000, bytes).prop_map(|(p, at, b)| Step::Write(p, at, b)),
        2 => (path(), 0u64..20_000).prop_map(|(p, size)| Step::SetSize(p, size)),
        1 => (path(), 0o400u32..0o777).prop_map(|(p, mode)| Step::Mode(p, mode)),
        3 => (path(), 0u64..20_000, 0usize..9000).prop_map(|(p, at, len)| Step::Read(p, at, len)),
        1 => Just(Step::Checkpoint),
        1 => Just(Step::Rollback),
    ]
}

/// The result of a host call, as the tree returns it.
fn host<T>(result: std::io::Result<T>) -> Result<T, i32> {
    result.map_err(|error| error.raw_os_error().unwrap_or(-1))
}

fn tree<T>(result: Result<T, Refused>) -> Result<T, i32> {
    result.map_err(|refused| refused.errno().raw_os_error())
}

struct TreeAndHost {
    root: PathBuf,
    tree: Tree,
    kept: Option<(Tree, BTreeMap<String, NodeState>)>,
}

/// A file as it is seen: kind, mode, names, and content or target.
type NodeState = (Kind, u32, u64, Vec<u8>);

impl TreeAndHost {
    fn new(root: &Path) -> Self {
        let top = root.join(TOP);
        fs::create_dir_all(&top).unwrap();
        let mut tree = Tree::new(Budget { bytes: 1 << 30, files: 1 << 20 });
        tree.make_directories(TOP, Time::default()).unwrap();
        Self { root: root.to_owned(), tree, kept: None }
    }

    /// With files that the tree has from a host directory.
    fn over_some(root: &Path, below: &Path) -> Self {
        for at in [root, below] {
            let top = at.join(TOP);
            fs::create_dir_all(top.join("p/q/r")).unwrap();
            fs::create_dir_all(top.join("q/empty")).unwrap();
            fs::write(top.join("p/p"), [1; 5000]).unwrap();
            fs::write(top.join("p/q/s"), [2; 9000]).unwrap();
            fs::write(top.join("p/q/r/p"), b"3").unwrap();
            std::os::unix::fs::symlink("p/q", top.join("r")).unwrap();
            fs::write(top.join("s"), b"").unwrap();
        }
        let tree = Tree::new(Budget { bytes: 1 << 30, files: 1 << 20 });
        let tree = tree.with_layer("/", &Layer::directory(below).unwrap()).unwrap();
        Self { root: root.to_owned(), tree, kept: None }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(TOP).join(path)
    }

    /// Gives a new file its mode, independent of this process's umask.
    fn permit(&self, path: &str, made: bool, mode: u32) {
        if made {
            fs::set_permissions(self.at(path), fs::Permissions::from_mode(mode)).unwrap();
        }
    }

    fn walk(&self, path: &str) -> Result<afresh_files::Node, Refused> {
        let top = self.tree.find(TOP).unwrap();
        self.tree.walk(path.as_bytes(), Walk::new(top))?.node()
    }

    fn name(&self, path: &str) -> Result<afresh_files::ResolvedName, Refused> {
        let top = self.tree.find(TOP).unwrap();
        self.tree.walk(path.as_bytes(), Walk::new(top).name())
    }

    fn create(&mut self, path: &str, new: New<'_>, mode: u32) -> Result<(), Refused> {
        let place = self.name(path)?;
        self.tree.create_at(&place, new, mode, Time::default()).map(drop)
    }

    fn run(&mut self, step: &Step) -> Result<(), TestCaseError> {
        let now = Time::default();
        match step {
            Step::File(path) => {
                let mut options = fs::OpenOptions::new();
                let one = host(options.write(true).create_new(true).open(self.at(path)));
                self.permit(path, one.is_ok(), 0o644);
                let two = self.create(path, New::File, 0o644);
                // A path that is wrong in more than one way may get either error.
                prop_assert_eq!(one.is_ok(), two.is_ok(), "{:?} {:?} {:?}", step, one, two);
            }
            Step::Directory(path) => {
                let one = host(fs::create_dir(self.at(path)));
                self.permit(path, one.is_ok(), 0o755);
                let two = tree(self.create(path, New::Directory, 0o755));
                prop_assert_eq!(one, two, "{:?}", step);
            }
            Step::Link(target, path) => {
                let one = host(std::os::unix::fs::symlink(target, self.at(path)));
                let two = tree(self.create(path, New::Link(target.as_bytes()), 0o777));
                prop_assert_eq!(one.is_ok(), two.is_ok(), "{:?} {:?} {:?}", step, one, two);
            }
            Step::HardLink(from, to) => {
                let one = linkat(CWD, self.at(from), CWD, self.at(to), AtFlags::empty());
                let two = (|| {
                    let top = self.tree.find(TOP).unwrap();
                    let how = Walk::new(top).follow(false);
                    let node = self.tree.walk(from.as_bytes(), how)?.node()?;
                    let to = self.name(to)?;
                    self.tree.link_at(node, &to, now)
                })();
                prop_assert_eq!(one.is_ok(), two.is_ok(), "{:?} {:?} {:?}", step, one, two);
            }
            Step::Remove(path) => {
                let one = unlinkat(CWD, self.at(path), AtFlags::empty());
                let two = self.name(path).and_then(|place| self.tree.remove_file_at(&place, now));
                prop_assert_eq!(one.is_ok(), two.is_ok(), "{:?} {:?} {:?}", step, one, two);
            }
            Step::RemoveDirectory(path) => {
                let one = host(fs::remove_dir(self.at(path)));
                let two =
                    self.name(path).and_then(|place| self.tree.remove_directory_at(&place, now));
                prop_assert_eq!(one.is_ok(), two.is_ok(), "{:?} {:?} {:?}", step, one, two);
            }
            Step::Rename(from, to, how) => {
                let (flags, how) = match how {
                    0 => (RenameFlags::empty(), Rename::Replace),
                    1 => (RenameFlags::NOREPLACE, Rename::Keep),
                    _ => (RenameFlags::EXCHANGE, Rename::Exchange),
                };
                let one = renameat_with(CWD, self.at(from), CWD, self.at(to), flags);
                let two = (|| {
                    let (from, to) = (self.name(from)?, self.name(to)?);
                    self.tree.rename_at(&from, &to, how, now)
                })();
                prop_assert_eq!(one.is_ok(), two.is_ok(), "{:?} {:?} {:?}", step, one, two);
            }
            Step::Write(path, at, bytes) => {
                let file = host(fs::OpenOptions::new().write(true).open(self.at(path)));
                let one = file.and_then(|file| host(file.write_at(bytes, *at)));
                let node = self.walk(path);
                let two = tree(node.and_then(|node| self.tree.write(node, *at, bytes, now)));
                prop_assert_eq!(one, two, "{:?}", step);
            }
            Step::SetSize(path, size) => {
                let file = host(fs::OpenOptions::new().write(true).open(self.at(path)));
                let one = file.and_then(|file| host(file.set_len(*size)));
                let node = self.walk(path);
                let two = tree(node.and_then(|node| self.tree.set_size(node, *size, now)));
                prop_assert_eq!(one, two, "{:?}", step);
            }
            Step::Mode(path, mode) => {
                // Nothing here depends on the bits, which root may ignore and others not.
                let mode = mode | 0o700;
                let one =
                    host(fs::set_permissions(self.at(path), fs::Permissions::from_mode(mode)));
                let node = self.walk(path);
                let two = tree(node.and_then(|node| self.tree.set_mode(node, mode, now)));
                prop_assert_eq!(one, two, "{:?}", step);
            }
            Step::Read(path, at, len) => {
                let (mut x, mut y) = (vec![7; *len], vec![7; *len]);
                let one = host(fs::File::open(self.at(path)).and_then(|f| f.read_at(&mut x, *at)));
                let node = self.walk(path);
                let two = tree(node.and_then(|node| self.tree.read(node, *at, &mut y)));
                prop_assert_eq!(&one, &two, "{:?}", step);
                let len = one.unwrap_or(0);
                prop_assert!(x[..len] == y[..len], "{:?}", step);
            }
            Step::Checkpoint => self.kept = Some((self.tree.clone(), visible_nodes(&self.tree))),
            Step::Rollback => {
                if let Some((kept, then)) = &self.kept {
                    prop_assert_eq!(&visible_nodes(kept), then, "a copy saw what came later");
                }
            }
        }
        Ok(())
    }
}

/// Every path of a tree.
fn visible_nodes(tree: &Tree) -> BTreeMap<String, NodeState> {
    let mut all = BTreeMap::new();
    let mut ahead = vec![(String::new(), Tree::ROOT)];
    while let Some((path, node)) = ahead.pop() {
        let stat = tree.stat(node).unwrap();
        let content = match stat.kind {
            Kind::File => tree.read_path(&path, 1 << 20).unwrap(),
            Kind::Link => tree.read_link(node).unwrap().to_vec(),
            _ => Vec::new(),
        };
        if stat.kind == Kind::Directory {
            for entry in tree.list(node).unwrap() {
                let name = String::from_utf8(entry.name.to_vec()).unwrap();
                ahead.push((format!("{path}/{name}"), entry.node));
            }
        }
        let mode = if stat.kind == Kind::Link { 0 } else { stat.mode };
        let links = if stat.kind == Kind::Directory { 0 } else { u64::from(stat.links) };
        all.insert(path, (stat.kind, mode, links, content));
    }
    all.remove("");
    all
}

/// The paths that are not the same in both, but for how many names a file has.
fn differing(
    one: &BTreeMap<String, NodeState>,
    two: &BTreeMap<String, NodeState>,
) -> BTreeSet<String> {
    let looks = |all: &BTreeMap<String, NodeState>, path: &String| {
        all.get(path).map(|(kind, mode, _, content)| (*kind, *mode, content.clone()))
    };
    let paths = one.keys().chain(two.keys());
    paths.filter(|path| looks(one, path) != looks(two, path)).cloned().collect()
}

/// Every path below a host directory.
fn seen_on_host(root: &Path) -> BTreeMap<String, NodeState> {
    let mut all = BTreeMap::new();
    let mut ahead = vec![root.to_owned()];
    while let Some(path) = ahead.pop() {
        for entry in fs::read_dir(&path).unwrap() {
            let path = entry.unwrap().path();
            let meta = path.symlink_metadata().unwrap();
            let (kind, content) = if meta.is_dir() {
                ahead.push(path.clone());
                (Kind::Directory, Vec::new())
            } else if meta.is_symlink() {
                (Kind::Link, fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec())
            } else {
                (Kind::File, fs::read(&path).unwrap())
            };
            let mode = if kind == Kind::Link { 0 } else { meta.mode() & 0o7777 };
            let links = if kind == Kind::Directory { 0 } else { meta.nlink() };
            let name = path.strip_prefix(root).unwrap().to_str().unwrap();
            all.insert(format!("/{name}"), (kind, mode, links, content));
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn it_does_what_the_hosts_file_system_does(steps in prop::collection::vec(step(), 1..80)) {
        let directory = tempfile::tempdir().unwrap();
        let mut both = TreeAndHost::new(directory.path());
        for step in &steps {
            both.run(step)?;
        }
        let now = visible_nodes(&both.tree);
        let modes = |all: BTreeMap<String, NodeState>| -> BTreeMap<String, NodeState> {
            // The directories above are made as the host likes.
            all.into_iter().filter(|(path, _)| path.starts_with(&format!("/{TOP}/"))).collect()
        };
        prop_assert_eq!(modes(now.clone()), modes(seen_on_host(directory.path())));
        // And it comes back from bytes as it was, its cost included.
        let saved = both.tree.saved().unwrap();
        let again = Tree::new(Budget::default()).restored(&saved).unwrap();
        prop_assert_eq!(&visible_nodes(&again), &now);
        prop_assert_eq!(again.used(), both.tree.used());
        prop_assert_eq!(again.saved().unwrap(), saved);
        // `diff` and a full walk find the same differences.
        if let Some((kept, then)) = &both.kept {
            for after in [&both.tree, &again] {
                let found = kept.diff(after).unwrap();
                let found: BTreeSet<String> = found
                    .changes
                    .into_iter()
                    .map(|change| String::from_utf8(change.path).unwrap())
                    .collect();
                prop_assert_eq!(&found, &differing(then, &now));
            }
        }
    }

    #[test]
    fn over_a_host_directory_it_does_so_too_and_comes_back_without_it(
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let (directory, below) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut both = TreeAndHost::over_some(directory.path(), below.path());
        let half = steps.len() / 2;
        for step in &steps[..half] {
            both.run(step)?;
        }
        let (then, before) = (visible_nodes(&both.tree), both.tree.clone());
        let kept = LayerStore::new(&both.tree);
        below.close().unwrap();
        // Everything continues without the directory.
        for step in &steps[half..] {
            both.run(step)?;
        }
        let now = visible_nodes(&both.tree);
        prop_assert_eq!(&now, &seen_on_host(directory.path()));
        for (tree, seen_before) in [(&both.tree, &now), (&before, &then)] {
            let again = kept.tree(tree);
            prop_assert_eq!(&visible_nodes(&again), seen_before);
            prop_assert_eq!(again.used(), tree.used());
            let saved = tree.capture_host_directories().unwrap().saved().unwrap();
            prop_assert_eq!(again.saved().unwrap(), saved);
        }
    }

    #[test]
    fn emptied_it_takes_nothing(steps in prop::collection::vec(step(), 1..60)) {
        let directory = tempfile::tempdir().unwrap();
        let mut both = TreeAndHost::new(directory.path());
        for step in &steps {
            both.run(step)?;
        }
        for entry in both.tree.list(Tree::ROOT).unwrap() {
            both.tree.remove_path(&*entry.name, Time::default()).unwrap();
        }
        let root = both.tree.stat(Tree::ROOT).unwrap();
        prop_assert_eq!(root.links, 2);
        // The root itself was changed.
        prop_assert_eq!(both.tree.used(), Budget { bytes: 256, files: 1 });
    }
}
