//! Handles of files and directories, and their operations.

use afresh_files::{Access, Kind, New, Node, OpenFile, Refused, Rename, Stat, Time, Tree, Walk};
use wasmtime::component::Resource;
use wasmtime_wasi::p2::bindings::clocks::wall_clock::Datetime;
use wasmtime_wasi::p2::bindings::filesystem::types::{
    Descriptor, DescriptorFlags, DescriptorStat, DescriptorType, DirectoryEntry, ErrorCode,
    MetadataHashValue, NewTimestamp, OpenFlags, PathFlags,
};
use wasmtime_wasi::p2::{DynInputStream, DynOutputStream, FsError, FsResult};

use super::View;
use super::streams::{Reader, Writer};
use crate::files::{Live, Ticket};

/// Bytes of one read.
const READ: u64 = 1 << 20;

type Fd = Resource<Descriptor>;

/// An open file or directory.
pub(crate) struct Handle {
    pub(super) open: OpenFile,
    flags: DescriptorFlags,
    _ticket: Ticket,
}

/// A directory that is being read.
pub(crate) struct Listing {
    files: Live,
    open: OpenFile,
    from: u64,
    ahead: std::vec::IntoIter<(u64, afresh_files::Listed)>,
    _ticket: Ticket,
}

impl Listing {
    /// The next entry; the directory itself and its parent are left out.
    pub(super) fn next(&mut self) -> FsResult<Option<DirectoryEntry>> {
        loop {
            let Some((from, listed)) = self.ahead.next() else {
                let tree = &self.files.lock().tree;
                let batch: Vec<_> = self.open.entries(tree, self.from).map_err(refused)?.collect();
                if batch.is_empty() {
                    return Ok(None);
                }
                self.ahead = batch.into_iter();
                continue;
            };
            self.from = from;
            if matches!(&*listed.name, b"." | b"..") {
                continue;
            }
            return match String::from_utf8(listed.name.to_vec()) {
                Ok(name) => Ok(Some(DirectoryEntry { type_: kind(listed.kind), name })),
                Err(_) => Err(ErrorCode::IllegalByteSequence.into()),
            };
        }
    }
}

/// The error code for the guest.
pub(super) fn code(refused: &Refused) -> ErrorCode {
    match refused {
        Refused::Missing => ErrorCode::NoEntry,
        Refused::Exists => ErrorCode::Exist,
        Refused::NotDirectory => ErrorCode::NotDirectory,
        Refused::IsDirectory => ErrorCode::IsDirectory,
        Refused::NotEmpty => ErrorCode::NotEmpty,
        Refused::Invalid => ErrorCode::Invalid,
        Refused::Full => ErrorCode::InsufficientSpace,
        Refused::TooLarge => ErrorCode::FileTooLarge,
        Refused::NameTooLong => ErrorCode::NameTooLong,
        Refused::Loop => ErrorCode::Loop,
        Refused::NotPermitted => ErrorCode::NotPermitted,
        Refused::NotOpen => ErrorCode::BadDescriptor,
        Refused::Busy => ErrorCode::Busy,
        Refused::TooManyLinks => ErrorCode::TooManyLinks,
        _ => ErrorCode::Io,
    }
}

fn refused(refused: Refused) -> FsError {
    code(&refused).into()
}

fn kind(kind: Kind) -> DescriptorType {
    match kind {
        Kind::File => DescriptorType::RegularFile,
        Kind::Directory => DescriptorType::Directory,
        Kind::Link => DescriptorType::SymbolicLink,
        Kind::Device => DescriptorType::CharacterDevice,
        _ => DescriptorType::Unknown,
    }
}

fn datetime(time: Time) -> Option<Datetime> {
    let seconds = u64::try_from(time.seconds).ok()?;
    Some(Datetime { seconds, nanoseconds: time.nanos })
}

fn described(stat: &Stat) -> DescriptorStat {
    DescriptorStat {
        type_: kind(stat.kind),
        link_count: u64::from(stat.links),
        size: stat.size,
        data_access_timestamp: datetime(stat.times.accessed),
        data_modification_timestamp: datetime(stat.times.modified),
        status_change_timestamp: datetime(stat.times.changed),
    }
}

fn time(new: NewTimestamp, now: Time) -> FsResult<Option<Time>> {
    match new {
        NewTimestamp::NoChange => Ok(None),
        NewTimestamp::Now => Ok(Some(now)),
        NewTimestamp::Timestamp(at) => {
            let more = i64::from(at.nanoseconds / 1_000_000_000);
            let seconds = i64::try_from(at.seconds).ok().and_then(|s| s.checked_add(more));
            let seconds = seconds.ok_or(ErrorCode::Overflow)?;
            Ok(Some(Time { seconds, nanos: at.nanoseconds % 1_000_000_000 }))
        }
    }
}

fn follows(flags: PathFlags) -> bool {
    flags.contains(PathFlags::SYMLINK_FOLLOW)
}

impl View<'_> {
    /// Room for one more handle.
    fn ticket(&self) -> FsResult<Ticket> {
        self.files.ticket().ok_or_else(|| ErrorCode::InsufficientMemory.into())
    }

    fn push(&mut self, node: Node, access: Access, flags: DescriptorFlags) -> FsResult<Fd> {
        let ticket = self.ticket()?;
        let open = self.files.lock().tree.open(node, access).map_err(refused)?;
        let handle = self.table.push(Handle { open, flags, _ticket: ticket })?;
        Ok(Resource::new_own(handle.rep()))
    }

    /// A handle of the root of the tree.
    pub(super) fn top(&mut self) -> wasmtime::Result<Fd> {
        let flags = DescriptorFlags::READ | DescriptorFlags::MUTATE_DIRECTORY;
        let top = self.push(Tree::ROOT, Access::reading(), flags);
        top.map_err(|error| wasmtime::Error::msg(format!("the file tree has no root: {error}")))
    }

    pub(super) fn handle(
        &self,
        fd: &Fd,
    ) -> Result<&Handle, wasmtime::component::ResourceTableError> {
        self.table.get(&Resource::<Handle>::new_borrow(fd.rep()))
    }

    /// The open file; a directory is not one.
    pub(super) fn file(&self, fd: &Fd) -> FsResult<OpenFile> {
        let open = self.handle(fd)?.open.clone();
        match self.files.lock().tree.stat(open.node).map_err(refused)?.kind {
            Kind::Directory => Err(ErrorCode::BadDescriptor.into()),
            _ => Ok(open),
        }
    }

    fn directory(&self, fd: &Fd) -> FsResult<Node> {
        let node = self.handle(fd)?.open.node;
        match self.files.lock().tree.stat(node).map_err(refused)?.kind {
            Kind::Directory => Ok(node),
            _ => Err(ErrorCode::NotDirectory.into()),
        }
    }

    pub(super) fn close(&mut self, fd: &Fd) -> wasmtime::Result<()> {
        let handle = self.table.delete(Resource::<Handle>::new_own(fd.rep()))?;
        self.files.lock().tree.close(handle.open);
        Ok(())
    }

    pub(super) fn flags(&self, fd: &Fd) -> FsResult<DescriptorFlags> {
        Ok(self.handle(fd)?.flags)
    }

    pub(super) fn stat_of(&self, fd: &Fd) -> FsResult<DescriptorStat> {
        let node = self.handle(fd)?.open.node;
        self.files.lock().tree.stat(node).map(|stat| described(&stat)).map_err(refused)
    }

    /// Resolves a path from a directory.
    fn find(&self, fd: &Fd, flags: PathFlags, path: &str) -> FsResult<Stat> {
        let how = Walk::beneath(self.directory(fd)?).follow(follows(flags));
        let tree = &self.files.lock().tree;
        let place = tree.walk(path.as_bytes(), how).and_then(|place| place.node());
        place.and_then(|node| tree.stat(node)).map_err(refused)
    }

    pub(super) fn stat_path(
        &self,
        fd: &Fd,
        flags: PathFlags,
        path: &str,
    ) -> FsResult<DescriptorStat> {
        Ok(described(&self.find(fd, flags, path)?))
    }

    pub(super) fn hash(
        &self,
        fd: &Fd,
        at: Option<(PathFlags, &str)>,
    ) -> FsResult<MetadataHashValue> {
        let node = match at {
            Some((flags, path)) => self.find(fd, flags, path)?.node,
            None => self.handle(fd)?.open.node,
        };
        Ok(MetadataHashValue { lower: node.0, upper: 0 })
    }

    pub(super) fn resize(&self, fd: &Fd, size: u64) -> FsResult<()> {
        let open = self.file(fd)?;
        if !open.access.write {
            return Err(ErrorCode::NotPermitted.into());
        }
        self.files.lock().tree.set_size(open.node, size, Time::now()).map_err(refused)
    }

    pub(super) fn set_times_of(
        &self,
        fd: &Fd,
        at: Option<(PathFlags, &str)>,
        accessed: NewTimestamp,
        modified: NewTimestamp,
    ) -> FsResult<()> {
        let now = Time::now();
        let (accessed, modified) = (time(accessed, now)?, time(modified, now)?);
        let node = match at {
            Some((flags, path)) => self.find(fd, flags, path)?.node,
            None => self.handle(fd)?.open.node,
        };
        self.files.lock().tree.set_times(node, accessed, modified, now).map_err(refused)
    }

    pub(super) fn read_at(&self, fd: &Fd, len: u64, at: u64) -> FsResult<(Vec<u8>, bool)> {
        let open = self.file(fd)?;
        let tree = &self.files.lock().tree;
        let left = tree.stat(open.node).map_err(refused)?.size.saturating_sub(at);
        let mut bytes = vec![0; len.min(left).min(READ) as usize];
        let read = open.read_at(tree, at, &mut bytes).map_err(refused)?;
        bytes.truncate(read);
        Ok((bytes, read == 0))
    }

    pub(super) fn write_at(&self, fd: &Fd, bytes: &[u8], at: u64) -> FsResult<u64> {
        let open = self.file(fd)?;
        if !open.access.write {
            return Err(ErrorCode::NotPermitted.into());
        }
        let tree = &mut self.files.lock().tree;
        let written = open.write_at(tree, at, bytes, Time::now()).map_err(refused)?;
        Ok(written as u64)
    }

    pub(super) fn list(&mut self, fd: &Fd) -> FsResult<Resource<Listing>> {
        self.directory(fd)?;
        let (files, open) = (self.files.clone(), self.handle(fd)?.open.clone());
        let (ahead, ticket) = (Vec::new().into_iter(), self.ticket()?);
        Ok(self.table.push(Listing { files, open, from: 0, ahead, _ticket: ticket })?)
    }

    /// Runs `change` on the target of a path in a directory.
    fn with_name(
        &self,
        fd: &Fd,
        path: &str,
        change: impl FnOnce(&mut Tree, &afresh_files::ResolvedName) -> Result<(), Refused>,
    ) -> FsResult<()> {
        let how = Walk::beneath(self.directory(fd)?).name();
        let tree = &mut self.files.lock().tree;
        let place = tree.walk(path.as_bytes(), how).map_err(refused)?;
        change(tree, &place).map_err(refused)
    }

    pub(super) fn make_directory(&self, fd: &Fd, path: &str) -> FsResult<()> {
        self.with_name(fd, path, |tree, place| {
            tree.create_at(place, New::Directory, 0o777, Time::now()).map(drop)
        })
    }

    pub(super) fn remove_directory(&self, fd: &Fd, path: &str) -> FsResult<()> {
        self.with_name(fd, path, |tree, place| tree.remove_directory_at(place, Time::now()))
    }

    pub(super) fn remove_file(&self, fd: &Fd, path: &str) -> FsResult<()> {
        self.with_name(fd, path, |tree, place| tree.remove_file_at(place, Time::now()))
    }

    pub(super) fn make_link(&self, fd: &Fd, target: &str, path: &str) -> FsResult<()> {
        if target.starts_with('/') {
            return Err(ErrorCode::NotPermitted.into());
        }
        self.with_name(fd, path, |tree, place| {
            if place.slash && place.found.is_some_and(|(_, kind)| kind != Kind::Directory) {
                return Err(Refused::NotDirectory);
            }
            tree.create_at(place, New::Link(target.as_bytes()), 0o777, Time::now()).map(drop)
        })
    }

    pub(super) fn read_link(&self, fd: &Fd, path: &str) -> FsResult<String> {
        let node = self.find(fd, PathFlags::empty(), path)?.node;
        let target = self.files.lock().tree.read_link(node).map_err(refused)?;
        match String::from_utf8(target.to_vec()) {
            Ok(target) if target.starts_with('/') => Err(ErrorCode::NotPermitted.into()),
            Ok(target) => Ok(target),
            Err(_) => Err(ErrorCode::IllegalByteSequence.into()),
        }
    }

    pub(super) fn link_path(
        &self,
        fd: &Fd,
        flags: PathFlags,
        old: &str,
        into: &Fd,
        new: &str,
    ) -> FsResult<()> {
        if follows(flags) {
            return Err(ErrorCode::Invalid.into());
        }
        let node = self.find(fd, flags, old)?.node;
        self.with_name(into, new, |tree, place| tree.link_at(node, place, Time::now()))
    }

    pub(super) fn rename(&self, fd: &Fd, old: &str, into: &Fd, new: &str) -> FsResult<()> {
        let how = Walk::beneath(self.directory(fd)?).name();
        let from = self.files.lock().tree.walk(old.as_bytes(), how).map_err(refused)?;
        self.with_name(into, new, |tree, to| {
            tree.rename_at(&from, to, Rename::Replace, Time::now())
        })
    }

    pub(super) fn open_path(
        &mut self,
        fd: &Fd,
        path_flags: PathFlags,
        path: &str,
        how: OpenFlags,
        flags: DescriptorFlags,
    ) -> FsResult<Fd> {
        let makes = OpenFlags::CREATE | OpenFlags::EXCLUSIVE | OpenFlags::TRUNCATE;
        if how.contains(OpenFlags::DIRECTORY) && how.intersects(makes) {
            return Err(ErrorCode::Invalid.into());
        }
        let exclusive = how.contains(OpenFlags::CREATE | OpenFlags::EXCLUSIVE);
        let write = flags.contains(DescriptorFlags::WRITE);
        let mut walk = Walk::beneath(self.directory(fd)?).follow(follows(path_flags));
        if exclusive {
            walk = walk.name();
        }
        let node = {
            let tree = &mut self.files.lock().tree;
            let place = tree.walk(path.as_bytes(), walk).map_err(refused)?;
            match place.found {
                None if how.contains(OpenFlags::CREATE) => {
                    tree.create_at(&place, New::File, 0o666, Time::now()).map_err(refused)?
                }
                None => return Err(ErrorCode::NoEntry.into()),
                Some(_) if exclusive => return Err(ErrorCode::Exist.into()),
                Some((_, Kind::Link)) => return Err(ErrorCode::Loop.into()),
                Some((_, Kind::Directory)) if write || how.intersects(makes) => {
                    return Err(ErrorCode::IsDirectory.into());
                }
                Some((_, kind))
                    if kind != Kind::Directory && how.contains(OpenFlags::DIRECTORY) =>
                {
                    return Err(ErrorCode::NotDirectory.into());
                }
                Some((node, Kind::File)) if how.contains(OpenFlags::TRUNCATE) => {
                    tree.set_size(node, 0, Time::now()).map_err(refused)?;
                    node
                }
                Some((node, _)) => node,
            }
        };
        let read = flags.contains(DescriptorFlags::READ);
        self.push(node, Access { read, write, append: false }, flags)
    }

    pub(super) fn reader(&mut self, fd: &Fd, at: u64) -> FsResult<Resource<DynInputStream>> {
        let handle = self.handle(fd)?.open.clone();
        if self.files.lock().tree.stat(handle.node).map_err(refused)?.kind == Kind::Directory {
            return Err(ErrorCode::IsDirectory.into());
        }
        let reader: DynInputStream =
            Box::new(Reader::new(&self.files, self.ticket()?, handle, at).map_err(refused)?);
        Ok(self.table.push(reader)?)
    }

    pub(super) fn writer(
        &mut self,
        fd: &Fd,
        at: Option<u64>,
    ) -> FsResult<Resource<DynOutputStream>> {
        let open = self.file(fd)?;
        if !open.access.write {
            return Err(ErrorCode::NotPermitted.into());
        }
        let writer: DynOutputStream =
            Box::new(Writer::new(&self.files, self.ticket()?, open, at).map_err(refused)?);
        Ok(self.table.push(writer)?)
    }
}
