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
//! are seen again.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use rustix::fs::Stat;
use sha2::{Digest, Sha256};

use super::{HOST, HostDirectory, HostEntry};
use crate::error::Refused;
use crate::nodes::node::Node;

/// The bit of numbers that follow from a path and not from a number of the host.
const BY_PATH: u64 = 1 << 47;
/// The bits of a number that are the layer's.
const LAYER: u64 = HOST | 0x3fff << 48;
/// Groups of host files with the same device and high half of the number.
const GROUPS: u64 = 1 << 15;

/// The numbers of a directory tree that guests have seen, with their files.
#[derive(Debug, Default)]
pub(super) struct InodeNumbers(HashMap<u64, Node>);

/// The number of a file.
#[derive(Clone, Copy, Debug)]
pub(super) enum FileNumber {
    /// The one that the list of its directory has. Another file may have taken it.
    Listed(u64),
    /// Its own, which it keeps.
    Settled(u64),
}

impl InodeNumbers {
    /// Takes `number` for a file, unless another one has it.
    fn claim(&mut self, number: u64, node: Node) -> bool {
        match self.0.entry(number) {
            Entry::Vacant(entry) => {
                entry.insert(node);
                true
            }
            Entry::Occupied(entry) => *entry.get() == node,
        }
    }

    /// Takes `candidate` for a file, or a number that follows from its path if another file has the
    /// candidate or there is none.
    fn take(&mut self, candidate: Option<u64>, node: Node) -> FileNumber {
        if let Some(candidate) = candidate
            && self.claim(candidate, node)
        {
            return FileNumber::Settled(candidate);
        }
        let mut number = node.0 | BY_PATH;
        while !self.claim(number, node) {
            number = number & (LAYER | BY_PATH) | number.wrapping_add(1) & (BY_PATH - 1);
        }
        FileNumber::Settled(number)
    }
}

impl HostDirectory {
    /// The number that a file of the host has, unless another file has it.
    pub(super) fn candidate(&self, device: u64, inode: u64) -> u64 {
        let top = || rustix::fs::fstat(&self.root).map_or(0, |stat| stat.st_dev);
        let high = inode >> 32;
        let group = match device == *self.device.get_or_init(top) && high == 0 {
            true => 0,
            false => {
                let digest = Sha256::digest([device.to_le_bytes(), high.to_le_bytes()].concat());
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&digest[..8]);
                1 + u64::from_le_bytes(bytes) % (GROUPS - 1)
            }
        };
        HOST | u64::from(self.number) << 48 | group << 32 | inode & u64::from(u32::MAX)
    }

    /// Settles the number of a file with the attributes `stat`, if that was not done before.
    pub(super) fn settle(&self, node: Node, here: &mut HostEntry, stat: &Stat) {
        let candidate = || Some(self.candidate(stat.st_dev, stat.st_ino));
        self.settled(node, here, candidate);
    }

    /// The number of a file, which is settled with this candidate if it is not yet.
    fn settled(
        &self,
        node: Node,
        here: &mut HostEntry,
        candidate: impl FnOnce() -> Option<u64>,
    ) -> u64 {
        if let Some(FileNumber::Settled(number)) = here.number {
            return number;
        }
        let candidate = candidate();
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = here.number.insert(numbers.take(candidate, node));
        let (FileNumber::Settled(number) | FileNumber::Listed(number)) = *taken;
        number
    }

    /// The inode number of a file that is known.
    pub(crate) fn inode_number(&self, node: Node) -> u64 {
        if self.is_numbered_by_path() {
            return node.0;
        }
        let mut known = self.lock_entries();
        let Some(here) = known.get_mut(&node) else { return node.0 | BY_PATH };
        let listed = match here.number {
            Some(FileNumber::Listed(number)) => Some(number),
            _ => None,
        };
        self.settled(node, here, || listed)
    }

    /// The inode number of a file that a guest has seen, for a saved tree.
    pub(crate) fn lasting_number(&self, node: Node) -> Option<u64> {
        match self.lock_entries().get(&node)?.number? {
            FileNumber::Settled(number) if !self.is_numbered_by_path() => Some(number),
            _ => None,
        }
    }

    /// Gives a file of a saved tree the number that it had. A file that has a number keeps it, and
    /// so does another one with this number.
    pub(crate) fn restore_number(&self, node: Node, number: u64) -> Result<(), Refused> {
        if number & (LAYER | 1 << 63) != HOST | u64::from(self.number) << 48 {
            return Err(Refused::Invalid);
        }
        let mut known = self.lock_entries();
        let here = known.get_mut(&node).ok_or(Refused::Missing)?;
        self.settled(node, here, || Some(number));
        Ok(())
    }

    /// Has all files numbered by their paths, as in trees that were saved before numbers followed
    /// those of the host.
    pub(crate) fn number_by_path(&self) {
        self.numbers_by_path.store(true, Ordering::Relaxed);
    }

    /// Whether all files are numbered by their paths.
    pub(crate) fn is_numbered_by_path(&self) -> bool {
        self.numbers_by_path.load(Ordering::Relaxed)
    }
}
