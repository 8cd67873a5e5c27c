//! In what two trees differ: paths, and how many bytes.
//!
//! Promises: every path whose content, target, mode or kind differs is listed, up to a limit that is said; times
//! alone make no difference. Directories of a host that neither tree has touched are not looked at.

use std::collections::HashSet;
use std::sync::Arc;

use crate::content::{Content, PAGE};
use crate::error::Refused;
use crate::node::{Body, Inode, Kind, Node};
use crate::tree::Tree;

/// Bytes of paths that one comparison lists.
const LISTED: usize = 64 << 20;

/// What became of a path.
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
    /// What became of it.
    pub change: Change,
    /// What it is, in the tree that has it; in the second, if both do.
    pub kind: Kind,
    /// Bytes of content that differ; all of what was added or removed.
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
    /// Whether there are more than are listed.
    pub truncated: bool,
}

impl FileDifference {
    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

struct Comparison<'a> {
    one: &'a Tree,
    two: &'a Tree,
    changed: HashSet<Node>,
    found: FileDifference,
    listed: usize,
}

impl Tree {
    /// What one has to do to this tree to come to `other`, a relative of it.
    ///
    /// # Errors
    /// [`Refused::Layer`] when bytes of a layer cannot be read.
    pub fn diff(&self, other: &Self) -> Result<FileDifference, Refused> {
        let changed = self.nodes.differing(&other.nodes, |a, b| Arc::ptr_eq(a, b) || a.same(b));
        let changed: HashSet<Node> = changed.into_iter().map(|(node, ..)| *node).collect();
        let found = FileDifference::default();
        let mut comparison = Comparison { one: self, two: other, changed, found, listed: 0 };
        if !comparison.changed.is_empty() {
            comparison.run()?;
        }
        let mut found = comparison.found;
        found.changes.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }
}

impl Comparison<'_> {
    fn run(&mut self) -> Result<(), Refused> {
        // Pairs of directories with the same path.
        let mut ahead = vec![(Vec::new(), Tree::ROOT, Tree::ROOT)];
        while let Some((path, one, two)) = ahead.pop() {
            if self.found.truncated {
                return Ok(());
            }
            let (first, second) = (self.one.list(one)?, self.two.list(two)?);
            let (mut a, mut b) = (first.iter().peekable(), second.iter().peekable());
            loop {
                let order = match (a.peek(), b.peek()) {
                    (None, None) => break,
                    (Some(_), None) => std::cmp::Ordering::Less,
                    (None, Some(_)) => std::cmp::Ordering::Greater,
                    (Some(x), Some(y)) => x.name.cmp(&y.name),
                };
                let before = if order.is_le() { a.next() } else { None };
                let after = if order.is_ge() { b.next() } else { None };
                let Some(name) = before.or(after).map(|entry| &entry.name) else { break };
                let below = [&path[..], b"/", name].concat();
                match (before, after) {
                    (Some(x), Some(y)) if x.kind == y.kind => {
                        self.both(&below, x.node, y.node)?;
                        if x.kind == Kind::Directory && self.worth(x.node, y.node) {
                            ahead.push((below, x.node, y.node));
                        }
                    }
                    (x, y) => {
                        if let Some(x) = x {
                            self.all(self.one, below.clone(), x.node, Change::Removed)?;
                        }
                        if let Some(y) = y {
                            self.all(self.two, below, y.node, Change::Added)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether anything below two directories can differ.
    fn worth(&self, one: Node, two: Node) -> bool {
        one != two || self.one.nodes.get(&one).is_some() || self.two.nodes.get(&two).is_some()
    }

    fn add(&mut self, path: Vec<u8>, change: Change, kind: Kind, bytes: u64) {
        self.listed += path.len() + size_of::<FileChange>();
        if self.listed > LISTED {
            self.found.truncated = true;
            return;
        }
        self.found.bytes += bytes;
        self.found.changes.push(FileChange { path, change, kind, bytes });
    }

    /// The same name in both.
    fn both(&mut self, path: &[u8], one: Node, two: Node) -> Result<(), Refused> {
        if one == two && !self.changed.contains(&one) {
            return Ok(());
        }
        let (a, b) = (self.one.inode(one)?, self.two.inode(two)?);
        let bytes = match (&a.body, &b.body) {
            (Body::File(x), Body::File(y)) => differing(self.one, self.two, x, y)?,
            (Body::Link(x), Body::Link(y)) => u64::from(x != y) * y.len() as u64,
            _ => 0,
        };
        if bytes > 0 || !alike(&a, &b) {
            self.add(path.to_vec(), Change::Changed, b.kind(), bytes);
        }
        Ok(())
    }

    /// Everything below a path that only one of them has.
    fn all(
        &mut self,
        tree: &Tree,
        path: Vec<u8>,
        node: Node,
        change: Change,
    ) -> Result<(), Refused> {
        let mut ahead = vec![(path, node)];
        while let Some((path, node)) = ahead.pop() {
            if self.found.truncated {
                return Ok(());
            }
            let stat = tree.stat(node)?;
            if stat.kind == Kind::Directory {
                for entry in tree.list(node)? {
                    ahead.push(([&path[..], b"/", &entry.name].concat(), entry.node));
                }
            }
            let bytes = if stat.kind == Kind::Directory { 0 } else { stat.size };
            self.add(path, change, stat.kind, bytes);
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
    body && a.mode == b.mode
}

/// Bytes in which two files differ. What is stored once is not looked at.
fn differing(one: &Tree, two: &Tree, a: &Content, b: &Content) -> Result<u64, Refused> {
    let beyond = a.size.abs_diff(b.size);
    let common = a.size.min(b.size);
    let related = a.under.as_ref().map(|u| u.source) == b.under.as_ref().map(|u| u.source);
    let numbers: Vec<u64> = if related {
        let pages = a.pages.differing(&b.pages, Arc::ptr_eq);
        let mut numbers: Vec<u64> = pages.into_iter().map(|(number, ..)| *number).collect();
        // Where one was cut shorter the layer shows in the other.
        let len = |content: &Content| content.under.as_ref().map_or(0, |under| under.len);
        let (low, high) = (len(a).min(len(b)), len(a).max(len(b)));
        if low != high {
            numbers.extend(low / PAGE as u64..high.min(common).div_ceil(PAGE as u64));
        }
        numbers
    } else {
        a.runs().into_iter().chain(b.runs()).collect()
    };
    let mut numbers = numbers;
    numbers.sort_unstable();
    numbers.dedup();
    let mut bytes = beyond;
    let (mut x, mut y) = ([0; PAGE], [0; PAGE]);
    for number in numbers {
        let at = number * PAGE as u64;
        if at >= common {
            break;
        }
        let len = (common - at).min(PAGE as u64) as usize;
        a.read(&one.ground.layers, at, &mut x[..len])?;
        b.read(&two.ground.layers, at, &mut y[..len])?;
        bytes += x[..len].iter().zip(&y[..len]).filter(|(p, q)| p != q).count() as u64;
    }
    Ok(bytes)
}
