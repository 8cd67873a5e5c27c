//! Changesets: the entries of an archive, applied to the tree of the layers below.
//!
//! Promises: a removal affects the layers below and keeps additions by the same changeset. Links in
//! the directories of a path are followed within the tree, as umoci does. A removal makes no
//! directory, and is not an error if the layers below lack the path. The time is proportional to
//! the items, whatever they remove and wherever their links lead: links have a budget of steps, and
//! what layers below have in a directory is removed once. May break it: nothing in safe code.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::Refused;
use crate::layers::item::{EntryKind, Item, names_of};
use crate::nodes::inode::{Body, Inode};
use crate::nodes::name::check_name;
use crate::nodes::node::{Kind, Node, Times};
use crate::nodes::source::Source;
use crate::trees::path::Walk;
use crate::trees::tree::{New, Tree};

/// Names that links may lead through, for each item and for all archives together.
const STEPS_PER_ITEM: u64 = 64;
const MIN_STEPS: u64 = 1 << 20;

/// An archive that is being applied.
pub(crate) struct Changeset {
    top: Node,
    layer: u32,
    /// Names that this archive has added, and those of the directories above them.
    added: BTreeSet<(Node, Vec<u8>)>,
    /// Directories that have nothing of the layers below any more.
    cleared: BTreeSet<Node>,
    /// Names of files that are not shown.
    skipped: BTreeSet<(Node, Vec<u8>)>,
    /// Names that links may lead through from now on.
    steps: u64,
}

impl Changeset {
    /// Archives that are applied to a directory, one after the other.
    pub(crate) fn new(top: Node) -> Self {
        let (added, cleared, skipped) = Default::default();
        Self { top, layer: 0, added, cleared, skipped, steps: MIN_STEPS }
    }

    /// Starts the next archive.
    pub(crate) fn next_layer(&mut self, layer: u32) {
        self.layer = layer;
        self.added.clear();
        self.cleared.clear();
    }

    /// Applies one entry.
    pub(crate) fn apply(&mut self, tree: &mut Tree, item: &Item) -> Result<(), Refused> {
        self.steps += STEPS_PER_ITEM;
        match self.apply_item(tree, item) {
            Err(Refused::Loop) if self.steps == 0 => Err(Refused::Layer(format!(
                "the links of the layers lead through more than {MIN_STEPS} names, and \
                 {STEPS_PER_ITEM} for each item"
            ))),
            result => result,
        }
    }

    fn apply_item(&mut self, tree: &mut Tree, item: &Item) -> Result<(), Refused> {
        let names: Vec<&[u8]> = names_of(&item.path).collect();
        match (&item.what, names.split_last()) {
            (EntryKind::Empty, _) => match self.lower_directory(tree, &names)? {
                Some(node) => self.clear_lower(tree, node),
                None => Ok(()),
            },
            (EntryKind::Gone, Some((name, above))) => self.remove(tree, above, name),
            (_, Some((name, above))) => self.add(tree, above, name, item),
            (EntryKind::Directory, None) => {
                if let Some(inode) = tree.nodes.get_mut(&self.top) {
                    set_attributes(Arc::make_mut(inode), item);
                }
                Ok(())
            }
            (_, None) => Ok(()),
        }
    }

    /// The directory at a path, if it exists.
    fn lower_directory(&mut self, tree: &Tree, path: &[&[u8]]) -> Result<Option<Node>, Refused> {
        let mut at = self.top;
        for name in path {
            check_name(name)?;
            at = match tree.entry(at, name)? {
                Some((node, Kind::Directory)) => node,
                Some((node, Kind::Link)) => {
                    match tree.walk_to(at, &tree.read_link(node)?, &mut self.steps) {
                        Ok(found) if tree.stat(found)?.kind == Kind::Directory => found,
                        Err(Refused::Loop) if self.steps == 0 => return Err(Refused::Loop),
                        Ok(_) | Err(Refused::Missing | Refused::NotDirectory | Refused::Loop) => {
                            return Ok(None);
                        }
                        Err(error) => return Err(error),
                    }
                }
                _ => return Ok(None),
            };
        }
        Ok(Some(at))
    }

    /// Removes the entry of the layers below at a path.
    fn remove(&mut self, tree: &mut Tree, above: &[&[u8]], name: &[u8]) -> Result<(), Refused> {
        let Some(at) = self.lower_directory(tree, above)? else { return Ok(()) };
        check_name(name)?;
        match tree.entry(at, name)? {
            Some((node, kind)) if self.has_added(at, name) => match kind {
                Kind::Directory => self.clear_lower(tree, node),
                _ => Ok(()),
            },
            _ => tree.clear_name(at, name),
        }
    }

    /// Removes everything in a directory that this archive has not added.
    fn clear_lower(&mut self, tree: &mut Tree, top: Node) -> Result<(), Refused> {
        let mut ahead = vec![top];
        while let Some(at) = ahead.pop() {
            // Since then, only this archive has added anything there.
            if !self.cleared.insert(at) {
                continue;
            }
            for entry in tree.list(at)? {
                if !self.has_added(at, &entry.name) {
                    tree.clear_name(at, &entry.name)?;
                } else if entry.kind == Kind::Directory {
                    ahead.push(entry.node);
                }
            }
        }
        Ok(())
    }

    fn has_added(&self, at: Node, name: &[u8]) -> bool {
        self.added.contains(&(at, name.to_vec()))
    }

    /// Records a name and those of the directories above it.
    fn record(&mut self, tree: &Tree, at: Node, name: &[u8]) -> Result<(), Refused> {
        let mut next = Some((at, name.to_vec()));
        while let Some((at, _)) = next.filter(|name| self.added.insert(name.clone())) {
            let above = tree.inode(at)?.name.clone();
            next = match above {
                Some((_, name)) if at != self.top => Some((tree.parent(at)?, name.0.to_vec())),
                _ => None,
            };
        }
        Ok(())
    }

    fn add(
        &mut self,
        tree: &mut Tree,
        above: &[&[u8]],
        name: &[u8],
        item: &Item,
    ) -> Result<(), Refused> {
        let mut at = self.top;
        for name in above {
            at = tree.directory_in(at, name, &mut self.steps)?;
        }
        check_name(name)?;
        self.record(tree, at, name)?;
        let there = tree.entry(at, name)?;
        let skip = |this: &mut Self, tree: &mut Tree| {
            this.skipped.insert((at, name.to_vec()));
            tree.clear_name(at, name)
        };
        let node = match &item.what {
            EntryKind::Gone | EntryKind::Empty => return Ok(()),
            EntryKind::Skipped => return skip(self, tree),
            EntryKind::Same(path) => {
                // A hard link to a symbolic link is a further name of the link.
                let walk = Walk::new(self.top).follow(false);
                let path = [b"./", &path[..]].concat();
                let place = tree.walk_within(&path, walk, &mut self.steps)?;
                let Some((node, _)) = place.found else {
                    if !self.skipped.contains(&(place.directory, place.name.to_vec())) {
                        return Err(Refused::Missing);
                    }
                    return skip(self, tree);
                };
                if there.is_some_and(|(there, _)| there == node) {
                    return Ok(());
                }
                tree.clear_name(at, name)?;
                return tree.link(node, at, name, item.time);
            }
            EntryKind::Directory => match there {
                Some((node, Kind::Directory)) => node,
                _ => {
                    tree.clear_name(at, name)?;
                    tree.create(at, name, New::Directory, item.mode, item.time)?
                }
            },
            EntryKind::Link(target) => {
                tree.clear_name(at, name)?;
                tree.create(at, name, New::Link(target), 0o777, item.time)?
            }
            EntryKind::File(file, len) => {
                tree.clear_name(at, name)?;
                let node = tree.create(at, name, New::File, item.mode, item.time)?;
                let source = Source::Archive { layer: self.layer, file: *file };
                if let Some(inode) = tree.nodes.get_mut(&node) {
                    Arc::make_mut(inode).body =
                        Body::File(crate::nodes::content::Content::of(source, *len));
                }
                node
            }
        };
        if let Some(inode) = tree.nodes.get_mut(&node) {
            set_attributes(Arc::make_mut(inode), item);
        }
        Ok(())
    }
}

fn set_attributes(inode: &mut Inode, item: &Item) {
    (inode.mode, inode.times) = (item.mode & 0o7777, Times::all(item.time));
}
