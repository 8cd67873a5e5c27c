//! The items of an archive, and the limits on them.

use crate::nodes::node::Time;

/// Limits of archive contents, checked before use. For those from strangers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerLimits {
    /// Bytes, unpacked.
    pub bytes: u64,
    /// Files, directories and links.
    pub files: u64,
}

impl Default for LayerLimits {
    /// 8 GiB in a million files.
    fn default() -> Self {
        Self { bytes: 8 << 30, files: 1 << 20 }
    }
}

/// One item of an archive: the file at a path, or its removal.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) path: Vec<u8>,
    pub(crate) what: EntryKind,
    pub(crate) mode: u32,
    pub(crate) time: Time,
}

impl Item {
    /// Its length.
    pub(crate) fn bytes(&self) -> u64 {
        if let EntryKind::File(_, bytes) = self.what { bytes } else { 0 }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum EntryKind {
    /// By number in the archive, and how long it is.
    File(u32, u64),
    Directory,
    Link(Vec<u8>),
    /// A hard link to a path of this archive or of one below it.
    Same(Vec<u8>),
    /// A device or a pipe, which is not shown. It replaces the file that layers below have there.
    Skipped,
    /// Removes the file or the directory that layers below have there.
    Gone,
    /// Removes the entries that layers below have in this directory.
    Empty,
}

/// The names of a path in a layer.
pub(crate) fn names_of(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|b| *b == b'/').filter(|name| !name.is_empty() && *name != b".")
}
