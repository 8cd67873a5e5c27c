//! Handles of files and directories, and their operations.

use afresh_files::{Access, Durability, HostHandle, HostKind, Refused, Time};
use wasmtime::component::Resource;
use wasmtime_wasi::p2::bindings::clocks::wall_clock::Datetime;
use wasmtime_wasi::p2::bindings::filesystem::types::{
    Descriptor, DescriptorFlags, DescriptorStat, DescriptorType, DirectoryEntry, ErrorCode,
    MetadataHashValue, NewTimestamp, OpenFlags, PathFlags,
};
use wasmtime_wasi::p2::{DynInputStream, DynOutputStream, FsError, FsResult};

use super::View;
use super::streams::{Reader, Writer};
use crate::host::files::{LiveFiles, Ticket};
use crate::host::opened::{FileStat, OpenHandle, Opening};

/// Bytes of one read.
const READ: u64 = 1 << 20;

type Fd = Resource<Descriptor>;

/// An open file or directory.
pub(crate) struct Handle {
    pub(super) open: OpenHandle,
    flags: DescriptorFlags,
    _ticket: Ticket,
}

/// A directory that is being read.
pub(crate) struct Listing {
    files: LiveFiles,
    open: OpenHandle,
    from: u64,
    ahead: std::vec::IntoIter<crate::host::opened::DirectoryEntry>,
    _ticket: Ticket,
}

impl Listing {
    /// The next entry; the directory itself and its parent are left out.
    pub(super) fn next_entry(&mut self) -> FsResult<Option<DirectoryEntry>> {
        loop {
            let Some(entry) = self.ahead.next() else {
                let tree = &self.files.lock().tree;
                let batch = self.open.entries(tree, self.from).map_err(refused)?;
                if batch.is_empty() {
                    return Ok(None);
                }
                self.ahead = batch.into_iter();
                continue;
            };
            self.from = entry.next;
            if matches!(&entry.name[..], b"." | b"..") {
                continue;
            }
            return match String::from_utf8(entry.name) {
                Ok(name) => Ok(Some(DirectoryEntry { type_: kind(entry.kind), name })),
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
        Refused::Denied => ErrorCode::Access,
        Refused::CrossDevice => ErrorCode::CrossDevice,
        #[cfg(unix)]
        Refused::Host(error) => {
            ErrorCode::from(&std::io::Error::from_raw_os_error(error.raw_os_error()))
        }
        _ => ErrorCode::Io,
    }
}

pub(super) fn refused(refused: Refused) -> FsError {
    code(&refused).into()
}

fn kind(kind: HostKind) -> DescriptorType {
    match kind {
        HostKind::File => DescriptorType::RegularFile,
        HostKind::Directory => DescriptorType::Directory,
        HostKind::Link => DescriptorType::SymbolicLink,
        HostKind::CharacterDevice => DescriptorType::CharacterDevice,
        HostKind::BlockDevice => DescriptorType::BlockDevice,
        HostKind::Fifo => DescriptorType::Fifo,
        HostKind::Socket => DescriptorType::Socket,
        _ => DescriptorType::Unknown,
    }
}

fn datetime(time: Time) -> Option<Datetime> {
    let seconds = u64::try_from(time.seconds).ok()?;
    Some(Datetime { seconds, nanoseconds: time.nanos })
}

fn described(stat: &FileStat) -> DescriptorStat {
    DescriptorStat {
        type_: kind(stat.kind),
        link_count: stat.links,
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

/// When writes to a descriptor with such flags are on the disk.
fn durability(flags: DescriptorFlags) -> Durability {
    if flags.contains(DescriptorFlags::FILE_INTEGRITY_SYNC) {
        Durability::All
    } else if flags.contains(DescriptorFlags::DATA_INTEGRITY_SYNC) {
        Durability::Data
    } else {
        Durability::Later
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

    fn push(&mut self, open: OpenHandle, flags: DescriptorFlags) -> FsResult<Fd> {
        let ticket = match self.ticket() {
            Ok(ticket) => ticket,
            Err(error) => {
                open.close(&mut self.files.lock().tree);
                return Err(error);
            }
        };
        let handle = self.table.push(Handle { open, flags, _ticket: ticket })?;
        Ok(Resource::new_own(handle.rep()))
    }

    /// Handles of the directories that the guest was given.
    pub(super) fn directories(&mut self) -> wasmtime::Result<Vec<(Fd, String)>> {
        let given = self.files.lock().directories();
        let mut directories = Vec::with_capacity(given.len());
        for (open, name) in given {
            let mut flags = DescriptorFlags::READ;
            if open.is_writable() {
                flags |= DescriptorFlags::MUTATE_DIRECTORY;
            }
            let held = open.hold(&mut self.files.lock().tree).map_err(refused);
            let fd = held.and_then(|()| self.push(open, flags)).map_err(|error| {
                wasmtime::Error::msg(format!("the directory {name:?} cannot be opened: {error}"))
            })?;
            directories.push((fd, name));
        }
        Ok(directories)
    }

    pub(super) fn handle(
        &self,
        fd: &Fd,
    ) -> Result<&Handle, wasmtime::component::ResourceTableError> {
        self.table.get(&Resource::<Handle>::new_borrow(fd.rep()))
    }

    /// The open file; a directory is not one.
    pub(super) fn file(&self, fd: &Fd) -> FsResult<OpenHandle> {
        let open = self.handle(fd)?.open.clone();
        match open.is_directory(&self.files.lock().tree).map_err(refused)? {
            true => Err(ErrorCode::BadDescriptor.into()),
            false => Ok(open),
        }
    }

    fn directory(&self, fd: &Fd) -> FsResult<OpenHandle> {
        let open = self.handle(fd)?.open.clone();
        match open.is_directory(&self.files.lock().tree).map_err(refused)? {
            true => Ok(open),
            false => Err(ErrorCode::NotDirectory.into()),
        }
    }

    /// The host file whose bytes have to reach a disk, if it is one.
    pub(super) fn host_file(&self, fd: &Fd) -> FsResult<Option<HostHandle>> {
        Ok(self.handle(fd)?.open.on_host())
    }

    pub(super) fn close(&mut self, fd: &Fd) -> wasmtime::Result<()> {
        let handle = self.table.delete(Resource::<Handle>::new_own(fd.rep()))?;
        handle.open.close(&mut self.files.lock().tree);
        Ok(())
    }

    pub(super) fn flags(&self, fd: &Fd) -> FsResult<DescriptorFlags> {
        Ok(self.handle(fd)?.flags)
    }

    fn file_stat(&self, fd: &Fd) -> FsResult<FileStat> {
        let open = &self.handle(fd)?.open;
        open.stat(&self.files.lock().tree).map_err(refused)
    }

    pub(super) fn stat_of(&self, fd: &Fd) -> FsResult<DescriptorStat> {
        Ok(described(&self.file_stat(fd)?))
    }

    /// The attributes of the file at a path.
    fn find(&self, fd: &Fd, flags: PathFlags, path: &str) -> FsResult<FileStat> {
        let (from, tree) = (self.directory(fd)?, &self.files.lock().tree);
        from.stat_at(tree, path.as_bytes(), follows(flags)).map_err(refused)
    }

    pub(super) fn stat_path(
        &self,
        fd: &Fd,
        flags: PathFlags,
        path: &str,
    ) -> FsResult<DescriptorStat> {
        Ok(described(&self.find(fd, flags, path)?))
    }

    pub(super) fn is_same(&self, one: &Fd, other: &Fd) -> wasmtime::Result<bool> {
        let stat = |fd| {
            let open = &self.handle(fd)?.open;
            Ok::<_, wasmtime::Error>(open.stat(&self.files.lock().tree).ok())
        };
        let of = |stat: FileStat| (stat.device, stat.inode);
        let (one, other) = (stat(one)?.map(of), stat(other)?.map(of));
        Ok(one.is_some() && one == other)
    }

    pub(super) fn hash(
        &self,
        fd: &Fd,
        at: Option<(PathFlags, &str)>,
    ) -> FsResult<MetadataHashValue> {
        let stat = match at {
            Some((flags, path)) => self.find(fd, flags, path)?,
            None => self.file_stat(fd)?,
        };
        Ok(MetadataHashValue { lower: stat.inode, upper: stat.device })
    }

    pub(super) fn resize(&self, fd: &Fd, size: u64) -> FsResult<()> {
        let open = self.file(fd)?;
        if !open.access().write {
            return Err(ErrorCode::NotPermitted.into());
        }
        open.set_size(&mut self.files.lock().tree, size).map_err(refused)
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
        match at {
            Some((flags, path)) => {
                let (from, at) = (self.directory(fd)?, (path.as_bytes(), follows(flags)));
                from.set_times_at(&mut self.files.lock().tree, at, accessed, modified, now)
            }
            None => {
                let open = &self.handle(fd)?.open;
                open.set_times(&mut self.files.lock().tree, accessed, modified, now)
            }
        }
        .map_err(refused)
    }

    pub(super) fn read_at(&self, fd: &Fd, len: u64, at: u64) -> FsResult<(Vec<u8>, bool)> {
        let open = self.file(fd)?;
        let tree = &self.files.lock().tree;
        let left = open.stat(tree).map_err(refused)?.size.saturating_sub(at);
        let mut bytes = vec![0; len.min(left).min(READ) as usize];
        let read = open.read_at(tree, at, &mut bytes).map_err(refused)?;
        bytes.truncate(read);
        Ok((bytes, read == 0))
    }

    pub(super) fn write_at(&self, fd: &Fd, bytes: &[u8], at: u64) -> FsResult<u64> {
        let open = self.file(fd)?;
        if !open.access().write {
            return Err(ErrorCode::NotPermitted.into());
        }
        let tree = &mut self.files.lock().tree;
        Ok(open.write_at(tree, at, bytes).map_err(refused)? as u64)
    }

    pub(super) fn list(&mut self, fd: &Fd) -> FsResult<Resource<Listing>> {
        let (files, open) = (self.files.clone(), self.directory(fd)?);
        let (ahead, ticket) = (Vec::new().into_iter(), self.ticket()?);
        Ok(self.table.push(Listing { files, open, from: 0, ahead, _ticket: ticket })?)
    }

    pub(super) fn make_directory(&self, fd: &Fd, path: &str) -> FsResult<()> {
        let from = self.directory(fd)?;
        from.create_directory(&mut self.files.lock().tree, path.as_bytes()).map_err(refused)
    }

    pub(super) fn remove_directory(&self, fd: &Fd, path: &str) -> FsResult<()> {
        let from = self.directory(fd)?;
        from.remove_directory(&mut self.files.lock().tree, path.as_bytes()).map_err(refused)
    }

    pub(super) fn remove_file(&self, fd: &Fd, path: &str) -> FsResult<()> {
        let from = self.directory(fd)?;
        from.remove_file(&mut self.files.lock().tree, path.as_bytes()).map_err(refused)
    }

    pub(super) fn make_link(&self, fd: &Fd, target: &str, path: &str) -> FsResult<()> {
        let (from, tree) = (self.directory(fd)?, &mut self.files.lock().tree);
        from.create_link(tree, target.as_bytes(), path.as_bytes()).map_err(refused)
    }

    pub(super) fn read_link(&self, fd: &Fd, path: &str) -> FsResult<String> {
        let (from, tree) = (self.directory(fd)?, &self.files.lock().tree);
        let target = from.read_link(tree, path.as_bytes()).map_err(refused)?;
        String::from_utf8(target).map_err(|_| ErrorCode::IllegalByteSequence.into())
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
        let (from, into) = (self.directory(fd)?, self.directory(into)?);
        let tree = &mut self.files.lock().tree;
        from.link(tree, old.as_bytes(), &into, new.as_bytes()).map_err(refused)
    }

    pub(super) fn rename(&self, fd: &Fd, old: &str, into: &Fd, new: &str) -> FsResult<()> {
        let (from, into) = (self.directory(fd)?, self.directory(into)?);
        let tree = &mut self.files.lock().tree;
        from.rename(tree, old.as_bytes(), &into, new.as_bytes()).map_err(refused)
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
        let how = Opening {
            access: Access {
                read: flags.contains(DescriptorFlags::READ),
                write: flags.contains(DescriptorFlags::WRITE),
                append: false,
            },
            follow: follows(path_flags),
            create: how.contains(OpenFlags::CREATE),
            exclusive: how.contains(OpenFlags::EXCLUSIVE),
            truncate: how.contains(OpenFlags::TRUNCATE),
            directory: how.contains(OpenFlags::DIRECTORY),
        };
        let from = self.directory(fd)?;
        let mut open =
            from.open(&mut self.files.lock().tree, path.as_bytes(), how).map_err(refused)?;
        open.set_durability(durability(flags));
        let mut flags = flags;
        if !open.is_writable() {
            flags &= !DescriptorFlags::MUTATE_DIRECTORY;
        }
        self.push(open, flags)
    }

    pub(super) fn reader(&mut self, fd: &Fd, at: u64) -> FsResult<Resource<DynInputStream>> {
        let handle = self.handle(fd)?.open.clone();
        if handle.is_directory(&self.files.lock().tree).map_err(refused)? {
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
        if !open.access().write {
            return Err(ErrorCode::NotPermitted.into());
        }
        let writer: DynOutputStream =
            Box::new(Writer::new(&self.files, self.ticket()?, open, at).map_err(refused)?);
        Ok(self.table.push(writer)?)
    }
}
