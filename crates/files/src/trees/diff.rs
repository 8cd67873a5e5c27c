//! The differences of two trees: paths, and numbers of bytes.
//!
//! Promises: every path whose content, target, mode, extended attributes or kind differs is listed,
//! up to a documented limit; times alone make no difference. The cost is proportional to the
//! difference: each file knows its directory, so unchanged directories are skipped, and in the
//! others only the relevant names are compared. A changed file that had several names is the
//! exception: it is looked for everywhere.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use crate::error::Refused;
use crate::nodes::content::{Content, PAGE};
use crate::nodes::inode::{Body, Directory, Entry, Inode};
use crate::nodes::name::Name;
use crate::nodes::node::{Kind, Node};
use crate::nodes::source::Source;
use crate::trees::tree::Tree;

/// Maximum bytes of paths that one comparison lists.
const MAX_PATH_BYTES: usize = 64 << 20;

/// The kind of change of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Change {
    /// It is there in the second tree only.
    Added,
    /// It is there in both.
    Changed,
    /// It is there in the first tree only.
    Removed,
}

/// A path in which two trees differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileChange {
    /// From the root, with a slash before it.
    pub path: Vec<u8>,
    /// The kind of change.
    pub change: Change,
    /// The kind of the file; that in the second tree, if it is in both.
    pub kind: Kind,
    /// Bytes of content that differ; for an added or removed file, all of them.
    pub bytes: u64,
}

/// Everything in which two trees differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileDifference {
    /// By path.
    pub changes: Vec<FileChange>,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Whether the list is incomplete.
    pub truncated: bool,
}

impl FileDifference {
    /// Whether the trees are equal.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

/// A path that a comparison has yet to visit, below a directory that it has visited. It has the
/// length of the path above and a name, which it shares with the tree. Whole paths of a deep
/// directory would take the product of its depth and the number of its files.
///
/// Comparisons visit the last path first, so that the path of the directory still begins the path
/// that was visited before.
#[derive(Default)]
struct PendingPath {
    above: usize,
    name: Option<Arc<[u8]>>,
}

impl PendingPath {
    /// Replaces the path that was visited before.
    fn write_to(&self, path: &mut Vec<u8>) {
        path.truncate(self.above);
        if let Some(name) = &self.name {
            path.push(b'/');
            path.extend_from_slice(name);
        }
    }
}

struct Comparison<'a> {
    one: &'a Tree,
    two: &'a Tree,
    changed: HashSet<Node>,
    changed_names: Option<ChangedNames>,
    found: FileDifference,
    listed: usize,
}

/// Names that lead to changed files, by directory.
type ChangedNames = HashMap<Node, BTreeSet<Name>>;

/// The entries of a name in two directories.
type EntryPair = (Option<Entry>, Option<Entry>);

impl Tree {
    /// The changes that lead from this tree to `other`, a relative of it.
    ///
    /// # Errors
    /// [`Refused::Layer`] when bytes of a layer cannot be read.
    pub fn diff(&self, other: &Self) -> Result<FileDifference, Refused> {
        let changed = self.nodes.differing(&other.nodes, |a, b| Arc::ptr_eq(a, b) || a.same(b));
        let changed: HashSet<Node> = changed.into_iter().map(|(node, ..)| *node).collect();
        if changed.is_empty() {
            return Ok(FileDifference::default());
        }
        let (changed_names, found) =
            (changed_names(self, other, &changed)?, FileDifference::default());
        let mut comparison =
            Comparison { one: self, two: other, changed, changed_names, found, listed: 0 };
        comparison.run()?;
        let mut found = comparison.found;
        found.changes.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }
}

/// The file, if the tree has it.
fn inode_if_exists(tree: &Tree, node: Node) -> Result<Option<Arc<Inode>>, Refused> {
    match tree.inode(node) {
        Ok(inode) => Ok(Some(inode)),
        Err(Refused::Missing) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The names that lead from either root to changed files. `None` if a file may have more than one
/// name. `None` where a file is not known to have but one name.
fn changed_names(
    one: &Tree,
    two: &Tree,
    changed: &HashSet<Node>,
) -> Result<Option<ChangedNames>, Refused> {
    let mut changed_names = ChangedNames::new();
    for node in changed {
        let (Some(before), Some(after)) =
            (inode_if_exists(one, *node)?, inode_if_exists(two, *node)?)
        else {
            // If only one tree has the file, its directory has changed as well.
            continue;
        };
        for (tree, inode) in [(one, before), (two, after)] {
            if *node != Tree::ROOT && inode.name.is_none() {
                return Ok(None);
            }
            let mut next = inode.name.clone();
            while let Some((above, name)) = next {
                let above = tree.lower.layers.mounted(above);
                if !changed_names.entry(above).or_default().insert(name) {
                    break;
                }
                next = inode_if_exists(tree, above)?.and_then(|inode| inode.name.clone());
            }
        }
    }
    Ok(Some(changed_names))
}

fn directory_of(inode: &Inode) -> Result<&Directory, Refused> {
    match &inode.body {
        Body::Directory(directory) => Ok(directory),
        _ => Err(Refused::NotDirectory),
    }
}

impl Comparison<'_> {
    /// The names in two directories that may mean something else, or something that changed.
    fn names(&self, one: Node, two: Node) -> Result<BTreeMap<Name, EntryPair>, Refused> {
        let (first, second) = (self.one.inode(one)?, self.two.inode(two)?);
        let (a, b) = (&directory_of(&first)?.entries, &directory_of(&second)?.entries);
        let mut names: BTreeMap<Name, EntryPair> = BTreeMap::new();
        match &self.changed_names {
            Some(changed_names) if one == two => {
                for (name, x, y) in a.differing(b, |x, y| (x.node, x.kind) == (y.node, y.kind)) {
                    names.insert(name.clone(), (x.copied(), y.copied()));
                }
                for name in changed_names.get(&one).into_iter().flatten() {
                    let meanings = (a.get(&*name.0).copied(), b.get(&*name.0).copied());
                    names.insert(name.clone(), meanings);
                }
            }
            _ => {
                for (name, entry) in a.iter() {
                    names.entry(name.clone()).or_default().0 = Some(*entry);
                }
                for (name, entry) in b.iter() {
                    names.entry(name.clone()).or_default().1 = Some(*entry);
                }
            }
        }
        Ok(names)
    }

    fn run(&mut self) -> Result<(), Refused> {
        // Pairs of directories with the same path.
        let mut ahead = vec![(PendingPath::default(), (Tree::ROOT, Tree::ROOT))];
        let mut path = Vec::new();
        while let Some((pending, (one, two))) = ahead.pop() {
            if self.found.truncated {
                return Ok(());
            }
            pending.write_to(&mut path);
            let above = path.len();
            for (name, meanings) in self.names(one, two)? {
                let below = PendingPath { above, name: Some(name.0) };
                below.write_to(&mut path);
                match meanings {
                    (Some(x), Some(y)) if x.kind == y.kind => {
                        self.compare(&path, x.node, y.node)?;
                        if x.kind == Kind::Directory && self.may_differ(x.node, y.node) {
                            ahead.push((below, (x.node, y.node)));
                        }
                    }
                    (x, y) => {
                        if let Some(x) = x {
                            self.all(self.one, &path, x.node, Change::Removed)?;
                        }
                        if let Some(y) = y {
                            self.all(self.two, &path, y.node, Change::Added)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether anything below two directories can differ.
    fn may_differ(&self, one: Node, two: Node) -> bool {
        let touched = |tree: &Tree| tree.nodes.get(&one).is_some();
        one != two
            || match &self.changed_names {
                Some(changed_names) => {
                    self.changed.contains(&one) || changed_names.contains_key(&one)
                }
                None => touched(self.one) || touched(self.two),
            }
    }

    fn add(&mut self, path: &[u8], change: Change, kind: Kind, bytes: u64) {
        self.listed += path.len() + size_of::<FileChange>();
        if self.listed > MAX_PATH_BYTES {
            self.found.truncated = true;
            return;
        }
        self.found.bytes += bytes;
        self.found.changes.push(FileChange { path: path.to_vec(), change, kind, bytes });
    }

    /// The same name in both.
    fn compare(&mut self, path: &[u8], one: Node, two: Node) -> Result<(), Refused> {
        if one == two && !self.changed.contains(&one) {
            return Ok(());
        }
        let (a, b) = (self.one.inode(one)?, self.two.inode(two)?);
        let bytes = match (&a.body, &b.body) {
            (Body::File(x), Body::File(y)) => match differing(self.one, self.two, x, y) {
                // The bytes of a host file are lost.
                Err(_) if is_of_host(x) || is_of_host(y) => y.size.max(1),
                bytes => bytes?,
            },
            (Body::Link(x), Body::Link(y)) => u64::from(x != y) * y.len() as u64,
            _ => 0,
        };
        if bytes > 0 || !alike(&a, &b) {
            self.add(path, Change::Changed, b.kind(), bytes);
        }
        Ok(())
    }

    /// Everything below a path that only one of them has.
    fn all(&mut self, tree: &Tree, path: &[u8], node: Node, change: Change) -> Result<(), Refused> {
        let mut path = path.to_vec();
        let mut ahead = vec![(PendingPath { above: path.len(), name: None }, node)];
        while let Some((pending, node)) = ahead.pop() {
            if self.found.truncated {
                return Ok(());
            }
            pending.write_to(&mut path);
            // The host has removed it since its directory was listed.
            let Some(inode) = inode_if_exists(tree, node)? else { continue };
            let stat = inode.stat(node);
            if stat.kind == Kind::Directory {
                let above = path.len();
                for entry in tree.list(node)? {
                    ahead.push((PendingPath { above, name: Some(entry.name) }, entry.node));
                }
            }
            let bytes = if stat.kind == Kind::Directory { 0 } else { stat.size };
            self.add(&path, change, stat.kind, bytes);
        }
        Ok(())
    }
}

/// Whether everything but content and times is the same.
fn alike(a: &Inode, b: &Inode) -> bool {
    let body = match (&a.body, &b.body) {
        (Body::File(x), Body::File(y)) => x.size == y.size,
        (Body::Device(x), Body::Device(y)) => x == y,
        _ => true,
    };
    body && a.mode == b.mode && a.attributes == b.attributes
}

/// Whether bytes of a content are those of a host file.
fn is_of_host(content: &Content) -> bool {
    content.under.as_ref().is_some_and(|under| matches!(under.source, Source::Host(_)))
}

/// Bytes in which two files differ. Shared pages are skipped.
fn differing(one: &Tree, two: &Tree, a: &Content, b: &Content) -> Result<u64, Refused> {
    let beyond = a.size.abs_diff(b.size);
    let common = a.size.min(b.size);
    let related = a.under.as_ref().map(|u| u.source) == b.under.as_ref().map(|u| u.source);
    let mut ranges: Vec<Range<u64>> = if related {
        let pages = a.pages.differing(&b.pages, Arc::ptr_eq);
        let mut ranges: Vec<_> = pages.into_iter().map(|(n, ..)| *n..*n + 1).collect();
        // If one was cut shorter, the other shows the layer there.
        let len = |content: &Content| content.under.as_ref().map_or(0, |under| under.len);
        let (low, high) = (len(a).min(len(b)), len(a).max(len(b)));
        if low != high {
            ranges.push(low / PAGE as u64..high.min(common).div_ceil(PAGE as u64));
        }
        ranges
    } else {
        a.runs().chain(b.runs()).collect()
    };
    ranges.sort_unstable_by_key(|range| range.start);
    let (one, two) = (&one.lower.layers, &two.lower.layers);
    let mut bytes = beyond;
    let (mut x, mut y) = ([0; PAGE], [0; PAGE]);
    let mut number = 0;
    for range in ranges {
        number = range.start.max(number);
        while number < range.end && number * (PAGE as u64) < common {
            let at = number * PAGE as u64;
            let len = (common - at).min(PAGE as u64) as usize;
            a.read(one, at, &mut x[..len])?;
            b.read(two, at, &mut y[..len])?;
            let differing = x[..len].iter().zip(&y[..len]).filter(|(p, q)| p != q).count();
            bytes += differing as u64;
            number += 1;
            if differing == 0 && x[..len].iter().all(|byte| *byte == 0) {
                // A hole may begin here.
                let next = [a.next_page(one, number), b.next_page(two, number)];
                number = next.into_iter().flatten().min().unwrap_or(range.end).max(number);
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Budget, Time};

    const NOW: Time = Time { seconds: 0, nanos: 0 };

    #[test]
    fn a_comparison_of_a_large_tree_looks_at_what_changed() {
        let mut tree = Tree::new(Budget { bytes: 1 << 30, files: 1 << 20 });
        for index in 0..20_000 {
            tree.write_path(format!("/d{}/f{index}", index % 100), b"1", NOW).unwrap();
        }
        let mut then = tree.clone();
        then.write_path("/d7/f7", b"2", NOW).unwrap();
        then.write_path("/d8/new", b"2", NOW).unwrap();
        then.remove_path("/d9/f9", NOW).unwrap();
        let changed = tree.nodes.differing(&then.nodes, Arc::ptr_eq);
        let changed = changed.into_iter().map(|(node, ..)| *node).collect();
        let changed_names = changed_names(&tree, &then, &changed).unwrap().unwrap();
        let names: usize = changed_names.values().map(BTreeSet::len).sum();
        assert_eq!(names, 4, "three directories and a file: {changed_names:?}");
        let found = tree.diff(&then).unwrap();
        let found = found.changes.iter().map(|change| (&change.path[..], change.change));
        let expected = [
            (&b"/d7/f7"[..], Change::Changed),
            (b"/d8/new", Change::Added),
            (b"/d9/f9", Change::Removed),
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_comparison_of_a_deep_directory_takes_no_more_memory_than_its_list() {
        let mut tree = Tree::new(Budget { bytes: 1 << 30, files: 1 << 20 });
        let before = tree.clone();
        let deep = "/directory-with-a-long-name-that-is-repeated-at-each-level".repeat(60);
        tree.make_directories(&deep, NOW).unwrap();
        for index in 0..25_000 {
            tree.write_path(format!("{deep}/{index}"), b"", NOW).unwrap();
        }
        // The paths have 87 MB, and the list is limited to 64 MiB.
        for (one, two) in [(&before, &tree), (&tree, &before)] {
            let (found, peak) = afresh_budget::meter::peak(|| one.diff(two).unwrap());
            assert!(found.truncated);
            let listed = found.changes.iter().map(|change| change.path.len()).sum::<usize>();
            assert!(listed > 60 << 20 && peak < listed + (16 << 20), "{peak} of {listed}");
        }
    }

    #[test]
    fn paths_of_nested_additions_and_changes_are_whole() {
        let mut tree = Tree::new(Budget::default());
        for path in ["/a/b/one", "/a/c/two", "/d/e/f/three"] {
            tree.write_path(path, b"1", NOW).unwrap();
        }
        let mut then = tree.clone();
        for path in ["/a/b/one", "/a/c/two", "/d/e/f/three", "/d/e/new/g/x", "/d/e/new/y", "/z/w"] {
            then.write_path(path, b"2", NOW).unwrap();
        }
        let found = tree.diff(&then).unwrap();
        let found = found.changes.iter().map(|c| std::str::from_utf8(&c.path).unwrap());
        let expected = [
            "/a/b/one",
            "/a/c/two",
            "/d/e/f/three",
            "/d/e/new",
            "/d/e/new/g",
            "/d/e/new/g/x",
            "/d/e/new/y",
            "/z",
            "/z/w",
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_changed_attribute_is_a_change_without_bytes() {
        let mut tree = Tree::new(Budget::default());
        for path in ["/d/attribute", "/d/mode", "/d/time"] {
            tree.write_path(path, b"1", NOW).unwrap();
        }
        let mut then = tree.clone();
        let find = |path: &str| tree.find(path).unwrap();
        then.set_attribute(find("/d/attribute"), b"user.x", Some(b"y"), NOW).unwrap();
        then.set_attribute(find("/d"), b"user.x", Some(b"y"), NOW).unwrap();
        then.set_mode(find("/d/mode"), 0o600, NOW).unwrap();
        then.write(find("/d/time"), 0, b"1", Time { seconds: 9, nanos: 0 }).unwrap();
        for (one, two) in [(&tree, &then), (&then, &tree)] {
            let found = one.diff(two).unwrap();
            let found = found.changes.iter().map(|c| (&*c.path, c.change, c.bytes));
            let expected = [&b"/d"[..], b"/d/attribute", b"/d/mode"];
            let expected = expected.map(|path| (path, Change::Changed, 0));
            assert_eq!(found.collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_changed_file_that_had_two_names_is_found_under_each() {
        let mut tree = Tree::new(Budget::default());
        for path in ["/a/one", "/b/other", "/c/more"] {
            tree.write_path(path, b"1", NOW).unwrap();
        }
        let (node, directory) = (tree.find("/a/one").unwrap(), tree.find("/b").unwrap());
        tree.link(node, directory, b"two", NOW).unwrap();
        let mut then = tree.clone();
        then.write(node, 0, b"2", NOW).unwrap();
        let found = tree.diff(&then).unwrap();
        let paths: Vec<&[u8]> = found.changes.iter().map(|change| &change.path[..]).collect();
        assert_eq!(paths, [&b"/a/one"[..], b"/b/two"]);
    }
}
