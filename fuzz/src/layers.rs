//! Limits of the targets that read archives, and the memory that a reader may take for them.

use afresh_budget::meter::within;
use afresh_files::{Kind, LayerLimits, Tree};

/// Limits on the content of an archive or an image.
pub const LIMITS: LayerLimits = LayerLimits { bytes: 1 << 20, files: 512 };
/// Bytes of memory for a byte of the archive: a descriptor in a list takes 30 for each.
const EACH: usize = 64;
/// Memory for each file: the nodes of a tree, with tables that grow by doubling.
const FILE: usize = 4 << 10;
/// Memory for buffers.
const OVERHEAD: usize = 1 << 20;
/// Files that are read.
const FILES: usize = 8;

/// Memory to open an archive of `bytes` bytes and to make a tree over it.
#[must_use]
pub const fn memory(bytes: usize) -> usize {
    bytes * EACH + LIMITS.files as usize * FILE + OVERHEAD
}

/// Reads a few files of `tree`. One that is packed is unpacked within the limit on bytes.
pub fn read_files(tree: &Tree) {
    let Ok(listed) = tree.list_path("/") else { return };
    for entry in listed.iter().filter(|entry| entry.kind == Kind::File).take(FILES) {
        if let Ok(name) = str::from_utf8(&entry.name) {
            // A list of bytes that grows takes three times its length.
            let most = 4 * LIMITS.bytes as usize + OVERHEAD;
            let _ = within(most, || tree.read_path(name, LIMITS.bytes));
        }
    }
}
