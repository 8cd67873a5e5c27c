//! A host directory that is granted to a guest: what the guest changes there is changed on the host
//! at once.
//!
//! Promises: the kernel resolves each path below the directory of the handle that it starts from
//! (`openat2`, beneath, no magic links), so neither `..`, nor a link, nor a process that replaces
//! directories meanwhile leads out of it. A handle of a directory that is granted for reading
//! changes nothing, through no other handle either. Only regular files and directories are opened,
//! so that no pipe or device blocks a thread. Handles of all guests take at most half of the
//! descriptors that this process may have. No file grows beyond the limit of files of this process.
//!
//! May break it: a host process that moves a directory out of the granted one while a guest has it
//! open; a host program that follows a link which a guest has made; a file system whose files
//! block, such as one over a network.

mod entries;
mod names;
mod process_limits;

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps,
    UTIME_OMIT, openat, openat2,
};
use rustix::io::{Errno, ReadWriteFlags};

use crate::error::Refused;
use crate::host_values::{Durability, HostKind, HostOpening, HostStat};
use crate::nodes::node::{Time, Times};
use crate::trees::open::{Access, Whence};

use entries::EntryReader;
use process_limits::{CountedFd, extend};

/// Attempts at a path that other processes change at the same time.
const ATTEMPTS: usize = 128;

impl From<FileType> for HostKind {
    fn from(kind: FileType) -> Self {
        match kind {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Directory,
            FileType::Symlink => Self::Link,
            FileType::CharacterDevice => Self::CharacterDevice,
            FileType::BlockDevice => Self::BlockDevice,
            FileType::Fifo => Self::Fifo,
            FileType::Socket => Self::Socket,
            FileType::Unknown => Self::Unknown,
        }
    }
}

impl From<rustix::fs::Stat> for HostStat {
    fn from(stat: rustix::fs::Stat) -> Self {
        let time = |seconds: i64, nanos: u64| Time { seconds, nanos: nanos as u32 };
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            kind: FileType::from_raw_mode(stat.st_mode).into(),
            #[allow(clippy::useless_conversion, reason = "32 bits on arm64, 64 on x86-64")]
            links: stat.st_nlink.into(),
            size: stat.st_size.max(0) as u64,
            times: Times {
                accessed: time(stat.st_atime, stat.st_atime_nsec),
                modified: time(stat.st_mtime, stat.st_mtime_nsec),
                changed: time(stat.st_ctime, stat.st_ctime_nsec),
            },
        }
    }
}

/// An open file or directory of the host, in a directory that was granted. A clone shares the
/// descriptor, and has its own position.
#[derive(Clone, Debug)]
pub struct HostHandle {
    fd: Arc<CountedFd>,
    /// Its entries, once they were read.
    reader: Option<Arc<EntryReader>>,
    directory: bool,
    /// Whether it was granted for writing.
    writable: bool,
    /// Where the next read or write begins.
    pub offset: u64,
    /// Its access rights.
    pub access: Access,
    /// When its writes are on the disk.
    pub durability: Durability,
}

/// Two are equal when they have the same descriptor, position and access.
impl PartialEq for HostHandle {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.fd, &other.fd)
            && (self.offset, self.access, self.durability)
                == (other.offset, other.access, other.durability)
    }
}

impl Eq for HostHandle {}

/// An error of a system call on an open file, or on a name in an open directory.
fn refused(error: Errno) -> Refused {
    match error {
        Errno::NOENT => Refused::Missing,
        Errno::EXIST => Refused::Exists,
        Errno::NOTDIR => Refused::NotDirectory,
        Errno::ISDIR => Refused::IsDirectory,
        Errno::NOTEMPTY => Refused::NotEmpty,
        Errno::INVAL => Refused::Invalid,
        Errno::NOSPC => Refused::Full,
        Errno::FBIG => Refused::TooLarge,
        Errno::NAMETOOLONG => Refused::NameTooLong,
        Errno::LOOP => Refused::Loop,
        Errno::PERM => Refused::NotPermitted,
        Errno::ACCESS => Refused::Denied,
        Errno::BADF => Refused::NotOpen,
        Errno::BUSY => Refused::Busy,
        Errno::MLINK => Refused::TooManyLinks,
        error => Refused::Host(error),
    }
}

/// An error of following a path: one that leads out is not permitted.
fn refused_path(error: Errno) -> Refused {
    match error {
        Errno::XDEV => Refused::NotPermitted,
        Errno::AGAIN => Refused::Busy,
        error => refused(error),
    }
}

/// Repeats a system call that a signal has interrupted.
fn whole<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Opens a path below a directory.
fn resolve(from: impl AsFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let mode = match flags.contains(OFlags::CREATE) {
        true => Mode::from_raw_mode(0o666),
        false => Mode::empty(),
    };
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let mut result = Err(Errno::AGAIN);
    for _ in 0..ATTEMPTS {
        result = whole(|| openat2(from.as_fd(), path, flags | OFlags::CLOEXEC, mode, how));
        // The kernel gives up on `..` where a directory is moved at the same time.
        if !matches!(result, Err(Errno::AGAIN)) {
            break;
        }
    }
    result
}

fn timestamps(accessed: Option<Time>, modified: Option<Time>) -> Timestamps {
    let one = |time: Option<Time>| match time {
        Some(time) => Timespec { tv_sec: time.seconds, tv_nsec: i64::from(time.nanos) },
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
    };
    Timestamps { last_access: one(accessed), last_modification: one(modified) }
}

impl HostHandle {
    /// The handle of a host directory that a guest is granted, for reading or also for writing.
    ///
    /// # Errors
    /// That of the host; one of kind `Unsupported` on a host without `openat2`.
    pub fn grant(path: &Path, writable: bool) -> std::io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = CountedFd::open(|| whole(|| openat(CWD, path, flags, Mode::empty())))?;
        match resolve(&fd, b".", OFlags::PATH) {
            Ok(_) => {}
            Err(Errno::NOSYS | Errno::PERM) => {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::Unsupported,
                    "this host has no `openat2` (Linux 5.6), which keeps the paths of a guest in the directory; use a newer \
                     kernel, or allow the call in the seccomp profile",
                ));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(Self::new(fd, true, writable, Access::reading()))
    }

    fn new(fd: CountedFd, directory: bool, writable: bool, access: Access) -> Self {
        let durability = Durability::default();
        let fd = Arc::new(fd);
        Self { fd, reader: None, directory, writable, offset: 0, access, durability }
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.directory
    }

    /// Whether it was granted for writing.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The descriptor that paths start from.
    fn top(&self) -> Result<BorrowedFd<'_>, Refused> {
        match self.directory {
            true => Ok(self.fd.as_fd()),
            false => Err(Refused::NotDirectory),
        }
    }

    fn check_writable(&self) -> Result<(), Refused> {
        if self.writable { Ok(()) } else { Err(Refused::NotPermitted) }
    }

    /// The file at a path, without opening it.
    fn look(&self, path: &[u8], follow: bool) -> Result<OwnedFd, Refused> {
        let follow = if follow { OFlags::empty() } else { OFlags::NOFOLLOW };
        resolve(self.top()?, path, OFlags::PATH | follow).map_err(refused_path)
    }

    /// Opens or makes the file at a path.
    ///
    /// # Errors
    /// [`Refused::NotPermitted`] for a path that leads out, for a change in a directory that is
    /// granted for reading, and for anything but a regular file or directory; [`Refused::Loop`] for
    /// a link that is not followed; the host's errors.
    pub fn open(&self, path: &[u8], how: HostOpening) -> Result<Self, Refused> {
        let HostOpening { access, follow, create, exclusive, truncate, directory } = how;
        let changes = access.write || create || truncate;
        if changes {
            self.check_writable()?;
        }
        for _ in 0..ATTEMPTS {
            let exists = if create && exclusive {
                false
            } else {
                // A device would act when it is opened, and a pipe wait.
                match self.look(path, follow) {
                    Ok(found) => {
                        let stat = HostStat::from(rustix::fs::fstat(&found).map_err(refused)?);
                        match stat.kind {
                            HostKind::Link => return Err(Refused::Loop),
                            HostKind::Directory if changes => return Err(Refused::IsDirectory),
                            HostKind::Directory => {
                                let fd = CountedFd::open(|| Ok(found)).map_err(refused)?;
                                let access = Access::reading();
                                return Ok(Self::new(fd, true, self.writable, access));
                            }
                            _ if directory => return Err(Refused::NotDirectory),
                            HostKind::File => true,
                            _ => return Err(Refused::NotPermitted),
                        }
                    }
                    Err(Refused::Missing) if create => false,
                    Err(error) => return Err(error),
                }
            };
            let mut flags = OFlags::NONBLOCK | OFlags::NOCTTY;
            flags |= match (access.read, access.write || truncate) {
                (_, false) => OFlags::RDONLY,
                (false, true) => OFlags::WRONLY,
                (true, true) => OFlags::RDWR,
            };
            if !follow {
                flags |= OFlags::NOFOLLOW;
            }
            if create && exclusive {
                flags |= OFlags::CREATE | OFlags::EXCL;
            } else if !exists {
                flags |= OFlags::CREATE;
            }
            let top = self.top()?;
            let opened = CountedFd::open(|| resolve(top, path, flags)).map_err(refused_path);
            let fd = match opened {
                Ok(fd) => fd,
                // It went after it was found.
                Err(Refused::Missing) if create && exists => continue,
                Err(error) => return Err(error),
            };
            // Another file may have taken its place.
            match HostStat::from(rustix::fs::fstat(&fd).map_err(refused)?).kind {
                HostKind::File => {}
                _ => continue,
            }
            if truncate {
                whole(|| rustix::fs::ftruncate(&fd, 0)).map_err(refused)?;
            }
            return Ok(Self::new(fd, false, self.writable, access));
        }
        Err(Refused::Busy)
    }

    /// The result of `stat`.
    ///
    /// # Errors
    /// Those of the host.
    pub fn stat(&self) -> Result<HostStat, Refused> {
        Ok(rustix::fs::fstat(&self.fd).map_err(refused)?.into())
    }

    /// The result of `stat` for a path.
    ///
    /// # Errors
    /// [`Refused::NotPermitted`] for a path that leads out; the host's errors.
    pub fn stat_at(&self, path: &[u8], follow: bool) -> Result<HostStat, Refused> {
        Ok(rustix::fs::fstat(self.look(path, follow)?).map_err(refused)?.into())
    }

    /// The target of the symbolic link at a path.
    ///
    /// # Errors
    /// [`Refused::Invalid`] for any other file; as [`HostHandle::stat_at`].
    pub fn read_link(&self, path: &[u8]) -> Result<Vec<u8>, Refused> {
        let link = self.look(path, false)?;
        let stat = HostStat::from(rustix::fs::fstat(&link).map_err(refused)?);
        if stat.kind != HostKind::Link {
            return Err(Refused::Invalid);
        }
        let target = rustix::fs::readlinkat(&link, "", Vec::new()).map_err(refused)?;
        Ok(target.into_bytes())
    }

    /// Sets the time of the last access, of the last change of content, or both.
    ///
    /// # Errors
    /// [`Refused::NotPermitted`] in a directory that is granted for reading; the host's errors.
    pub fn set_times(&self, accessed: Option<Time>, modified: Option<Time>) -> Result<(), Refused> {
        self.check_writable()?;
        let times = timestamps(accessed, modified);
        rustix::fs::utimensat(&self.fd, "", &times, AtFlags::EMPTY_PATH).map_err(refused)
    }

    /// As [`HostHandle::set_times`], of the file at a path.
    ///
    /// # Errors
    /// As [`HostHandle::set_times`] and [`HostHandle::stat_at`].
    pub fn set_times_at(
        &self,
        path: &[u8],
        follow: bool,
        accessed: Option<Time>,
        modified: Option<Time>,
    ) -> Result<(), Refused> {
        self.check_writable()?;
        let (found, times) = (self.look(path, follow)?, timestamps(accessed, modified));
        rustix::fs::utimensat(&found, "", &times, AtFlags::EMPTY_PATH).map_err(refused)
    }

    /// Makes a file shorter, or longer with a hole at its end. The caller checks the access of the
    /// handle.
    ///
    /// # Errors
    /// [`Refused::TooLarge`] beyond the limit of files of this process; the host's errors.
    pub fn set_size(&self, size: u64) -> Result<(), Refused> {
        extend(|limit| self.resize(size, limit))
    }

    fn resize(&self, size: u64, limit: u64) -> Result<(), Refused> {
        if size > limit.min(i64::MAX as u64) {
            return Err(Refused::TooLarge);
        }
        whole(|| rustix::fs::ftruncate(&self.fd, size)).map_err(refused)
    }

    /// Reserves room for a range of a file, which it is extended to contain.
    ///
    /// # Errors
    /// [`Refused::NotOpen`]; as [`HostHandle::set_size`].
    pub fn allocate(&self, offset: u64, len: u64) -> Result<(), Refused> {
        if !self.access.write {
            return Err(Refused::NotOpen);
        }
        let end = offset.checked_add(len).filter(|end| *end <= i64::MAX as u64);
        let end = end.ok_or(Refused::TooLarge)?;
        let allocate =
            || whole(|| rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), offset, len));
        extend(|limit| match if end > limit { Err(Errno::FBIG) } else { allocate() } {
            Err(Errno::OPNOTSUPP) if end > self.stat()?.size => self.resize(end, limit),
            Err(Errno::OPNOTSUPP) => Ok(()),
            result => result.map_err(refused),
        })
    }

    /// Reads at a position.
    ///
    /// # Errors
    /// [`Refused::NotOpen`]; the host's errors.
    pub fn read_at(&self, at: u64, out: &mut [u8]) -> Result<usize, Refused> {
        match (self.directory, self.access.read) {
            (true, _) => return Err(Refused::IsDirectory),
            (false, false) => return Err(Refused::NotOpen),
            (false, true) => {}
        }
        if at > i64::MAX as u64 {
            return Err(Refused::Invalid);
        }
        let read = || {
            let mut part = [IoSliceMut::new(out)];
            rustix::io::preadv2(&self.fd, &mut part, at, ReadWriteFlags::empty())
        };
        whole(read).map_err(refused)
    }

    /// Reads at the position of the handle, and advances it by the same number of bytes.
    ///
    /// # Errors
    /// As [`HostHandle::read_at`].
    pub fn read(&mut self, out: &mut [u8]) -> Result<usize, Refused> {
        let len = self.read_at(self.offset, out)?;
        self.offset += len as u64;
        Ok(len)
    }

    /// Writes at a position; in a file that is appended to, at its end. At the limit of files of
    /// this process it writes only a part.
    ///
    /// # Errors
    /// [`Refused::NotOpen`]; [`Refused::TooLarge`] at the limit of files; the host's errors.
    pub fn write_at(&self, at: u64, bytes: &[u8]) -> Result<usize, Refused> {
        if !self.access.write {
            return Err(Refused::NotOpen);
        }
        let end = at.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > i64::MAX as u64) {
            return Err(Refused::TooLarge);
        }
        let mut flags = match self.durability {
            Durability::Later => ReadWriteFlags::empty(),
            Durability::Data => ReadWriteFlags::DSYNC,
            Durability::All => ReadWriteFlags::SYNC,
        };
        if self.access.append {
            flags |= ReadWriteFlags::APPEND;
        }
        extend(|limit| {
            let mut bytes = bytes;
            if limit < u64::MAX && !bytes.is_empty() {
                let at = if self.access.append { self.stat()?.size } else { at };
                let room = limit.checked_sub(at).filter(|room| *room > 0);
                let room = room.ok_or(Refused::TooLarge)?;
                bytes = &bytes[..room.min(bytes.len() as u64) as usize];
            }
            let write = || rustix::io::pwritev2(&self.fd, &[IoSlice::new(bytes)], at, flags);
            whole(write).map_err(refused)
        })
    }

    /// Writes at the position of the handle, or at the end if the file is appended to, and advances
    /// the position.
    ///
    /// # Errors
    /// As [`HostHandle::write_at`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, Refused> {
        let len = self.write_at(self.offset, bytes)?;
        self.offset = match self.access.append {
            // Others may have appended before it.
            true => self.stat()?.size,
            false => self.offset + len as u64,
        };
        Ok(len)
    }

    /// Moves the position, which may be beyond the end.
    ///
    /// # Errors
    /// [`Refused::Invalid`] for a position before the beginning, and for holes.
    pub fn seek(&mut self, whence: Whence, by: i64) -> Result<u64, Refused> {
        let base = match whence {
            Whence::Start => 0,
            Whence::Current => self.offset,
            Whence::End => self.stat()?.size,
            Whence::Data | Whence::Hole => return Err(Refused::Invalid),
        };
        let at = base.checked_add_signed(by).filter(|at| *at <= i64::MAX as u64);
        self.offset = at.ok_or(Refused::Invalid)?;
        Ok(self.offset)
    }

    /// Returns when bytes and attributes are on the disk, or with `data` the bytes.
    ///
    /// # Errors
    /// Those of the host.
    pub fn sync(&self, data: bool) -> Result<(), Refused> {
        let sync = |fd: BorrowedFd<'_>| match data {
            true => whole(|| rustix::fs::fdatasync(fd)),
            false => whole(|| rustix::fs::fsync(fd)),
        };
        match self.directory {
            true => sync(self.readable()?.as_fd()),
            false => sync(self.fd.as_fd()),
        }
        .map_err(refused)
    }

    /// A descriptor of the directory that it can be read with.
    fn readable(&self) -> Result<CountedFd, Refused> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let top = self.top()?;
        CountedFd::open(|| resolve(top, b".", flags)).map_err(refused_path)
    }
}
