//! Names: making files, giving them further names, other names and none.
//!
//! Promises: a refused operation changes nothing; every name and file is paid for before it exists,
//! and refunded when it is removed. See [`crate::tree`].

use std::sync::Arc;

use crate::error::Refused;
use crate::nodes::content::Content;
use crate::nodes::inode::{Body, Directory, Entry, Inode};
use crate::nodes::map::Map;
use crate::nodes::name::{Name, PATH, check_name};
use crate::nodes::node::{Kind, Node, Time};
use crate::trees::tree::{NODE_COST, New, Rename, Tree, name_cost};

/// Names of one file, at most.
const LINKS: u32 = 1 << 16;

fn kind_of(entry: &Option<Entry>) -> Option<Kind> {
    entry.map(|entry| entry.kind)
}

impl Tree {
    /// Whether names can be added to a directory: one that was removed has no place for them.
    fn check_living(&self, directory: Node) -> Result<(), Refused> {
        let inode = self.inode(directory)?;
        match inode.body {
            Body::Directory(_) if inode.links > 0 => Ok(()),
            Body::Directory(_) => Err(Refused::Missing),
            _ => Err(Refused::NotDirectory),
        }
    }

    /// Makes something new in a directory, where nothing has the name.
    ///
    /// # Errors
    /// [`Refused::Exists`], [`Refused::Full`], [`Refused::NotDirectory`], [`Refused::NameTooLong`].
    pub fn create(
        &mut self,
        directory: Node,
        name: &[u8],
        new: New<'_>,
        mode: u32,
        now: Time,
    ) -> Result<Node, Refused> {
        self.check_new(directory, name)?;
        let (body, extra) = match new {
            New::File => (Body::File(Content::default()), 0),
            New::Directory => {
                let inside = Directory { entries: Map::default(), parent: directory };
                (Body::Directory(inside), 0)
            }
            New::Link(target) => {
                if target.is_empty() {
                    return Err(Refused::Missing);
                }
                if target.len() >= PATH {
                    return Err(Refused::NameTooLong);
                }
                (Body::Link(target.into()), target.len() as u64)
            }
            New::Device(number) => (Body::Device(number), 0),
        };
        // The directory first: nothing else can be refused once the file is paid for.
        self.copy_up(directory, false)?;
        self.pay(NODE_COST + extra + name_cost(name), 1)?;
        let node = Node(self.next);
        self.next += 1;
        let mut inode = Inode::new(body, mode, now);
        let (kind, name) = (inode.kind(), Name::from(name));
        inode.name = Some((directory, name.clone()));
        self.nodes.insert(node, Arc::new(inode));
        self.put(directory, name, Entry { node, kind, paid: true }, now)?;
        Ok(node)
    }

    /// A file without a name, held once: it is removed on release, unless it has a name by then.
    ///
    /// # Errors
    /// [`Refused::Full`].
    pub fn create_unnamed(&mut self, mode: u32, now: Time) -> Result<Node, Refused> {
        self.pay(NODE_COST, 1)?;
        let node = Node(self.next);
        self.next += 1;
        let mut inode = Inode::new(Body::File(Content::default()), mode, now);
        inode.links = 0;
        self.nodes.insert(node, Arc::new(inode));
        self.hold(node)?;
        Ok(node)
    }

    fn check_new(&self, directory: Node, name: &[u8]) -> Result<(), Refused> {
        if self.entry(directory, name)?.is_some() {
            return Err(Refused::Exists);
        }
        check_name(name)?;
        self.check_living(directory)
    }

    /// Enters a name that was paid for into a directory that is the tree's own.
    fn put(
        &mut self,
        directory: Node,
        name: Name,
        entry: Entry,
        now: Time,
    ) -> Result<Option<Entry>, Refused> {
        let inode = self.copy_up(directory, true)?;
        let Body::Directory(inside) = &mut inode.body else { return Err(Refused::NotDirectory) };
        let old = inside.entries.insert(name.clone(), entry);
        (inode.times.modified, inode.times.changed) = (now, now);
        inode.links += u32::from(entry.kind == Kind::Directory);
        self.forget(&name.0, kind_of(&old), old, directory)?;
        Ok(old)
    }

    /// Takes a name out of a directory.
    fn take(&mut self, directory: Node, name: &[u8], now: Time) -> Result<Option<Entry>, Refused> {
        let inode = self.copy_up(directory, true)?;
        let Body::Directory(inside) = &mut inode.body else { return Err(Refused::NotDirectory) };
        let old = inside.entries.remove(name);
        (inode.times.modified, inode.times.changed) = (now, now);
        self.forget(name, kind_of(&old), old, directory)?;
        Ok(old)
    }

    /// Refunds the cost of a removed name, and counts the directories below.
    fn forget(
        &mut self,
        name: &[u8],
        kind: Option<Kind>,
        old: Option<Entry>,
        directory: Node,
    ) -> Result<(), Refused> {
        if old.is_some_and(|old| old.paid) {
            self.bytes -= name_cost(name);
        }
        if kind == Some(Kind::Directory) {
            let inode = self.copy_up(directory, true)?;
            inode.links = inode.links.saturating_sub(1);
        }
        Ok(())
    }

    /// Counts a name of a file less; the last one takes the file along, unless it is held.
    fn unlink(&mut self, node: Node, now: Time) -> Result<(), Refused> {
        let inode = self.copy_up(node, true)?;
        inode.times.changed = now;
        inode.links = match inode.body {
            Body::Directory(_) => 0,
            _ => inode.links.saturating_sub(1),
        };
        self.bury(node);
        Ok(())
    }

    /// Drops a file that has neither names nor holders.
    pub(crate) fn bury(&mut self, node: Node) {
        let dead = self.nodes.get(&node).is_some_and(|inode| inode.links == 0);
        if !dead || self.held.get(&node).is_some() {
            return;
        }
        if let Some(inode) = self.nodes.remove(&node)
            && inode.paid
        {
            self.bytes -= crate::trees::tree::cost(&inode);
            self.files -= 1;
        }
    }

    /// Gives a file a further name.
    ///
    /// # Errors
    /// [`Refused::NotPermitted`] for a directory; as [`Tree::create`].
    pub fn link(
        &mut self,
        node: Node,
        directory: Node,
        name: &[u8],
        now: Time,
    ) -> Result<(), Refused> {
        let inode = self.inode(node)?;
        let kind = inode.kind();
        if kind == Kind::Directory {
            return Err(Refused::NotPermitted);
        }
        if inode.links >= LINKS {
            return Err(Refused::TooManyLinks);
        }
        self.check_new(directory, name)?;
        self.copy_up(directory, false)?;
        self.copy_up(node, false)?;
        self.pay(name_cost(name), 0)?;
        let (inode, name) = (self.copy_up(node, false)?, Name::from(name));
        inode.name = (inode.links == 0).then(|| (directory, name.clone()));
        inode.links += 1;
        inode.times.changed = now;
        self.put(directory, name, Entry { node, kind, paid: true }, now)?;
        Ok(())
    }

    /// Removes the name of a file that is not a directory.
    ///
    /// # Errors
    /// [`Refused::Missing`], [`Refused::IsDirectory`].
    pub fn remove_file(&mut self, directory: Node, name: &[u8], now: Time) -> Result<(), Refused> {
        let (node, kind) = self.entry(directory, name)?.ok_or(Refused::Missing)?;
        if kind == Kind::Directory {
            return Err(Refused::IsDirectory);
        }
        self.take(directory, name, now)?;
        self.unlink(node, now)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`Refused::NotEmpty`], [`Refused::NotDirectory`], [`Refused::Missing`], [`Refused::Invalid`]
    /// for `.`, [`Refused::Busy`] for the root and the top of a host directory.
    pub fn remove_directory(
        &mut self,
        directory: Node,
        name: &[u8],
        now: Time,
    ) -> Result<(), Refused> {
        let (node, kind) = self.entry(directory, name)?.ok_or(Refused::Missing)?;
        match name {
            b"." => return Err(Refused::Invalid),
            b".." => return Err(Refused::NotEmpty),
            _ if kind != Kind::Directory => return Err(Refused::NotDirectory),
            _ if node == Self::ROOT || self.is_mount_point(node) => return Err(Refused::Busy),
            _ => {}
        }
        if !self.directory(node, |inside| inside.entries.is_empty())? {
            return Err(Refused::NotEmpty);
        }
        self.take(directory, name, now)?;
        self.unlink(node, now)
    }

    /// Whether a directory is the top of a host directory: as a mount point it keeps its name.
    fn is_mount_point(&self, node: Node) -> bool {
        self.lower.layers.is_mount_point(node)
    }

    /// Whether `above` is `node` or one of its ancestors.
    fn is_within(&self, mut node: Node, above: Node) -> Result<bool, Refused> {
        loop {
            if node == above {
                return Ok(true);
            }
            let parent = self.parent(node)?;
            if parent == node {
                return Ok(false);
            }
            node = parent;
        }
    }

    /// Moves the entry `old` of one directory to the name `new` in another or the same.
    ///
    /// # Errors
    /// [`Refused::Missing`]; [`Refused::Exists`] when it must not be replaced;
    /// [`Refused::NotDirectory`], [`Refused::IsDirectory`], [`Refused::NotEmpty`] when it cannot
    /// be; [`Refused::Invalid`] for a directory that would be within itself; [`Refused::Busy`] for
    /// `.` and `..`, and for the top of a host directory.
    pub fn rename(
        &mut self,
        from: Node,
        old: &[u8],
        to: Node,
        new: &[u8],
        how: Rename,
        now: Time,
    ) -> Result<(), Refused> {
        let dotted = |name: &[u8]| matches!(name, b"." | b"..");
        let (node, kind) = self.entry(from, old)?.ok_or(Refused::Missing)?;
        let there = self.entry(to, new)?;
        if dotted(old) || dotted(new) {
            return Err(Refused::Busy);
        }
        check_name(new)?;
        self.check_living(to)?;
        if kind == Kind::Directory && self.is_within(to, node)? {
            return Err(Refused::Invalid);
        }
        let is_mount_point = |entry: Option<(Node, Kind)>| {
            let directory = entry.filter(|(_, kind)| *kind == Kind::Directory);
            directory.is_some_and(|(node, _)| self.is_mount_point(node))
        };
        match (there, how) {
            (Some(_), Rename::Keep) => return Err(Refused::Exists),
            (None, Rename::Exchange) => return Err(Refused::Missing),
            (Some((there, _)), _) if there == node => return Ok(()),
            _ if is_mount_point(Some((node, kind))) || is_mount_point(there) => {
                return Err(Refused::Busy);
            }
            (Some((there, other)), Rename::Exchange) => {
                if other == Kind::Directory && self.is_within(from, there)? {
                    return Err(Refused::Invalid);
                }
                return self.exchange((from, old, node, kind), (to, new, there, other), now);
            }
            (Some((there, Kind::Directory)), _) => {
                if kind != Kind::Directory {
                    return Err(Refused::IsDirectory);
                }
                if !self.directory(there, |inside| inside.entries.is_empty())? {
                    return Err(Refused::NotEmpty);
                }
            }
            (Some(_), _) if kind == Kind::Directory => return Err(Refused::NotDirectory),
            _ => {}
        }
        for node in [from, to, node] {
            self.copy_up(node, false)?;
        }
        self.pay(name_cost(new), 0)?;
        self.take(from, old, now)?;
        let new = Name::from(new);
        self.put(to, new.clone(), Entry { node, kind, paid: true }, now)?;
        if let Some((there, _)) = there {
            self.unlink(there, now)?;
        }
        self.settle(node, to, new, now)
    }

    /// Records the new place of a file.
    fn settle(&mut self, node: Node, parent: Node, name: Name, now: Time) -> Result<(), Refused> {
        let inode = self.copy_up(node, true)?;
        inode.times.changed = now;
        if let Body::Directory(inside) = &mut inode.body {
            inside.parent = parent;
        }
        if inode.name.is_some() {
            inode.name = Some((parent, name));
        }
        Ok(())
    }

    fn exchange(
        &mut self,
        (from, old, one, kind): (Node, &[u8], Node, Kind),
        (to, new, two, other): (Node, &[u8], Node, Kind),
        now: Time,
    ) -> Result<(), Refused> {
        for node in [from, to, one, two] {
            self.copy_up(node, false)?;
        }
        self.pay(name_cost(old) + name_cost(new), 0)?;
        let (old, new) = (Name::from(old), Name::from(new));
        self.put(from, old.clone(), Entry { node: two, kind: other, paid: true }, now)?;
        self.put(to, new.clone(), Entry { node: one, kind, paid: true }, now)?;
        self.settle(one, to, new, now)?;
        self.settle(two, from, old, now)
    }
}
