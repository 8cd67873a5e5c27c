//! Values of the functions of [`HostHandle`](crate::HostHandle).

use crate::nodes::node::Times;
use crate::trees::open::Access;

/// The kind of a host file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostKind {
    /// Bytes.
    File,
    /// Names of other files.
    Directory,
    /// A symbolic link.
    Link,
    /// A character device, which cannot be opened.
    CharacterDevice,
    /// A block device, which cannot be opened.
    BlockDevice,
    /// A pipe with a name, which cannot be opened.
    Fifo,
    /// A socket with a name, which cannot be opened.
    Socket,
    /// The file system does not report it.
    Unknown,
}

/// The result of `stat` for a host file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostStat {
    /// The number of its file system.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// Its kind.
    pub kind: HostKind,
    /// Its names.
    pub links: u64,
    /// Bytes of content.
    pub size: u64,
    /// Its times.
    pub times: Times,
}

/// Options of opening a host file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostOpening {
    /// The access rights of the handle.
    pub access: Access,
    /// Whether a last name that is a symbolic link is followed.
    pub follow: bool,
    /// Whether a missing file is made.
    pub create: bool,
    /// Whether an existing file is refused, if missing ones are made.
    pub exclusive: bool,
    /// Whether all bytes are removed.
    pub truncate: bool,
    /// Whether anything but a directory is refused.
    pub directory: bool,
}

/// When written bytes are on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// After a while, or after [`HostHandle::sync`](crate::HostHandle::sync).
    #[default]
    Later,
    /// When a write returns.
    Data,
    /// When a write returns, attributes included.
    All,
}

/// An entry of a host directory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostEntry {
    /// The position after it.
    pub next: u64,
    /// Its name.
    pub name: Vec<u8>,
    /// The number of the file. That of `..` is 0: it may be outside the granted directory.
    pub inode: u64,
    /// Its kind.
    pub kind: HostKind,
}
