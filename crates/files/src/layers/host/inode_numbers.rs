//! Inode numbers of host files, as guests see them.
//!
//! git stores the number of a file, and reads the file again when the number differs. So a host
//! file has the low 32 bits of its number on the host, which are those that git stores.
//!
//! Promises: no two files of a directory tree have one number, hard links of the host included:
//! programs take files with one number for the same bytes, and the host or the guest may replace
//! one of them. A number that a guest has seen stays in the guest and its relatives, and in
//! snapshots if the file is changed or open.
//!
//! A file has a number that follows from its path if another file had its number first. So a second
//! hard link has one, and a file that was renamed on the host after it was seen.
//!
//! May break it: in a restored guest such two files have their numbers in the order in which they
//! are seen again, and files that a live relative has seen keep its numbers. A mount point that is
//! listed first has the number of the directory below the mount.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};

use crate::nodes::node::Node;

/// The bit of numbers that follow from a path and not from a number of the host.
const BY_PATH: u64 = 1 << 47;
/// The bits of a number that are the layer's.
const LAYER: u64 = 0x7fff << 48;
/// Groups of host files with the same device and high half of the number.
const GROUPS: u64 = 1 << 15;

/// The number of a file.
#[derive(Clone, Copy, Debug)]
pub(super) enum FileNumber {
    /// The one that the list of its directory has. Another file may have taken it.
    Listed(u64),
    /// Its own, which it keeps.
    Settled(u64),
}

impl FileNumber {
    pub(super) fn settled(self) -> Option<u64> {
        match self {
            Self::Settled(number) => Some(number),
            Self::Listed(_) => None,
        }
    }
}

/// The numbers of the files below a host directory.
#[derive(Debug)]
pub(super) struct InodeNumbers {
    /// The bits of all numbers.
    layer: u64,
    /// The device of the directory.
    device: u64,
    /// Whether all files are numbered by their paths.
    by_path: AtomicBool,
    /// The numbers that guests have seen, with their files.
    owners: Mutex<HashMap<u64, Node>>,
}

impl InodeNumbers {
    /// For a directory on this device, of a layer with these bits.
    pub(super) fn new(layer: u64, device: u64) -> Self {
        let (by_path, owners) = (AtomicBool::new(false), Mutex::default());
        Self { layer, device, by_path, owners }
    }

    /// The number that a file of the host has, unless another file has it.
    pub(super) fn candidate(&self, device: u64, inode: u64) -> u64 {
        let high = inode >> 32;
        let group = match device == self.device && high == 0 {
            true => 0,
            false => {
                let digest = Sha256::digest([device.to_le_bytes(), high.to_le_bytes()].concat());
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&digest[..8]);
                1 + u64::from_le_bytes(bytes) % (GROUPS - 1)
            }
        };
        self.layer | group << 32 | inode & u64::from(u32::MAX)
    }

    /// The number of a file. If it is not settled yet, it will be `candidate`, or a number that
    /// follows from the path if another file has the candidate or there is no candidate.
    pub(super) fn settle(
        &self,
        node: Node,
        number: &mut Option<FileNumber>,
        candidate: impl FnOnce() -> Option<u64>,
    ) -> u64 {
        if let Some(FileNumber::Settled(number)) = *number {
            return number;
        }
        let candidate = candidate();
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let mut claim = |number: u64| match owners.entry(number) {
            Entry::Vacant(entry) => {
                entry.insert(node);
                true
            }
            Entry::Occupied(entry) => *entry.get() == node,
        };
        let taken = candidate.filter(|candidate| claim(*candidate)).unwrap_or_else(|| {
            let mut number = node.0 | BY_PATH;
            while !claim(number) {
                number = number & (LAYER | BY_PATH) | number.wrapping_add(1) & (BY_PATH - 1);
            }
            number
        });
        *number = Some(FileNumber::Settled(taken));
        taken
    }

    /// Whether a file of the layer can have this number.
    pub(super) fn is_valid(&self, number: u64) -> bool {
        number & (LAYER | 1 << 63) == self.layer
    }

    /// Has all files numbered by their paths.
    pub(super) fn follow_paths(&self) {
        self.by_path.store(true, Ordering::Relaxed);
    }

    pub(super) fn are_by_path(&self) -> bool {
        self.by_path.load(Ordering::Relaxed)
    }
}
