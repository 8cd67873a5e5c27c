//! A host directory as a layer: read on demand, and never left through a link.
//!
//! Promises: every path is opened below the directory by the kernel's own check (`openat2`,
//! beneath, no symbolic links), so a process that replaces directories by links at the same time
//! cannot lead out of it. A file's node follows from its path, so that it is the same in another
//! process, and the inode number that programs see from the host's. A file shows the version that
//! its path had at the last open or read, until the directory is captured. A tree that has copied
//! the attributes of a version reads its bytes, or none. May break it: see [`crate::layer`].

mod following;
mod host_file;
mod inode_numbers;
mod lookups;

use std::collections::HashMap;
use std::collections::hash_map;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RawDir, ResolveFlags, Stat, openat, openat2,
};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;
use sha2::{Digest, Sha256};

use crate::error::{LayerError, Refused};
use crate::layers::layer_bytes::LayerBytes;
use crate::nodes::inode::{Body, Directory, Entry, Inode};
use crate::nodes::map::Map;
use crate::nodes::name::Name;
use crate::nodes::node::{Kind, Node};
use crate::nodes::source::SourceVersion;
pub use host_file::HostFile;
use host_file::times_of;
use inode_numbers::{FileNumber, InodeNumbers};
use lookups::UnlistedDirectory;

/// The bit of numbers of hosts' files. The 14 bits from 48 on are the layer's number.
pub(crate) const HOST: u64 = 1 << 62;
/// Maximum files of one directory tree that are remembered.
const MAX_INODES: usize = 1 << 20;
/// Bytes of a directory that are read at a time.
const ENTRY_BUFFER_LEN: usize = 32 << 10;
/// Files that stay open for the next read.
const OPEN: usize = 32;

#[derive(Debug)]
struct HostEntry {
    name: Name,
    parent: Node,
    inode: Option<Arc<Inode>>,
    /// Its inode number, once it was listed or looked up.
    number: Option<FileNumber>,
    /// Lookups in a directory before it was listed.
    unlisted: Option<UnlistedDirectory>,
    /// The file that `inode` shows.
    seen: Option<HostFile>,
}

impl HostEntry {
    fn new(name: Name, parent: Node) -> Self {
        let (inode, number, unlisted, seen) = (None, None, None, None);
        Self { name, parent, inode, number, unlisted, seen }
    }

    /// Names that lookups have found, in a directory without a list.
    fn found_len(&self) -> usize {
        self.unlisted.as_ref().map_or(0, |unlisted| unlisted.found.len())
    }
}

/// A host directory.
#[derive(Debug)]
pub(crate) struct HostDirectory {
    pub(crate) path: PathBuf,
    root: Arc<OwnedFd>,
    number: u32,
    known: Mutex<HashMap<Node, HostEntry>>,
    /// Locked after the files that are known.
    inode_numbers: InodeNumbers,
    /// The last used one last.
    open: Mutex<Vec<(Node, Arc<File>)>>,
    /// Its identity once it was captured.
    identity: OnceLock<String>,
    kept: OnceLock<KeptFiles>,
    /// Whether its files are being captured, or were.
    is_captured: AtomicBool,
    /// Set once each file shows the version that is captured.
    captured: OnceLock<()>,
}

/// The bytes of all files, as they were when they were kept, and where each begins among them.
#[derive(Debug)]
struct KeptFiles {
    bytes: Arc<dyn LayerBytes>,
    begins: HashMap<Node, u64>,
}

fn failed(path: &Path, error: Errno) -> Refused {
    match error {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV => Refused::Missing,
        // The host has no such file: its names are shorter.
        Errno::NAMETOOLONG => Refused::Missing,
        error => Refused::Layer(format!("{}: {error}", path.display())),
    }
}

/// The kind that a guest sees; `None` for a host file that guests do not see.
fn kind_of(kind: FileType) -> Option<Kind> {
    match kind {
        FileType::RegularFile => Some(Kind::File),
        FileType::Directory => Some(Kind::Directory),
        FileType::Symlink => Some(Kind::Link),
        _ => None,
    }
}

/// Has `node` be known as `name` in `parent`.
fn know(
    known: &mut HashMap<Node, HostEntry>,
    node: Node,
    parent: Node,
    name: Name,
) -> Result<&mut HostEntry, Errno> {
    let has_room = known.len() < MAX_INODES;
    match known.entry(node) {
        hash_map::Entry::Occupied(entry)
            if (entry.get().parent, &entry.get().name) != (parent, &name) =>
        {
            Err(Errno::EXIST)
        }
        hash_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
        hash_map::Entry::Vacant(_) if !has_room => Err(Errno::NFILE),
        hash_map::Entry::Vacant(entry) => Ok(entry.insert(HostEntry::new(name, parent))),
    }
}

/// The path of a file that is known, below the directory.
fn path_of(known: &HashMap<Node, HostEntry>, node: Node) -> Result<PathBuf, Refused> {
    let mut names = Vec::new();
    let mut at = node;
    loop {
        let here = known.get(&at).ok_or(Refused::Missing)?;
        if here.parent == at {
            break;
        }
        names.push(OsStr::from_bytes(&here.name.0));
        at = here.parent;
    }
    Ok(names.into_iter().rev().collect())
}

impl HostDirectory {
    pub(crate) fn open(path: &Path) -> Result<Self, LayerError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = openat(CWD, path, flags, Mode::empty()).map_err(|error| LayerError::Read {
            path: path.display().to_string(),
            source: error.into(),
        })?;
        Ok(Self::new(path.to_owned(), Arc::new(root), 0))
    }

    /// A directory below this one, reached without following a link.
    pub(crate) fn subdirectory(&self, below: &Path) -> Result<Self, LayerError> {
        let path = self.path.join(below);
        match self.open_at(below, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(root) => Ok(Self::new(path, Arc::new(root), 0)),
            Err(error) => {
                Err(LayerError::Read { path: path.display().to_string(), source: error.into() })
            }
        }
    }

    fn new(path: PathBuf, root: Arc<OwnedFd>, number: u32) -> Self {
        let device = rustix::fs::fstat(&root).map_or(0, |stat| stat.st_dev);
        let inode_numbers = InodeNumbers::new(HOST | u64::from(number) << 48, device);
        let (known, open) = (Mutex::default(), Mutex::default());
        let (identity, kept, captured) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        let is_captured = AtomicBool::new(false);
        let this = Self {
            path,
            root,
            number,
            known,
            inode_numbers,
            open,
            identity,
            kept,
            is_captured,
            captured,
        };
        let top = this.root();
        this.lock_entries().insert(top, HostEntry::new(Name::from(&b""[..]), top));
        this
    }

    /// The same directory, with the numbers of another place among the layers.
    pub(crate) fn numbered(&self, number: u32) -> Self {
        Self::new(self.path.clone(), self.root.clone(), number)
    }

    fn node(&self, path: &[u8]) -> Node {
        let digest = Sha256::digest(path);
        let mut bytes = [0; 8];
        bytes[..6].copy_from_slice(&digest[..6]);
        Node(HOST | u64::from(self.number) << 48 | u64::from_le_bytes(bytes))
    }

    pub(crate) fn root(&self) -> Node {
        self.node(b"")
    }

    pub(crate) fn parent(&self, node: Node) -> Option<Node> {
        let known = self.lock_entries();
        known.get(&node).map(|known| known.parent)
    }

    /// The path of a file, below the directory.
    pub(crate) fn path(&self, node: Node) -> Result<PathBuf, Refused> {
        path_of(&self.lock_entries(), node)
    }

    /// Makes the number of a path known, as looking at every directory above it does, and lists
    /// none of them.
    pub(crate) fn enter(&self, path: &Path) -> Result<Node, Refused> {
        // Links, and files that a guest cannot open, are not found.
        let (_, stat) = self.stat_at(path).map_err(|error| failed(path, error))?;
        if kind_of(FileType::from_raw_mode(stat.st_mode)).is_none() {
            return Err(Refused::Missing);
        }
        let mut known = self.lock_entries();
        let (mut at, mut node) = (PathBuf::new(), self.root());
        for part in path.components() {
            let std::path::Component::Normal(name) = part else { return Err(Refused::Invalid) };
            at.push(name);
            let child = self.node(at.as_os_str().as_bytes());
            know(&mut known, child, node, Name::from(name.as_bytes()))
                .map_err(|error| failed(path, error))?;
            node = child;
        }
        Ok(node)
    }

    /// Settles the inode number of a file with the attributes `stat`.
    fn settle_number(&self, node: Node, here: &mut HostEntry, stat: &Stat) {
        let candidate = || Some(self.inode_numbers.candidate(stat.st_dev, stat.st_ino));
        self.inode_numbers.settle(node, &mut here.number, candidate);
    }

    /// The inode number of a file that is known.
    pub(crate) fn inode_number(&self, node: Node) -> u64 {
        if self.is_numbered_by_path() {
            return node.0;
        }
        let mut known = self.lock_entries();
        let Some(here) = known.get_mut(&node) else { return node.0 };
        let listed = match here.number {
            Some(FileNumber::Listed(number)) => Some(number),
            _ => None,
        };
        self.inode_numbers.settle(node, &mut here.number, || listed)
    }

    /// The inode number of a file that a guest has seen, for a saved tree.
    pub(crate) fn lasting_number(&self, node: Node) -> Option<u64> {
        let number = self.lock_entries().get(&node)?.number?.settled();
        number.filter(|_| !self.is_numbered_by_path())
    }

    /// Gives a file of a saved tree the inode number that it had. A file that has one keeps it, and
    /// so does another file with this number.
    pub(crate) fn restore_number(&self, node: Node, number: u64) -> Result<(), Refused> {
        if !self.inode_numbers.is_valid(number) {
            return Err(Refused::Invalid);
        }
        let mut known = self.lock_entries();
        let here = known.get_mut(&node).ok_or(Refused::Missing)?;
        self.inode_numbers.settle(node, &mut here.number, || Some(number));
        Ok(())
    }

    /// Has all files numbered by their paths, as in trees that were saved before inode numbers
    /// followed those of the host.
    pub(crate) fn number_by_path(&self) {
        self.inode_numbers.follow_paths();
    }

    pub(crate) fn is_numbered_by_path(&self) -> bool {
        self.inode_numbers.are_by_path()
    }

    fn lock_entries(&self) -> MutexGuard<'_, HashMap<Node, HostEntry>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_open(&self) -> MutexGuard<'_, Vec<(Node, Arc<File>)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file at a path, which is not followed if it is a link, and its attributes.
    fn stat_at(&self, path: &Path) -> Result<(OwnedFd, Stat), Errno> {
        let fd = self.open_at(path, OFlags::PATH)?;
        let stat = rustix::fs::fstat(&fd)?;
        Ok((fd, stat))
    }

    fn open_at(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(&self.root, path, flags | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty(), how)
    }

    pub(crate) fn inode(&self, node: Node) -> Result<Arc<Inode>, Refused> {
        loop {
            let (path, found) = {
                let known = self.lock_entries();
                let here = known.get(&node).ok_or(Refused::Missing)?;
                if let Some(inode) = &here.inode {
                    return Ok(inode.clone());
                }
                (path_of(&known, node)?, here.found_len())
            };
            let (inode, stat) = self.look(node, &path).map_err(|error| failed(&path, error))?;
            let inode = Arc::new(inode);
            let mut known = self.lock_entries();
            let here = known.get_mut(&node).ok_or(Refused::Missing)?;
            // The first result wins.
            if let Some(inode) = &here.inode {
                return Ok(inode.clone());
            }
            // A list without a name that was found meanwhile is made again.
            if here.found_len() == found {
                if inode.kind() == Kind::Directory {
                    here.unlisted = None;
                }
                self.settle_number(node, here, &stat);
                here.seen = Some(HostFile::of_stat(&stat));
                here.inode = Some(inode.clone());
                return Ok(inode);
            }
        }
    }

    /// The path of a directory that has no list, although lookups have found names in it: the host
    /// has removed or replaced it since.
    pub(crate) fn lost_directory(&self, node: Node) -> Option<PathBuf> {
        let known = self.lock_entries();
        known.get(&node).filter(|here| here.found_len() > 0)?;
        path_of(&known, node).ok()
    }

    fn look(&self, node: Node, path: &Path) -> Result<(Inode, Stat), Errno> {
        let (fd, stat) = self.stat_at(path)?;
        Ok((self.inode_of(node, path, &fd, &stat)?, stat))
    }

    /// The file at `path`, which is open as `fd` and has the attributes `stat`.
    fn inode_of(&self, node: Node, path: &Path, fd: &OwnedFd, stat: &Stat) -> Result<Inode, Errno> {
        let times = times_of(stat);
        let mut links = 1;
        let body = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => HostFile::of_stat(stat).body(node),
            FileType::Directory => {
                let directory = self.list(node, path, fd, stat.st_dev)?;
                let below = directory.entries.iter().filter(|(_, e)| e.kind == Kind::Directory);
                links = 2 + below.count() as u32;
                Body::Directory(directory)
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(fd.as_fd(), "", Vec::new())?;
                Body::Link(target.as_bytes().into())
            }
            _ => return Err(Errno::NOENT),
        };
        let above = path.file_name().zip(self.parent(node));
        let name = above.map(|(name, above)| (above, Name::from(name.as_bytes())));
        let (mode, attributes) = (stat.st_mode & 0o7777, Default::default());
        Ok(Inode { body, mode, links, times, paid: false, name, attributes, owner: None })
    }

    /// Entries of the directory at `path`, which is open as `directory`.
    fn list(
        &self,
        node: Node,
        path: &Path,
        directory: &OwnedFd,
        device: u64,
    ) -> Result<Directory, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = openat(directory, ".", flags, Mode::empty())?;
        let mut found = Vec::new();
        let mut buffer = Vec::with_capacity(ENTRY_BUFFER_LEN);
        let mut entries = RawDir::new(&fd, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let mut kind = entry.file_type();
            if kind == FileType::Unknown {
                let stat = rustix::fs::statat(&fd, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
                kind = FileType::from_raw_mode(stat.st_mode);
            }
            let Some(kind) = kind_of(kind) else { continue };
            found.push((Name::from(name), kind, entry.ino()));
        }
        // A file that is renamed during the listing may appear twice.
        found.sort_unstable_by(|(one, ..), (two, ..)| one.cmp(two));
        found.dedup_by(|(one, ..), (two, ..)| one == two);
        self.add_looked_up(node, &mut found);
        let mut child = path.as_os_str().as_bytes().to_vec();
        if !child.is_empty() {
            child.push(b'/');
        }
        let above = child.len();
        let mut known = self.lock_entries();
        known.reserve(found.len());
        let mut entries = Vec::with_capacity(found.len());
        for (name, kind, inode) in found {
            child.truncate(above);
            child.extend_from_slice(&name.0);
            let child = self.node(&child);
            let here = know(&mut known, child, node, name.clone())?;
            let candidate = self.inode_numbers.candidate(device, inode);
            here.number.get_or_insert(FileNumber::Listed(candidate));
            entries.push((name, Entry { node: child, kind, paid: false }));
        }
        let parent = known.get(&node).map_or(node, |known| known.parent);
        Ok(Directory { entries: Map::of_sorted(entries), parent })
    }

    /// Adds the names that were looked up in a directory to its sorted list.
    fn add_looked_up(&self, directory: Node, list: &mut Vec<(Name, Kind, u64)>) {
        let known = self.lock_entries();
        let here = known.get(&directory).and_then(|here| here.unlisted.as_ref());
        for (name, _, kind) in here.iter().flat_map(|here| &here.found) {
            match list.binary_search_by(|(other, ..)| other.cmp(name)) {
                Ok(at) => list[at].1 = *kind,
                // It has the number of the lookup.
                Err(at) => list.insert(at, (name.clone(), *kind, 0)),
            }
        }
    }

    /// The host file of a file, and its present identity. One that was open before is used again,
    /// also after the host has removed or replaced it; another one is opened by its path.
    fn file(&self, node: Node) -> Result<(Arc<File>, HostFile), Refused> {
        let mut open = self.lock_open();
        if let Some(at) = open.iter().position(|(other, _)| *other == node) {
            let entry = open.remove(at);
            let file = entry.1.clone();
            open.push(entry);
            let stat = rustix::fs::fstat(&*file);
            let stat = stat.map_err(|error| Refused::Layer(error.to_string()))?;
            return Ok((file, HostFile::of_stat(&stat)));
        }
        let path = self.path(node)?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(self.open_at(&path, flags).map_err(|e| failed(&path, e))?);
        let stat = rustix::fs::fstat(&file).map_err(|error| failed(&path, error))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Refused::Layer(format!("{} is not a file any more", path.display())));
        }
        let file = Arc::new(file);
        if open.len() >= OPEN {
            open.remove(0);
        }
        open.push((node, file.clone()));
        Ok((file, HostFile::of_stat(&stat)))
    }

    /// A file on the host, open for reading, and its identity; `None` for one that is read where it
    /// was kept.
    pub(crate) fn open_on_host(&self, node: Node) -> Option<(Arc<File>, HostFile)> {
        if self.is_kept() {
            return None;
        }
        self.file(node).ok()
    }

    /// A unique name: the contents are unknown, but they belong to this directory at this time.
    pub(crate) fn identity(&self) -> &str {
        self.identity.get_or_init(|| {
            let mut bits = [0; 16];
            // With fewer random bytes the name would not be unique.
            while rustix::rand::getrandom(&mut bits, GetRandomFlags::empty()) != Ok(bits.len()) {}
            format!("gathered:{:032x}", u128::from_le_bytes(bits))
        })
    }

    /// Whether its files are read where they were kept.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept.get().is_some()
    }

    /// From now on all files are read from the stored bytes, and later changes on the host are not
    /// visible. The first call wins; returns whether this was the first.
    pub(crate) fn keep(&self, bytes: Arc<dyn LayerBytes>, begins: HashMap<Node, u64>) -> bool {
        let mut first = false;
        self.kept.get_or_init(|| {
            first = true;
            KeptFiles { bytes, begins }
        });
        if first {
            self.lock_open().clear();
        }
        first
    }

    /// The next position of a file from `at` on that is not in a hole. `at` itself where that is
    /// unknown.
    pub(crate) fn next_data(&self, node: Node, at: u64) -> Option<u64> {
        if self.is_kept() {
            return Some(at);
        }
        let file = self.file(node).ok();
        match file.map(|(file, _)| rustix::fs::seek(&*file, rustix::fs::SeekFrom::Data(at))) {
            Some(Ok(next)) => Some(next),
            Some(Err(Errno::NXIO)) => None,
            _ => Some(at),
        }
    }

    /// Reads; the part that the file has lost since it was looked up is zeros.
    ///
    /// # Errors
    /// [`Refused::Layer`]; [`Refused::ChangedOnHost`] if the file has another version than
    /// `version`.
    pub(crate) fn read(
        &self,
        node: Node,
        version: Option<SourceVersion>,
        at: u64,
        out: &mut [u8],
    ) -> Result<(), Refused> {
        if let Some(kept) = self.kept.get() {
            let from = kept.begins.get(&node).ok_or(Refused::Missing)?;
            return kept.bytes.read_at(from + at, out).map_err(Refused::Layer);
        }
        let (file, present) = self.file(node)?;
        if version.is_some_and(|version| version != present.version()) {
            let path = self.path.join(self.path(node)?);
            return Err(Refused::ChangedOnHost(path.display().to_string()));
        }
        let mut done = 0;
        while done < out.len() {
            match file.read_at(&mut out[done..], at + done as u64) {
                Ok(0) => {
                    out[done..].fill(0);
                    return Ok(());
                }
                Ok(len) => done += len,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Refused::Layer(error.to_string())),
            }
        }
        Ok(())
    }
}
