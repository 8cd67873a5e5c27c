//! The bytes of a file that a mapping shows.

use std::ops::Range;

use afresh_files::Node;
use serde::{Deserialize, Serialize};

/// Which bytes a shared mapping shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileBacking {
    pub(crate) node: Node,
    /// The offset in the file of the first address: the same for every part of a mapping.
    pub(crate) ahead: u64,
}

impl FileBacking {
    pub(crate) fn new(node: Node, start: u64, offset: u64) -> Self {
        Self { node, ahead: offset.wrapping_sub(start) }
    }

    /// The offset in the file of the byte at an address.
    pub(crate) fn offset(self, address: u64) -> u64 {
        address.wrapping_add(self.ahead)
    }
}

/// A part of memory that is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SharedMapping {
    pub(crate) range: Range<u64>,
    pub(crate) share: FileBacking,
    pub(crate) protection: u64,
}
