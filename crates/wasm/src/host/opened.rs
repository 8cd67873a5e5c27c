//! An open file or directory of a guest: of its tree in memory, or of a host directory that it is
//! granted.
//!
//! Promises: both follow paths beneath the directory that they start from, and report the same
//! errors for the same calls. The state of a guest contains no host directory: handles of one are
//! refused where a state is saved.

use afresh_files::{
    Access, Durability, HostHandle, HostKind, HostOpening, Kind, New, Node, OpenFile, Refused,
    Rename, ResolvedName, Stat, Time, Times, Tree, Walk, Whence,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Options of opening a file.
pub(crate) type Opening = HostOpening;

/// The result of `stat`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileStat {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) kind: HostKind,
    pub(crate) links: u64,
    pub(crate) size: u64,
    pub(crate) times: Times,
}

impl From<Stat> for FileStat {
    fn from(stat: Stat) -> Self {
        Self {
            device: 1,
            inode: stat.node.0,
            kind: kind(stat.kind),
            links: u64::from(stat.links),
            size: stat.size,
            times: stat.times,
        }
    }
}

impl From<afresh_files::HostStat> for FileStat {
    fn from(stat: afresh_files::HostStat) -> Self {
        let afresh_files::HostStat { device, inode, kind, links, size, times } = stat;
        Self { device, inode, kind, links, size, times }
    }
}

fn kind(kind: Kind) -> HostKind {
    match kind {
        Kind::File => HostKind::File,
        Kind::Directory => HostKind::Directory,
        Kind::Link => HostKind::Link,
        Kind::Device => HostKind::CharacterDevice,
        _ => HostKind::Unknown,
    }
}

/// An entry of a directory.
#[derive(Clone, Debug)]
pub(crate) struct DirectoryEntry {
    /// The position after it.
    pub(crate) next: u64,
    pub(crate) name: Vec<u8>,
    pub(crate) inode: u64,
    pub(crate) kind: HostKind,
}

/// An open file or directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OpenHandle {
    Tree(OpenFile),
    Host(HostHandle),
}

impl Serialize for OpenHandle {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Tree(open) => open.serialize(serializer),
            Self::Host(_) => Err(serde::ser::Error::custom("a host file is no part of a state")),
        }
    }
}

impl<'de> Deserialize<'de> for OpenHandle {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        OpenFile::deserialize(deserializer).map(Self::Tree)
    }
}

fn walk_below(open: &OpenFile, follow: bool) -> Walk {
    Walk::beneath(open.node).follow(follow)
}

/// The file that a path of the tree leads to.
fn find(tree: &Tree, open: &OpenFile, path: &[u8], follow: bool) -> Result<Node, Refused> {
    tree.walk(path, walk_below(open, follow))?.node()
}

/// The place that a path of the tree names.
fn place(tree: &Tree, open: &OpenFile, path: &[u8]) -> Result<ResolvedName, Refused> {
    tree.walk(path, walk_below(open, false).name())
}

impl OpenHandle {
    /// The file of the tree, if it is one.
    pub(crate) fn node(&self) -> Option<Node> {
        match self {
            Self::Tree(open) => Some(open.node),
            Self::Host(_) => None,
        }
    }

    pub(crate) fn access(&self) -> Access {
        match self {
            Self::Tree(open) => open.access,
            Self::Host(host) => host.access,
        }
    }

    pub(crate) fn access_mut(&mut self) -> &mut Access {
        match self {
            Self::Tree(open) => &mut open.access,
            Self::Host(host) => &mut host.access,
        }
    }

    pub(crate) fn offset(&self) -> u64 {
        match self {
            Self::Tree(open) => open.offset,
            Self::Host(host) => host.offset,
        }
    }

    pub(crate) fn set_offset(&mut self, offset: u64) {
        match self {
            Self::Tree(open) => open.offset = offset,
            Self::Host(host) => host.offset = offset,
        }
    }

    /// Sets when writes are on the disk. A tree has none.
    pub(crate) fn set_durability(&mut self, durability: Durability) {
        if let Self::Host(host) = self {
            host.durability = durability;
        }
    }

    /// Whether files below a directory may be changed.
    pub(crate) fn is_writable(&self) -> bool {
        match self {
            Self::Tree(_) => true,
            Self::Host(host) => host.is_writable(),
        }
    }

    pub(crate) fn stat(&self, tree: &Tree) -> Result<FileStat, Refused> {
        Ok(match self {
            Self::Tree(open) => tree.stat(open.node)?.into(),
            Self::Host(host) => host.stat()?.into(),
        })
    }

    pub(crate) fn is_directory(&self, tree: &Tree) -> Result<bool, Refused> {
        Ok(match self {
            Self::Tree(open) => tree.stat(open.node)?.kind == Kind::Directory,
            Self::Host(host) => host.is_directory(),
        })
    }

    /// Keeps the file for another holder of the same handle.
    pub(crate) fn hold(&self, tree: &mut Tree) -> Result<(), Refused> {
        self.node().map_or(Ok(()), |node| tree.hold(node))
    }

    /// Ends what [`OpenHandle::hold`] began.
    pub(crate) fn release(&self, tree: &mut Tree) {
        if let Some(node) = self.node() {
            tree.release(node);
        }
    }

    pub(crate) fn close(self, tree: &mut Tree) {
        if let Self::Tree(open) = self {
            tree.close(open);
        }
    }

    /// Opens or makes the file at a path.
    pub(crate) fn open(&self, tree: &mut Tree, path: &[u8], how: Opening) -> Result<Self, Refused> {
        match self {
            Self::Tree(open) => open_in_tree(tree, open, path, how).map(Self::Tree),
            Self::Host(host) => host.open(path, how).map(Self::Host),
        }
    }

    pub(crate) fn stat_at(
        &self,
        tree: &Tree,
        path: &[u8],
        follow: bool,
    ) -> Result<FileStat, Refused> {
        Ok(match self {
            Self::Tree(open) => tree.stat(find(tree, open, path, follow)?)?.into(),
            Self::Host(host) => host.stat_at(path, follow)?.into(),
        })
    }

    pub(crate) fn set_times(
        &self,
        tree: &mut Tree,
        accessed: Option<Time>,
        modified: Option<Time>,
        now: Time,
    ) -> Result<(), Refused> {
        match self {
            Self::Tree(open) => tree.set_times(open.node, accessed, modified, now),
            Self::Host(host) => host.set_times(accessed, modified),
        }
    }

    pub(crate) fn set_times_at(
        &self,
        tree: &mut Tree,
        (path, follow): (&[u8], bool),
        accessed: Option<Time>,
        modified: Option<Time>,
        now: Time,
    ) -> Result<(), Refused> {
        match self {
            Self::Tree(open) => {
                let node = find(tree, open, path, follow)?;
                tree.set_times(node, accessed, modified, now)
            }
            Self::Host(host) => host.set_times_at(path, follow, accessed, modified),
        }
    }

    /// The target of the symbolic link at a path. An absolute one leads outside the directory,
    /// where it cannot be followed, and is not shown.
    pub(crate) fn read_link(&self, tree: &Tree, path: &[u8]) -> Result<Vec<u8>, Refused> {
        let target = match self {
            Self::Tree(open) => tree.read_link(find(tree, open, path, false)?)?.to_vec(),
            Self::Host(host) => host.read_link(path)?,
        };
        if target.starts_with(b"/") { Err(Refused::NotPermitted) } else { Ok(target) }
    }

    pub(crate) fn create_directory(&self, tree: &mut Tree, path: &[u8]) -> Result<(), Refused> {
        match self {
            Self::Tree(open) => {
                let place = place(tree, open, path)?;
                tree.create_at(&place, New::Directory, 0o777, Time::now()).map(drop)
            }
            Self::Host(host) => host.create_directory(path),
        }
    }

    /// Makes a symbolic link.
    pub(crate) fn create_link(
        &self,
        tree: &mut Tree,
        target: &[u8],
        path: &[u8],
    ) -> Result<(), Refused> {
        if target.starts_with(b"/") {
            return Err(Refused::NotPermitted);
        }
        match self {
            Self::Tree(open) => {
                let place = place(tree, open, path)?;
                if place.slash && place.found.is_some_and(|(_, kind)| kind != Kind::Directory) {
                    return Err(Refused::NotDirectory);
                }
                tree.create_at(&place, New::Link(target), 0o777, Time::now()).map(drop)
            }
            Self::Host(host) => host.create_link(target, path),
        }
    }

    /// Gives the file at `old` another name.
    pub(crate) fn link(
        &self,
        tree: &mut Tree,
        old: &[u8],
        into: &Self,
        new: &[u8],
    ) -> Result<(), Refused> {
        match (self, into) {
            (Self::Tree(from), Self::Tree(into)) => {
                let node = find(tree, from, old, false)?;
                let place = place(tree, into, new)?;
                tree.link_at(node, &place, Time::now())
            }
            (Self::Host(from), Self::Host(into)) => from.link(old, into, new),
            _ => Err(Refused::CrossDevice),
        }
    }

    pub(crate) fn rename(
        &self,
        tree: &mut Tree,
        old: &[u8],
        into: &Self,
        new: &[u8],
    ) -> Result<(), Refused> {
        match (self, into) {
            (Self::Tree(from), Self::Tree(into)) => {
                let (from, to) = (place(tree, from, old)?, place(tree, into, new)?);
                tree.rename_at(&from, &to, Rename::Replace, Time::now())
            }
            (Self::Host(from), Self::Host(into)) => from.rename(old, into, new),
            _ => Err(Refused::CrossDevice),
        }
    }

    pub(crate) fn remove_file(&self, tree: &mut Tree, path: &[u8]) -> Result<(), Refused> {
        match self {
            Self::Tree(open) => {
                let place = place(tree, open, path)?;
                tree.remove_file_at(&place, Time::now())
            }
            Self::Host(host) => host.remove_file(path),
        }
    }

    pub(crate) fn remove_directory(&self, tree: &mut Tree, path: &[u8]) -> Result<(), Refused> {
        match self {
            Self::Tree(open) => {
                let place = place(tree, open, path)?;
                tree.remove_directory_at(&place, Time::now())
            }
            Self::Host(host) => host.remove_directory(path),
        }
    }

    pub(crate) fn read_at(&self, tree: &Tree, at: u64, out: &mut [u8]) -> Result<usize, Refused> {
        match self {
            Self::Tree(open) => open.read_at(tree, at, out),
            Self::Host(host) => host.read_at(at, out),
        }
    }

    pub(crate) fn read(&mut self, tree: &Tree, out: &mut [u8]) -> Result<usize, Refused> {
        match self {
            Self::Tree(open) => open.read(tree, out),
            Self::Host(host) => host.read(out),
        }
    }

    pub(crate) fn write_at(
        &self,
        tree: &mut Tree,
        at: u64,
        bytes: &[u8],
    ) -> Result<usize, Refused> {
        match self {
            Self::Tree(open) => open.write_at(tree, at, bytes, Time::now()),
            Self::Host(host) => host.write_at(at, bytes),
        }
    }

    pub(crate) fn write(&mut self, tree: &mut Tree, bytes: &[u8]) -> Result<usize, Refused> {
        match self {
            Self::Tree(open) => open.write(tree, bytes, Time::now()),
            Self::Host(host) => host.write(bytes),
        }
    }

    /// Reads into a guest's memory, at a position or at that of the handle.
    pub(crate) fn read_into_guest(
        &mut self,
        tree: &Tree,
        at: Option<u64>,
        out: &mut [u8],
    ) -> Result<usize, Refused> {
        // A system call may find pages of a guest protected, where a copy is noticed. The layers of
        // a tree read host files as well.
        let mut bytes = vec![0; out.len()];
        let len = match at {
            Some(at) => self.read_at(tree, at, &mut bytes)?,
            None => self.read(tree, &mut bytes)?,
        };
        out[..len].copy_from_slice(&bytes[..len]);
        Ok(len)
    }

    /// Writes from a guest's memory, at a position or at that of the handle.
    pub(crate) fn write_from_guest(
        &mut self,
        tree: &mut Tree,
        at: Option<u64>,
        bytes: &[u8],
    ) -> Result<usize, Refused> {
        let copy;
        let bytes = match self {
            Self::Tree(_) => bytes,
            // As above.
            Self::Host(_) => {
                copy = bytes.to_vec();
                &copy
            }
        };
        match at {
            Some(at) => self.write_at(tree, at, bytes),
            None => self.write(tree, bytes),
        }
    }

    pub(crate) fn seek(&mut self, tree: &Tree, whence: Whence, by: i64) -> Result<u64, Refused> {
        match self {
            Self::Tree(open) => open.seek(tree, whence, by),
            Self::Host(host) => host.seek(whence, by),
        }
    }

    pub(crate) fn set_size(&self, tree: &mut Tree, size: u64) -> Result<(), Refused> {
        match self {
            Self::Tree(open) => tree.set_size(open.node, size, Time::now()),
            Self::Host(host) => host.set_size(size),
        }
    }

    /// Has a file contain a range.
    pub(crate) fn allocate(&self, tree: &mut Tree, offset: u64, len: u64) -> Result<(), Refused> {
        match self {
            Self::Tree(open) => {
                let end = offset.checked_add(len).ok_or(Refused::TooLarge)?;
                match end > tree.stat(open.node)?.size {
                    true => tree.set_size(open.node, end, Time::now()),
                    false => Ok(()),
                }
            }
            Self::Host(host) => host.allocate(offset, len),
        }
    }

    /// The next entries of a directory from a position on, `.` and `..` among them; none at the
    /// end.
    pub(crate) fn entries(
        &mut self,
        tree: &Tree,
        from: u64,
    ) -> Result<Vec<DirectoryEntry>, Refused> {
        Ok(match self {
            Self::Tree(open) => open
                .entries(tree, from)?
                .map(|(next, entry)| DirectoryEntry {
                    next,
                    name: entry.name.to_vec(),
                    inode: entry.node.0,
                    kind: kind(entry.kind),
                })
                .collect(),
            Self::Host(host) => host
                .entries(from)?
                .into_iter()
                .map(|entry| DirectoryEntry {
                    next: entry.next,
                    name: entry.name,
                    inode: entry.inode,
                    kind: entry.kind,
                })
                .collect(),
        })
    }

    /// The handle of a host file, whose bytes may have to reach a disk.
    pub(crate) fn on_host(&self) -> Option<HostHandle> {
        match self {
            Self::Tree(_) => None,
            Self::Host(host) => Some(host.clone()),
        }
    }
}

/// Opens or makes a file of the tree.
fn open_in_tree(
    tree: &mut Tree,
    from: &OpenFile,
    path: &[u8],
    how: Opening,
) -> Result<OpenFile, Refused> {
    let now = Time::now();
    let mut walk = walk_below(from, how.follow);
    let exclusive = how.create && how.exclusive;
    if exclusive {
        walk = walk.name();
    }
    let place = tree.walk(path, walk)?;
    let Some((node, kind)) = place.found else {
        if !how.create {
            return Err(Refused::Missing);
        }
        let node = tree.create_at(&place, New::File, 0o666, now)?;
        return tree.open(node, how.access);
    };
    if exclusive {
        return Err(Refused::Exists);
    }
    match kind {
        Kind::Link => return Err(Refused::Loop),
        Kind::Directory if how.access.write || how.truncate || how.create => {
            return Err(Refused::IsDirectory);
        }
        Kind::Directory => return tree.open(node, Access::reading()),
        _ if how.directory => return Err(Refused::NotDirectory),
        Kind::File if how.truncate => tree.set_size(node, 0, now)?,
        _ => {}
    }
    tree.open(node, how.access)
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Layer};

    use super::*;
    use crate::{Engine, EngineConfig, Guest, WarmUp};

    #[test]
    fn files_of_a_layer_are_read_into_pages_that_are_protected() {
        const BYTES: usize = 4 << 12;
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("data"), [7; BYTES]).unwrap();
        let layer = Layer::directory(folder.path()).unwrap();
        let mut tree = Tree::new(Budget::default()).with_layer("/", &layer).unwrap();
        let node = tree.find("/data").unwrap();
        let mut open = OpenHandle::Tree(tree.open(node, Access::reading()).unwrap());

        let module = wat::parse_str("(module (memory (export \"memory\") 1))").unwrap();
        let guest = Guest::new(&Engine::new(EngineConfig::default()).unwrap(), &module).unwrap();
        let warm = guest.warm(WarmUp::new()).unwrap();
        let mut lease = warm.lease().unwrap();
        let memory = lease.live.handle().unwrap();
        // Not opened by the host, as if a preparation had protected it meanwhile.
        let out = &mut memory.data_mut(lease.live.parts().store)[..BYTES];
        assert_eq!(open.read_into_guest(&tree, None, out).unwrap(), BYTES);
        assert!(out.iter().all(|byte| *byte == 7));
    }
}
