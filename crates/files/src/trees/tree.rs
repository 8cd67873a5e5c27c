//! The tree: every file by its number, and the operations of a file system on them.
//!
//! Promises: a clone costs a few reference counts, whatever the size of the tree, and neither sees
//! later changes of the other. A refused operation leaves the tree as it was. The tree's own data
//! stays within its budget (names that only hide an entry of a layer are allowed, so that a full
//! tree can be emptied). A file without a name stays while it is held. Nothing is ever written to a
//! layer.
//!
//! May break it: holding a file and never releasing it keeps it; a held number is invalid in a tree
//! that is not a relative.

use std::sync::{Arc, Weak};

use crate::error::Refused;
use crate::layers::name_lookup::NameLookup;
use crate::layers::stack::Layers;
use crate::nodes::inode::{Body, Directory, Entry, Inode};
use crate::nodes::map::Map;
use crate::nodes::name::{NAME, Name};
use crate::nodes::node::{Kind, Node, Stat, Time};
use crate::trees::held_file::FileHold;
use crate::trees::lower_layers::LowerLayers;

/// The number that new files of a tree begin at.
const FIRST: u64 = 2;
/// Bytes that a file costs in addition to its content.
pub(crate) const NODE_COST: u64 = 256;
/// Bytes that a name costs in addition to its letters.
const NAME_COST: u64 = 64;

/// The limit of the data that a tree stores itself: changes and additions over the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Bytes: of content, 256 more for each file, and 64 more for each name and its letters.
    pub bytes: u64,
    /// Files, directories and links.
    pub files: u64,
}

impl Default for Budget {
    /// 64 MiB in 65,536 files.
    fn default() -> Self {
        Self { bytes: 64 << 20, files: 1 << 16 }
    }
}

/// A file as it is at a time, its attributes included. Does not keep the file.
#[derive(Clone, Debug)]
pub struct FileVersion(Weak<Inode>);

/// How [`Tree::rename`] treats the file with the new name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rename {
    /// It is replaced, if it can be.
    #[default]
    Replace,
    /// It is in the way.
    Keep,
    /// It gets the old name.
    Exchange,
}

/// The kind of a new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum New<'a> {
    /// An empty file.
    File,
    /// An empty directory.
    Directory,
    /// A symbolic link to a target.
    Link(&'a [u8]),
    /// A character device of a number.
    Device(u64),
}

/// A file tree. Cheap to clone; see the crate's documentation.
#[derive(Clone)]
pub struct Tree {
    pub(crate) nodes: Map<Node, Arc<Inode>>,
    /// Files that are open.
    pub(crate) held: Map<Node, FileHold>,
    pub(crate) next: u64,
    pub(crate) bytes: u64,
    pub(crate) files: u64,
    pub(crate) budget: Budget,
    pub(crate) lower: Arc<LowerLayers>,
}

impl std::fmt::Debug for Tree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tree")
            .field("files", &self.nodes.len())
            .field("used", &self.used())
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}

/// Two trees are equal when every file has the same number, content and attributes in both.
impl PartialEq for Tree {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.lower, &other.lower)
            && self.nodes.differing(&other.nodes, |a, b| Arc::ptr_eq(a, b) || a.same(b)).is_empty()
            && self.held.differing(&other.held, |a, b| a.count == b.count).is_empty()
    }
}

impl Eq for Tree {}

impl Tree {
    /// The directory at the top.
    pub const ROOT: Node = Node(1);

    /// A tree with nothing in it but its root.
    #[must_use]
    pub fn new(budget: Budget) -> Self {
        let root = Directory { entries: Map::default(), parent: Self::ROOT };
        let mut root = Inode::new(Body::Directory(root), 0o755, Time::default());
        root.paid = false;
        let mut nodes = Map::default();
        nodes.insert(Self::ROOT, Arc::new(root));
        let lower = LowerLayers::new(nodes.clone(), FIRST, Layers::default());
        let held = Map::default();
        Self { nodes, held, next: FIRST, bytes: 0, files: 0, budget, lower: Arc::new(lower) }
    }

    /// Its limits.
    #[must_use]
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// The same tree under another budget; existing data stays, even if it exceeds it.
    #[must_use]
    pub fn with_budget(mut self, budget: Budget) -> Self {
        self.budget = budget;
        self
    }

    /// The used part of the budget.
    #[must_use]
    pub fn used(&self) -> Budget {
        Budget { bytes: self.bytes, files: self.files }
    }

    /// The file, as it is here or in a layer.
    pub(crate) fn inode(&self, node: Node) -> Result<Arc<Inode>, Refused> {
        match self.nodes.get(&node) {
            Some(inode) => Ok(inode.clone()),
            None => self.lower.layers.inode(node),
        }
    }

    /// Runs `look` on a directory.
    pub(crate) fn directory<T>(
        &self,
        node: Node,
        look: impl FnOnce(&Directory) -> T,
    ) -> Result<T, Refused> {
        match &self.inode(node)?.body {
            Body::Directory(directory) => Ok(look(directory)),
            _ => Err(Refused::NotDirectory),
        }
    }

    pub(crate) fn room(&self) -> u64 {
        self.budget.bytes.saturating_sub(self.bytes)
    }

    /// Takes something out of the budget.
    pub(crate) fn pay(&mut self, bytes: u64, files: u64) -> Result<(), Refused> {
        if bytes > self.room() || files > self.budget.files.saturating_sub(self.files) {
            return Err(Refused::Full);
        }
        self.bytes += bytes;
        self.files += files;
        Ok(())
    }

    /// The file, for a change: from now on the tree has its own copy.
    pub(crate) fn copy_up(&mut self, node: Node, overdraw: bool) -> Result<&mut Inode, Refused> {
        let here = self.nodes.get(&node).cloned();
        let inode = match &here {
            Some(inode) => inode.clone(),
            None => {
                // Every file that differs from its layer must be reachable through such directories
                // from the root.
                let above = self.lower.layers.parent(node);
                if let Some(above) = above.filter(|above| self.nodes.get(above).is_none()) {
                    self.copy_up(above, overdraw)?;
                }
                self.present_inode(node)?
            }
        };
        if !inode.paid {
            let bytes = cost(&inode);
            match self.pay(bytes, 1) {
                Err(error) if !overdraw => return Err(error),
                Err(_) => (self.bytes, self.files) = (self.bytes + bytes, self.files + 1),
                Ok(()) => {}
            }
        }
        if here.is_none() {
            self.nodes.insert(node, inode.clone());
        }
        drop((here, inode));
        let inode = Arc::make_mut(self.nodes.get_mut(&node).ok_or(Refused::Missing)?);
        inode.paid = true;
        Ok(inode)
    }

    pub(crate) fn own_directory(
        &mut self,
        node: Node,
        overdraw: bool,
    ) -> Result<&mut Directory, Refused> {
        match &mut self.copy_up(node, overdraw)?.body {
            Body::Directory(directory) => Ok(directory),
            _ => Err(Refused::NotDirectory),
        }
    }

    /// The result of `stat` for a file.
    ///
    /// # Errors
    /// [`Refused::Missing`] for an unknown number.
    pub fn stat(&self, node: Node) -> Result<Stat, Refused> {
        let stat = self.inode(node)?.stat(node);
        Ok(match self.held_file(node) {
            Some(held) => held.stat(stat),
            None => stat,
        })
    }

    /// The present version of a file, to recognise it later.
    ///
    /// # Errors
    /// As [`Tree::stat`].
    pub fn version(&self, node: Node) -> Result<FileVersion, Refused> {
        Ok(FileVersion(Arc::downgrade(&self.inode(node)?)))
    }

    /// Whether a file is still as it was when it had that version, which may be a relative's. Says
    /// no where it is not sure.
    #[must_use]
    pub fn is_version(&self, node: Node, version: &FileVersion) -> bool {
        let then = version.0.upgrade();
        then.is_some_and(|then| self.inode(node).is_ok_and(|now| Arc::ptr_eq(&now, &then)))
    }

    /// Looks up `name` in a directory. `.` and `..` have their meaning in paths.
    ///
    /// # Errors
    /// [`Refused::Missing`], [`Refused::NotDirectory`], [`Refused::NameTooLong`].
    pub fn lookup(&self, directory: Node, name: &[u8]) -> Result<Node, Refused> {
        self.entry(directory, name)?.map(|(node, _)| node).ok_or(Refused::Missing)
    }

    /// The entry `name` of a directory, if it exists.
    pub(crate) fn entry(
        &self,
        directory: Node,
        name: &[u8],
    ) -> Result<Option<(Node, Kind)>, Refused> {
        self.entry_in(directory, name, false)
    }

    /// As [`Tree::entry`], with `search` in a directory that its owner may search.
    pub(crate) fn entry_in(
        &self,
        directory: Node,
        name: &[u8],
        search: bool,
    ) -> Result<Option<(Node, Kind)>, Refused> {
        if name.len() > NAME {
            return Err(Refused::NameTooLong);
        }
        if !matches!(name, b"." | b"..")
            && self.nodes.get(&directory).is_none()
            && let NameLookup::Known(found) = self.lower.layers.lookup(directory, name, search)?
        {
            return Ok(found);
        }
        let inode = self.inode(directory)?;
        let Body::Directory(inside) = &inode.body else { return Err(Refused::NotDirectory) };
        if search && inode.mode & 0o100 == 0 {
            return Err(Refused::Denied);
        }
        Ok(match name {
            b"." => Some((directory, Kind::Directory)),
            b".." => Some((self.lower.layers.mounted(inside.parent), Kind::Directory)),
            name => inside.entries.get(name).map(|entry| (entry.node, entry.kind)),
        })
    }

    /// The directory that `..` means in a directory.
    ///
    /// # Errors
    /// [`Refused::NotDirectory`].
    pub fn parent(&self, directory: Node) -> Result<Node, Refused> {
        if let Some((above, _)) = self.unlisted(directory) {
            return Ok(above);
        }
        self.directory(directory, |inside| self.lower.layers.mounted(inside.parent))
    }

    /// The directory above a directory that has no change and was not listed yet, and its name
    /// there.
    fn unlisted(&self, directory: Node) -> Option<(Node, Arc<[u8]>)> {
        match self.nodes.get(&directory) {
            Some(_) => None,
            None => self.lower.layers.unlisted(directory),
        }
    }

    /// The name of a file, and the directory that it is in; `None` where it has none, or has had
    /// several.
    #[must_use]
    pub fn name(&self, node: Node) -> Option<(Node, Arc<[u8]>)> {
        let (directory, name) = match self.unlisted(node) {
            Some(found) => found,
            None => {
                let (directory, name) = self.inode(node).ok()?.name.clone()?;
                (directory, name.0)
            }
        };
        (self.lookup(directory, &name) == Ok(node)).then_some((directory, name))
    }

    /// The entries of a directory in order, without `.` and `..`.
    ///
    /// # Errors
    /// [`Refused::NotDirectory`].
    pub fn list(&self, directory: Node) -> Result<Vec<DirEntry>, Refused> {
        self.directory(directory, |inside| inside.entries.iter().map(dir_entry).collect())
    }

    /// At most `most` entries of a directory after `name`, which need not be there, in order.
    ///
    /// # Errors
    /// [`Refused::NotDirectory`].
    pub fn list_after(
        &self,
        directory: Node,
        name: &[u8],
        most: usize,
    ) -> Result<Vec<DirEntry>, Refused> {
        self.directory(directory, |inside| {
            let after = inside.entries.from(name).skip_while(|(other, _)| *other.0 == *name);
            after.take(most).map(dir_entry).collect()
        })
    }

    /// At most `most` names in a directory, without the first `skip`.
    pub(crate) fn list_from(
        &self,
        directory: Node,
        skip: usize,
        most: usize,
    ) -> Result<Vec<DirEntry>, Refused> {
        self.directory(directory, |inside| {
            inside.entries.iter().skip(skip).take(most).map(dir_entry).collect()
        })
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// [`Refused::Invalid`] for any other file.
    pub fn read_link(&self, node: Node) -> Result<Arc<[u8]>, Refused> {
        match &self.inode(node)?.body {
            Body::Link(target) => Ok(target.clone()),
            _ => Err(Refused::Invalid),
        }
    }

    /// Reads a file from `offset` on, and returns the number of bytes, which is smaller only at the
    /// end.
    ///
    /// # Errors
    /// [`Refused::IsDirectory`], [`Refused::Invalid`] for a file without bytes, [`Refused::Layer`].
    pub fn read(&self, node: Node, offset: u64, out: &mut [u8]) -> Result<usize, Refused> {
        if let Some(held) = self.held_file(node) {
            return held.read(offset, out);
        }
        self.refresh(node);
        match self.read_content(node, offset, out) {
            // The host has changed it since.
            Err(Refused::ChangedOnHost(_)) if self.nodes.get(&node).is_none() => {
                self.refresh(node);
                self.read_content(node, offset, out)
            }
            read => read,
        }
    }

    fn read_content(&self, node: Node, offset: u64, out: &mut [u8]) -> Result<usize, Refused> {
        match &self.inode(node)?.body {
            Body::File(content) => content.read(&self.lower.layers, offset, out),
            Body::Directory(_) => Err(Refused::IsDirectory),
            _ => Err(Refused::Invalid),
        }
    }

    /// The next bytes from `from` on that are stored, or that are not: at the end of a file there
    /// is a hole.
    pub(crate) fn next_run(&self, node: Node, from: u64, data: bool) -> Result<u64, Refused> {
        match &self.inode(node)?.body {
            Body::File(content) => content.next_run(from, data).ok_or(Refused::Missing),
            _ => Err(Refused::Invalid),
        }
    }

    /// Whether `node` is a file with bytes.
    fn check_file(&self, node: Node) -> Result<(), Refused> {
        match &self.inode(node)?.body {
            Body::File(_) => Ok(()),
            Body::Directory(_) => Err(Refused::IsDirectory),
            _ => Err(Refused::Invalid),
        }
    }

    /// Writes into a file at `offset`, which may be beyond its end, and returns the number of bytes
    /// that the budget had room for.
    ///
    /// # Errors
    /// [`Refused::Full`] when there was no room at all; as [`Tree::read`].
    pub fn write(
        &mut self,
        node: Node,
        offset: u64,
        bytes: &[u8],
        now: Time,
    ) -> Result<usize, Refused> {
        self.check_file(node)?;
        if bytes.is_empty() {
            return Ok(0);
        }
        self.copy_up(node, false)?;
        let (room, lower) = (self.room(), self.lower.clone());
        let inode = self.copy_up(node, false)?;
        let Body::File(content) = &mut inode.body else { return Err(Refused::Invalid) };
        let before = content.paid;
        let done = content.write(&lower.layers, offset, bytes, room);
        let paid = content.paid - before;
        if done.is_ok() {
            (inode.times.modified, inode.times.changed) = (now, now);
        }
        self.bytes += paid;
        done
    }

    /// Makes a file shorter, or longer with a hole at its end.
    ///
    /// # Errors
    /// [`Refused::TooLarge`]; as [`Tree::read`].
    pub fn set_size(&mut self, node: Node, size: u64, now: Time) -> Result<(), Refused> {
        self.check_file(node)?;
        let inode = self.copy_up(node, false)?;
        let Body::File(content) = &mut inode.body else { return Err(Refused::Invalid) };
        let before = content.paid;
        content.set_size(size)?;
        let freed = before - content.paid;
        (inode.times.modified, inode.times.changed) = (now, now);
        self.bytes -= freed;
        Ok(())
    }

    /// Sets the permission bits.
    ///
    /// # Errors
    /// As [`Tree::stat`]; [`Refused::Full`].
    pub fn set_mode(&mut self, node: Node, mode: u32, now: Time) -> Result<(), Refused> {
        let inode = self.copy_up(node, false)?;
        inode.mode = mode & 0o7777;
        inode.times.changed = now;
        Ok(())
    }

    /// Records the user and group of a file, or that it belongs to the guest's user.
    ///
    /// # Errors
    /// As [`Tree::stat`]; [`Refused::Full`].
    pub fn set_owner(
        &mut self,
        node: Node,
        owner: Option<[u32; 2]>,
        now: Time,
    ) -> Result<(), Refused> {
        let inode = self.copy_up(node, false)?;
        (inode.owner, inode.times.changed) = (owner, now);
        Ok(())
    }

    /// Sets the time of the last access, of the last change of content, or both.
    ///
    /// # Errors
    /// As [`Tree::stat`]; [`Refused::Full`].
    pub fn set_times(
        &mut self,
        node: Node,
        accessed: Option<Time>,
        modified: Option<Time>,
        now: Time,
    ) -> Result<(), Refused> {
        let times = &mut self.copy_up(node, false)?.times;
        times.accessed = accessed.unwrap_or(times.accessed);
        times.modified = modified.unwrap_or(times.modified);
        times.changed = now;
        Ok(())
    }

    /// Keeps a file although its last name may go. For open descriptors, and for current
    /// directories.
    ///
    /// # Errors
    /// As [`Tree::stat`].
    pub fn hold(&mut self, node: Node) -> Result<(), Refused> {
        self.refresh(node);
        self.inode(node)?;
        let held = match self.held.get(&node) {
            Some(held) => FileHold { count: held.count.saturating_add(1), file: held.file.clone() },
            None => FileHold { count: 1, file: self.open_present(node) },
        };
        self.held.insert(node, held);
        Ok(())
    }

    /// Whether a file is held.
    #[must_use]
    pub fn is_held(&self, node: Node) -> bool {
        self.held.get(&node).is_some()
    }

    /// Number of holders of a file.
    #[must_use]
    pub fn hold_count(&self, node: Node) -> u64 {
        self.held.get(&node).map_or(0, |held| u64::from(held.count))
    }

    /// Takes one [`Tree::hold`] back; a file without a name goes with the last.
    pub fn release(&mut self, node: Node) {
        match self.held.get(&node).cloned() {
            Some(FileHold { count: 0 | 1, .. }) => {
                self.held.remove(&node);
                self.bury(node);
            }
            Some(held) => {
                self.held.insert(node, FileHold { count: held.count - 1, file: held.file });
            }
            None => {}
        }
    }

    pub(crate) fn own_for_layer(&mut self, node: Node) -> Result<&mut Directory, Refused> {
        self.own_directory(node, true)
    }
}

fn dir_entry((name, entry): (&Name, &Entry)) -> DirEntry {
    DirEntry { name: name.0.clone(), node: entry.node, kind: entry.kind }
}

/// The cost of a file, without its names.
pub(crate) fn cost(inode: &Inode) -> u64 {
    NODE_COST
        + inode.attributes.cost()
        + match &inode.body {
            Body::File(content) => content.paid,
            Body::Link(target) => target.len() as u64,
            Body::Directory(_) | Body::Device(_) => 0,
        }
}

/// The cost of a name.
pub(crate) fn name_cost(name: &[u8]) -> u64 {
    NAME_COST + name.len() as u64
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirEntry {
    /// The name.
    pub name: Arc<[u8]>,
    /// What it means.
    pub node: Node,
    /// What that is.
    pub kind: Kind,
}
