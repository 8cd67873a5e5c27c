//! The guest's files: directories of the host that were granted, read-only, under a layer of its own in memory.
//!
//! What the guest makes, changes or removes is in the layer, which is plain data: it is copied when the guest is warm,
//! and every call starts from that copy. Nothing is ever written to the host. A path of the host is looked at only
//! where it was granted, and only files and directories there are opened.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::packed;
use crate::error::ThawError;

/// Links that one path may lead through.
const LINKS: usize = 40;
/// Files that the layer may hold.
const INODES: usize = 1 << 16;
/// Bytes that a name takes beside its letters.
const NAME_COST: usize = 256;
/// Numbers of the layer's files start here, above those that hosts use.
const FIRST_INODE: u64 = 1 << 48;

/// A file of the layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    pub(crate) kind: Kind,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Seconds and nanoseconds.
    pub(crate) modified: (i64, i64),
    /// As it was set; reading does not change it.
    pub(crate) accessed: (i64, i64),
    /// Names it has.
    links: u64,
}

/// What a file of the layer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File(Arc<Vec<u8>>),
    Directory,
    Link(PathBuf),
    Device(Device),
}

/// Devices that every guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Null,
    Zero,
    Random,
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Missing,
    /// A file of the layer.
    Layer(u64),
    /// Something of the host's, at this very path.
    Host(Attributes, Option<PathBuf>),
}

/// What `stat` tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) inode: u64,
    /// With the type of the file.
    pub(crate) mode: u32,
    pub(crate) links: u64,
    pub(crate) size: u64,
    pub(crate) device: u64,
    pub(crate) modified: (i64, i64),
    pub(crate) accessed: (i64, i64),
}

impl Attributes {
    pub(crate) fn is(&self, kind: u32) -> bool {
        self.mode & libc::S_IFMT == kind
    }
}

/// The files that a guest sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    /// What of the host may be read: absolute, without links to follow.
    granted: Arc<Vec<PathBuf>>,
    /// The layer; `None` hides what the host has there.
    names: BTreeMap<PathBuf, Option<u64>>,
    inodes: BTreeMap<u64, Inode>,
    next: u64,
    bytes: u64,
    limit: u64,
}

/// An inode's content, in a form that is written down.
#[derive(Serialize, Deserialize)]
pub(crate) enum PackedInode {
    File(Vec<u8>),
    Directory,
    Link(Vec<u8>),
    Device(u8),
}

/// What is kept of an inode besides: mode, times, names.
type PackedAttributes = (u32, (i64, i64), (i64, i64), u64);

/// A tree, in a form that is written down.
#[derive(Serialize, Deserialize)]
pub(crate) struct PackedTree {
    granted: Vec<Vec<u8>>,
    names: Vec<(Vec<u8>, Option<u64>)>,
    inodes: Vec<(u64, PackedInode, PackedAttributes)>,
    next: u64,
    limit: u64,
}

impl Tree {
    pub(super) fn pack(&self) -> PackedTree {
        let inode = |(number, inode): (&u64, &Inode)| {
            let attributes = (inode.mode, inode.modified, inode.accessed, inode.links);
            (*number, packed::pack_kind(&inode.kind), attributes)
        };
        PackedTree {
            granted: self.granted.iter().map(|path| packed::bytes(path)).collect(),
            names: self.names.iter().map(|(path, inode)| (packed::bytes(path), *inode)).collect(),
            inodes: self.inodes.iter().map(inode).collect(),
            next: self.next,
            limit: self.limit,
        }
    }

    /// The tree that was packed, over what of the host is granted now, which must be all that was.
    pub(super) fn unpack(packed: PackedTree, granted: &[PathBuf]) -> Result<Self, ThawError> {
        for path in packed.granted.into_iter().map(packed::path) {
            if !granted.iter().any(|grant| path.starts_with(grant)) {
                return Err(ThawError::NotGranted(path));
            }
        }
        let mut tree = Self {
            granted: Arc::new(granted.to_vec()),
            names: packed.names.into_iter().map(|(name, i)| (packed::path(name), i)).collect(),
            inodes: BTreeMap::new(),
            next: packed.next.max(FIRST_INODE),
            bytes: 0,
            limit: packed.limit,
        };
        for (number, kind, (mode, modified, accessed, links)) in packed.inodes {
            let kind = packed::unpack_kind(kind)?;
            if let Kind::File(content) = &kind {
                tree.bytes += content.len() as u64;
            }
            tree.next = tree.next.max(number.saturating_add(1));
            tree.inodes.insert(number, Inode { kind, mode, modified, accessed, links });
        }
        tree.bytes +=
            tree.names.keys().map(|n| (n.as_os_str().len() + NAME_COST) as u64).sum::<u64>();
        if tree.names.values().flatten().any(|inode| !tree.inodes.contains_key(inode)) {
            return Err(packed::damaged("a name leads nowhere"));
        }
        Ok(tree)
    }

    /// A tree over `granted` that stores at most `limit` bytes of the guest's.
    pub(crate) fn new(granted: Vec<PathBuf>, limit: u64) -> Self {
        let mut tree = Self {
            granted: Arc::new(granted),
            names: BTreeMap::new(),
            inodes: BTreeMap::new(),
            next: FIRST_INODE,
            bytes: 0,
            limit,
        };
        for directory in ["/", "/dev", "/proc", "/proc/self", "/tmp"] {
            tree.put(directory.into(), Kind::Directory, 0o755);
        }
        for (name, device) in [
            ("/dev/null", Device::Null),
            ("/dev/zero", Device::Zero),
            ("/dev/random", Device::Random),
            ("/dev/urandom", Device::Random),
        ] {
            tree.put(name.into(), Kind::Device(device), 0o666);
        }
        tree
    }

    fn put(&mut self, path: PathBuf, kind: Kind, mode: u32) -> u64 {
        let inode = self.next;
        self.next += 1;
        self.inodes
            .insert(inode, Inode { kind, mode, modified: (0, 0), accessed: (0, 0), links: 1 });
        self.names.insert(path, Some(inode));
        inode
    }

    /// Makes a file or whatever `kind` says, with the directories above it that are missing.
    pub(crate) fn plant(&mut self, path: &Path, kind: Kind, mode: u32) {
        let above: Vec<_> = path.ancestors().skip(1).map(Path::to_path_buf).collect();
        for directory in above.into_iter().rev() {
            if self.look(&directory) == Found::Missing {
                self.put(directory, Kind::Directory, 0o755);
            }
        }
        if let Kind::File(bytes) = &kind {
            self.bytes += bytes.len() as u64;
        }
        self.put(path.to_path_buf(), kind, mode);
    }

    pub(crate) fn inode(&self, inode: u64) -> Result<&Inode, Errno> {
        self.inodes.get(&inode).ok_or(Errno::IO)
    }

    pub(crate) fn inode_mut(&mut self, inode: u64) -> Result<&mut Inode, Errno> {
        self.inodes.get_mut(&inode).ok_or(Errno::IO)
    }

    /// What is at `path`, which is absolute and leads through no links.
    pub(crate) fn look(&self, path: &Path) -> Found {
        match self.names.get(path) {
            Some(Some(inode)) => return Found::Layer(*inode),
            Some(None) => return Found::Missing,
            None => {}
        }
        // There the host tells of itself and of this process, which no grant can mean.
        if ["/proc", "/sys", "/dev"].iter().any(|own| path.starts_with(own)) {
            return Found::Missing;
        }
        let granted = self.granted.iter().any(|grant| path.starts_with(grant));
        if !granted && !self.granted.iter().any(|grant| grant.starts_with(path)) {
            return Found::Missing;
        }
        let Ok(meta) = path.symlink_metadata() else { return Found::Missing };
        let attributes = Attributes {
            inode: meta.ino(),
            mode: meta.mode(),
            links: meta.nlink(),
            size: meta.size(),
            device: 0,
            modified: (meta.mtime(), meta.mtime_nsec()),
            accessed: (meta.atime(), meta.atime_nsec()),
        };
        let link = if meta.is_symlink() { std::fs::read_link(path).ok() } else { None };
        // Anything but files, directories and links is none of the guest's business.
        if !(meta.is_file() && granted || meta.is_dir() || link.is_some()) {
            return Found::Missing;
        }
        Found::Host(attributes, link)
    }

    fn link(&self, found: &Found) -> Option<PathBuf> {
        match found {
            Found::Layer(inode) => match &self.inodes.get(inode)?.kind {
                Kind::Link(target) => Some(target.clone()),
                _ => None,
            },
            Found::Host(_, link) => link.clone(),
            Found::Missing => None,
        }
    }

    /// Follows `path` from `base`: the absolute path without links, and what is there.
    ///
    /// The last name may be missing. `follow` says whether it may be a link that is followed.
    pub(crate) fn resolve(
        &self,
        base: &Path,
        path: &Path,
        follow: bool,
    ) -> Result<(PathBuf, Found), Errno> {
        if path.as_os_str().is_empty() {
            return Err(Errno::NOENT);
        }
        let mut at = if path.is_absolute() { PathBuf::from("/") } else { base.to_path_buf() };
        let must_be_directory = path.as_os_str().as_bytes().ends_with(b"/");
        let mut ahead: Vec<OsString> = names(path);
        let mut links = 0;
        let mut found = self.look(&at);
        while let Some(name) = ahead.pop() {
            if name == ".." {
                at.pop();
                found = self.look(&at);
                continue;
            }
            match found {
                Found::Missing => return Err(Errno::NOENT),
                ref other if !self.attributes(other)?.is(libc::S_IFDIR) => {
                    return Err(Errno::NOTDIR);
                }
                _ => {}
            }
            if name.len() > 255 {
                return Err(Errno::NAMETOOLONG);
            }
            let next = at.join(&name);
            found = self.look(&next);
            let last = ahead.is_empty();
            match self.link(&found) {
                Some(target) if !last || follow || must_be_directory => {
                    links += 1;
                    if links > LINKS {
                        return Err(Errno::LOOP);
                    }
                    if target.is_absolute() {
                        at = PathBuf::from("/");
                    }
                    found = self.look(&at);
                    ahead.extend(names(&target));
                }
                _ => at = next,
            }
        }
        if must_be_directory
            && found != Found::Missing
            && !self.attributes(&found)?.is(libc::S_IFDIR)
        {
            return Err(Errno::NOTDIR);
        }
        Ok((at, found))
    }

    pub(crate) fn attributes(&self, found: &Found) -> Result<Attributes, Errno> {
        match found {
            Found::Missing => Err(Errno::NOENT),
            Found::Host(attributes, _) => Ok(*attributes),
            Found::Layer(number) => {
                let inode = self.inode(*number)?;
                let (kind, size, device) = match &inode.kind {
                    Kind::File(bytes) => (libc::S_IFREG, bytes.len(), 0),
                    Kind::Directory => (libc::S_IFDIR, 4096, 0),
                    Kind::Link(target) => (libc::S_IFLNK, target.as_os_str().len(), 0),
                    Kind::Device(device) => (libc::S_IFCHR, 0, 0x100 + *device as u64),
                };
                Ok(Attributes {
                    inode: *number,
                    mode: kind | inode.mode,
                    links: inode.links,
                    size: size as u64,
                    device,
                    modified: inode.modified,
                    accessed: inode.accessed,
                })
            }
        }
    }

    /// The target of the link at `path`.
    pub(crate) fn read_link(&self, found: &Found) -> Result<PathBuf, Errno> {
        self.attributes(found)?;
        self.link(found).ok_or(Errno::INVAL)
    }

    /// Opens a file of the host's for reading, through no links and into nothing but a file.
    pub(crate) fn open_host(path: &Path) -> Result<File, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?);
        let meta = file.metadata().map_err(|_| Errno::IO)?;
        if meta.is_file() || meta.is_dir() { Ok(file) } else { Err(Errno::ACCESS) }
    }

    /// Makes something new at `path`, where nothing is.
    pub(crate) fn create(
        &mut self,
        path: PathBuf,
        kind: Kind,
        mode: u32,
        now: (i64, i64),
    ) -> Result<u64, Errno> {
        if self.inodes.len() >= INODES {
            return Err(Errno::NOSPC);
        }
        let target = if let Kind::Link(target) = &kind { target.as_os_str().len() } else { 0 };
        self.charge(path.as_os_str().len() + target)?;
        let inode = self.put(path, kind, mode & 0o7777);
        let new = self.inode_mut(inode)?;
        (new.modified, new.accessed) = (now, now);
        Ok(inode)
    }

    /// Takes the room of a name out of the budget; it does not come back before the call ends.
    fn charge(&mut self, len: usize) -> Result<(), Errno> {
        let cost = (len + NAME_COST) as u64;
        if cost > self.limit.saturating_sub(self.bytes) {
            return Err(Errno::NOSPC);
        }
        self.bytes += cost;
        Ok(())
    }

    /// The layer's file at `path`; a file of the host's is copied into the layer first.
    pub(crate) fn writable(
        &mut self,
        path: &Path,
        found: &Found,
        keep: bool,
    ) -> Result<u64, Errno> {
        match found {
            Found::Missing => Err(Errno::NOENT),
            Found::Layer(inode) => Ok(*inode),
            Found::Host(attributes, _) if attributes.is(libc::S_IFREG) => {
                let mut bytes = Vec::new();
                if keep {
                    if attributes.size > self.limit.saturating_sub(self.bytes) {
                        return Err(Errno::NOSPC);
                    }
                    let file = Self::open_host(path)?;
                    bytes.resize(attributes.size as usize, 0);
                    let mut done = 0;
                    while done < bytes.len() {
                        match rustix::io::pread(&file, &mut bytes[done..], done as u64)? {
                            0 => break,
                            n => done += n,
                        }
                    }
                    bytes.truncate(done);
                }
                self.bytes += bytes.len() as u64;
                self.create(
                    path.to_path_buf(),
                    Kind::File(Arc::new(bytes)),
                    attributes.mode,
                    attributes.modified,
                )
            }
            Found::Host(..) => Err(Errno::ROFS),
        }
    }

    /// Changes the bytes of a file of the layer, within the budget; `size` is its length afterwards at most.
    pub(crate) fn edit<T>(
        &mut self,
        inode: u64,
        size: u64,
        change: impl FnOnce(&mut Vec<u8>) -> T,
    ) -> Result<T, Errno> {
        let Kind::File(bytes) = &self.inode(inode)?.kind else { return Err(Errno::INVAL) };
        let old = bytes.len() as u64;
        if size > old && size - old > self.limit.saturating_sub(self.bytes) {
            return Err(Errno::NOSPC);
        }
        let Kind::File(bytes) = &mut self.inode_mut(inode)?.kind else { return Err(Errno::INVAL) };
        let bytes = Arc::make_mut(bytes);
        let result = change(bytes);
        let new = bytes.len() as u64;
        self.bytes = self.bytes + new - old;
        Ok(result)
    }

    /// Removes the name `path`. Files that are open stay until the end of the call.
    pub(crate) fn remove(
        &mut self,
        path: &Path,
        found: &Found,
        directory: bool,
    ) -> Result<(), Errno> {
        if self.attributes(found)?.is(libc::S_IFDIR) != directory {
            return Err(if directory { Errno::NOTDIR } else { Errno::ISDIR });
        }
        if directory && !self.list(path).is_empty() {
            return Err(Errno::NOTEMPTY);
        }
        self.hide(path)
    }

    fn hide(&mut self, path: &Path) -> Result<(), Errno> {
        self.charge(path.as_os_str().len())?;
        let old = self.names.insert(path.to_path_buf(), None);
        self.unlink(old);
        Ok(())
    }

    /// Counts a name less for what had it.
    fn unlink(&mut self, old: Option<Option<u64>>) {
        if let Some(inode) = old.flatten().and_then(|inode| self.inodes.get_mut(&inode)) {
            inode.links = inode.links.saturating_sub(1);
        }
    }

    fn name(&mut self, path: PathBuf, inode: u64) -> Result<(), Errno> {
        self.charge(path.as_os_str().len())?;
        self.inode_mut(inode)?.links += 1;
        let old = self.names.insert(path, Some(inode));
        self.unlink(old);
        Ok(())
    }

    /// Gives the file at `from` a further name, where nothing is.
    pub(crate) fn link_name(
        &mut self,
        from: &Path,
        found: &Found,
        to: PathBuf,
    ) -> Result<(), Errno> {
        let inode = self.writable(from, found, true)?;
        self.name(to, inode)
    }

    /// Bytes that may be stored, and bytes of them that are left.
    pub(crate) fn room(&self) -> (u64, u64) {
        (self.limit, self.limit.saturating_sub(self.bytes))
    }

    /// Gives what is at `from` the name `to`.
    pub(crate) fn rename(&mut self, from: &Path, found: &Found, to: &Path) -> Result<(), Errno> {
        if from == to {
            return Ok(());
        }
        let inode = match found {
            // As in other layered file systems: the program copies instead.
            Found::Host(attributes, _) if !attributes.is(libc::S_IFREG) => return Err(Errno::XDEV),
            found => self.writable(from, found, true)?,
        };
        if self.inode(inode)?.kind == Kind::Directory {
            if to.starts_with(from) {
                return Err(Errno::INVAL);
            }
            // What lies below moves too; what the host has below cannot.
            if !self
                .list(from)
                .iter()
                .all(|name| matches!(self.names.get(&from.join(name)), Some(Some(_))))
            {
                return Err(Errno::XDEV);
            }
            let below: Vec<_> = self
                .names
                .range(from.to_path_buf()..)
                .take_while(|(path, _)| path.starts_with(from))
                .filter_map(|(path, inode)| inode.map(|inode| (path.clone(), inode)))
                .collect();
            for (path, inode) in below {
                let rest = path.strip_prefix(from).map_err(|_| Errno::IO)?;
                let new =
                    if rest.as_os_str().is_empty() { to.to_path_buf() } else { to.join(rest) };
                self.hide(&path)?;
                self.name(new, inode)?;
            }
            return Ok(());
        }
        self.hide(from)?;
        self.name(to.to_path_buf(), inode)
    }

    /// The names in the directory at `path`, sorted.
    pub(crate) fn list(&self, path: &Path) -> Vec<OsString> {
        let mut list = BTreeSet::new();
        if self.granted.iter().any(|grant| path.starts_with(grant)) {
            for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
                list.insert(entry.file_name());
            }
        }
        for grant in self.granted.iter() {
            if let Ok(rest) = grant.strip_prefix(path)
                && let Some(Component::Normal(name)) = rest.components().next()
            {
                list.insert(name.to_os_string());
            }
        }
        let below =
            self.names.range(path.to_path_buf()..).take_while(|(name, _)| name.starts_with(path));
        for (name, _) in below {
            if name.parent() == Some(path)
                && let Some(name) = name.file_name()
            {
                list.insert(name.to_os_string());
            }
        }
        list.retain(|name| self.look(&path.join(name)) != Found::Missing);
        list.into_iter().collect()
    }
}

/// The names of a path, last first.
fn names(path: &Path) -> Vec<OsString> {
    path.components()
        .rev()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_os_string()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        })
        .collect()
}
