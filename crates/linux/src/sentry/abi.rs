//! The kernel's structures, written byte by byte. Those that depend on the processor are in a file
//! for each.

use afresh_files::{Kind, Node, Refused, Time, Tree};

use rustix::io::Errno;

use crate::sentry::fs::mounts::FileSystem;
use crate::sentry::fs::special_files::type_of;
use crate::sentry::kernel::signals::{SignalAction, SignalInfo};

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

/// The parts of a handler's frame that are no registers of the thread.
pub(in crate::sentry) struct HandlerFrame<'a> {
    pub(in crate::sentry) info: &'a SignalInfo,
    pub(in crate::sentry) action: &'a SignalAction,
    /// The signal mask after the handler.
    pub(in crate::sentry) mask: u64,
    /// The alternate stack: address, flags, length.
    pub(in crate::sentry) stack: [u64; 3],
}

/// The parts of a frame that a thread returns to and that are no registers.
pub(in crate::sentry) struct ReturnedState {
    pub(in crate::sentry) mask: u64,
    pub(in crate::sentry) stack: [u64; 3],
}

/// The part of the registers from a tracer that is about a call.
pub(in crate::sentry) struct GivenRegisters {
    /// The number of the call; negative for none.
    pub(in crate::sentry) original: i64,
    pub(in crate::sentry) result: i64,
}

/// The status of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileStatus {
    pub(crate) inode: u64,
    /// With the type of the file.
    pub(crate) mode: u32,
    pub(crate) links: u64,
    pub(crate) size: u64,
    /// Bytes that are stored.
    pub(crate) stored: u64,
    pub(crate) device: u64,
    pub(crate) modified: Time,
    pub(crate) accessed: Time,
    pub(crate) changed: Time,
    /// Recorded user and group.
    pub(crate) owner: Option<[u32; 2]>,
    /// The file system that it is in.
    pub(crate) system: FileSystem,
}

impl FileStatus {
    /// That of a file of a tree.
    pub(crate) fn of(tree: &Tree, node: Node) -> Result<Self, Refused> {
        Self::within(tree, node, FileSystem::of(tree, node))
    }

    /// That of a file that was found in a directory.
    pub(crate) fn of_entry(tree: &Tree, node: Node, above: Node) -> Result<Self, Refused> {
        let status = Self::within(tree, node, FileSystem::Root)?;
        let is_directory = status.mode & libc::S_IFMT == libc::S_IFDIR;
        let directory = if is_directory { node } else { above };
        Ok(Self { system: FileSystem::of_directory(tree, directory), ..status })
    }

    /// That of a file of a tree, in a file system.
    pub(crate) fn within(tree: &Tree, node: Node, system: FileSystem) -> Result<Self, Refused> {
        let stat = tree.stat(node)?;
        let kind = type_of(stat.kind, stat.device);
        let is_device = stat.kind == Kind::Device && kind == Kind::Device.mode();
        Ok(Self {
            inode: tree.inode_number(node),
            mode: kind | stat.mode,
            links: stat.links.into(),
            size: stat.size,
            stored: stat.stored,
            device: if is_device { stat.device } else { 0 },
            modified: stat.times.modified,
            accessed: stat.times.accessed,
            changed: stat.times.changed,
            owner: stat.owner,
            system,
        })
    }
}

/// Little-endian bytes, one field after the other.
#[derive(Default)]
pub(crate) struct StructBuilder(pub(crate) Vec<u8>);

impl StructBuilder {
    pub(crate) fn half(mut self, value: u16) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn int(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn word(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn zeros(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }
}

/// Maximum bytes of directory entries in one call.
const MAX_DIRECTORY_BYTES: u64 = 1 << 16;

/// `struct linux_dirent64` or the older `struct linux_dirent`, as many as fit into the buffer of a
/// caller.
pub(crate) struct DirectoryEntries {
    pub(crate) bytes: StructBuilder,
    limit: usize,
    older: bool,
}

impl DirectoryEntries {
    /// For a buffer of `len` bytes.
    pub(crate) fn new(len: u64, older: bool) -> Self {
        let limit = len.min(MAX_DIRECTORY_BYTES) as usize;
        Self { bytes: StructBuilder::default(), limit, older }
    }

    /// Appends an entry with its file type, and the position after it. Returns whether there was
    /// room.
    ///
    /// # Errors
    /// `EINVAL` if there is no room for the first entry.
    pub(crate) fn push(
        &mut self,
        inode: u64,
        next: u64,
        mode: u32,
        name: &[u8],
    ) -> Result<bool, Errno> {
        let before = self.bytes.0.len();
        let length = (19 + name.len() + 1).next_multiple_of(8);
        if before + length > self.limit {
            return if before == 0 { Err(Errno::INVAL) } else { Ok(false) };
        }
        let mut bytes = std::mem::take(&mut self.bytes).word(inode).word(next).half(length as u16);
        let kind = (mode >> 12) as u8;
        if !self.older {
            bytes.0.push(kind);
        }
        bytes.0.extend(name);
        bytes.0.resize(before + length, 0);
        // The older structure has the type behind the name, at its end.
        if let (true, Some(last)) = (self.older, bytes.0.last_mut()) {
            *last = kind;
        }
        self.bytes = bytes;
        Ok(true)
    }
}

/// `struct statx` of a file of this user and group, with the mount that `mask` asks for.
pub(crate) fn statx(a: &FileStatus, [user, group]: [u32; 2], mask: u32) -> Vec<u8> {
    const BASIC_STATS: u32 = libc::STATX_BASIC_STATS;
    const UNIQUE_MOUNT: u32 = 0x4000;
    let is_unique = mask & UNIQUE_MOUNT != 0;
    let mount = if is_unique { UNIQUE_MOUNT } else { libc::STATX_MNT_ID };
    let time = |bytes: StructBuilder, t: Time| bytes.word(t.seconds as u64).int(t.nanos).int(0);
    let bytes = StructBuilder::default()
        .int(BASIC_STATS | mount)
        .int(4096)
        .word(0)
        .int(a.links as u32)
        .int(user)
        .int(group)
        .half(a.mode as u16)
        .half(0)
        .word(a.inode)
        .word(a.size)
        .word(a.stored.div_ceil(512))
        .word(0);
    let bytes = time(time(time(time(bytes, a.accessed), a.modified), a.changed), a.modified);
    let bytes = bytes.int((a.device >> 8) as u32).int(a.device as u32 & 0xff);
    bytes.int(0).int(a.system.device()).word(a.system.mount_id(is_unique)).zeros(104).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_kernels_sizes() {
        let attributes = FileStatus {
            owner: None,
            system: FileSystem::Proc,
            inode: 7,
            mode: 0o100_644,
            links: 1,
            size: 513,
            device: 0,
            stored: 513,
            modified: Time { seconds: 3, nanos: 4 },
            accessed: Time { seconds: 5, nanos: 6 },
            changed: Time { seconds: 7, nanos: 8 },
        };
        let bytes = stat(&attributes, [1000, 1001]);
        assert_eq!(bytes.len(), size_of::<libc::stat>());
        assert_eq!(bytes[48..56], 513u64.to_le_bytes());
        assert_eq!(bytes[72..80], 5u64.to_le_bytes());
        assert_eq!(bytes[88..96], 3u64.to_le_bytes());
        let offset = std::mem::offset_of!(libc::stat, st_nlink);
        assert_eq!(bytes[offset..offset + 4], 1u32.to_le_bytes());
        assert_eq!(bytes[..8], 2u64.to_le_bytes());
        let bytes = statx(&attributes, [1000, 1001], 0);
        assert_eq!(bytes.len(), size_of::<libc::statx>());
        assert_eq!(bytes[144..152], 2u64.to_le_bytes());
        let unique = statx(&attributes, [1000, 1001], 0x4000);
        assert_eq!(unique[144..152], (2 + (1u64 << 31)).to_le_bytes());
        assert_eq!(bytes[40..48], 513u64.to_le_bytes());
        assert_eq!(bytes[112..120], 3u64.to_le_bytes());
    }
}
