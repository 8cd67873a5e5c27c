//! Inode numbers of host files, as guests see them.
//!
//! git stores the number of a file, and reads the file again when the number differs. So a host
//! file has the low 32 bits of its number on the host, which are those that git stores.
//!
//! Promises: two files of a directory tree have one number only if both are names of the same host
//! file and the guest has changed neither. A number that a guest has seen stays, except that a name
//! of a file with several gets another number when the guest changes it, as on overlayfs.
//!
//! May break it: entries that were listed and not looked up have the number of the list, which
//! differs from that of the file at a mount point.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use rustix::fs::{FileType, Stat};
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

/// The owner of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    HostFile {
        device: u64,
        inode: u64,
        /// Whether it had several names.
        linked: bool,
    },
    Path(Node),
}

/// The numbers of a directory tree that are in use.
#[derive(Debug, Default)]
pub(super) struct InodeNumbers(HashMap<u64, Owner>);

/// The number of a file.
#[derive(Clone, Copy, Debug)]
pub(super) enum FileNumber {
    /// That of the list of its directory.
    Listed(u64),
    /// That of the file, and whether other names have it.
    Settled { number: u64, linked: bool },
}

impl InodeNumbers {
    /// Takes `number` for `owner`, unless another has it.
    fn claim(&mut self, number: u64, owner: Owner) -> bool {
        match self.0.entry(number) {
            Entry::Vacant(entry) => {
                entry.insert(owner);
                true
            }
            Entry::Occupied(entry) => {
                let shared = !matches!(owner, Owner::HostFile { linked: false, .. });
                shared && *entry.get() == owner
            }
        }
    }

    /// The number of a path, which no other file has.
    fn of_path(&mut self, node: Node) -> u64 {
        let mut number = node.0 | BY_PATH;
        while !self.claim(number, Owner::Path(node)) {
            number = number & (LAYER | BY_PATH) | number.wrapping_add(1) & (BY_PATH - 1);
        }
        number
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
        if !matches!(here.number, Some(FileNumber::Settled { .. })) {
            here.number = Some(self.settled(node, stat));
        }
    }

    fn settled(&self, node: Node, stat: &Stat) -> FileNumber {
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let (device, inode, linked) =
            (stat.st_dev, stat.st_ino, stat.st_nlink > 1 && !is_directory);
        let candidate = self.candidate(device, inode);
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        match numbers.claim(candidate, Owner::HostFile { device, inode, linked }) {
            true => FileNumber::Settled { number: candidate, linked },
            false => FileNumber::Settled { number: numbers.of_path(node), linked: false },
        }
    }

    /// The inode number of a file that is known, which a tree has `changed` or not.
    pub(crate) fn inode_number(&self, node: Node, changed: bool) -> u64 {
        if self.is_numbered_by_path() {
            return node.0;
        }
        let known = self.lock_entries();
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        match known.get(&node).and_then(|here| here.number) {
            Some(FileNumber::Settled { number, linked }) if !linked || !changed => number,
            Some(FileNumber::Listed(number))
                if !matches!(numbers.0.get(&number), Some(Owner::Path(_))) =>
            {
                number
            }
            Some(FileNumber::Settled { .. }) => numbers.of_path(node),
            _ => node.0 | BY_PATH,
        }
    }

    /// The inode number of a file that was looked up, for a saved tree.
    pub(crate) fn lasting_number(&self, node: Node, changed: bool) -> Option<u64> {
        let is_settled = {
            let known = self.lock_entries();
            matches!(known.get(&node)?.number, Some(FileNumber::Settled { .. }))
        };
        let is_lasting = is_settled && !self.is_numbered_by_path();
        is_lasting.then(|| self.inode_number(node, changed))
    }

    /// Gives a file of a saved tree the number that it had. A file that has a number keeps it, and
    /// so does another one with this number.
    pub(crate) fn restore_number(
        &self,
        node: Node,
        number: u64,
        changed: bool,
    ) -> Result<(), Refused> {
        if number & (LAYER | 1 << 63) != HOST | u64::from(self.number) << 48 {
            return Err(Refused::Invalid);
        }
        let path = self.path(node)?;
        let stat = self.stat_at(&path).ok().map(|(_, stat)| stat);
        let unchanged = stat.filter(|stat| {
            !changed && number & BY_PATH == 0 && self.candidate(stat.st_dev, stat.st_ino) == number
        });
        let mut known = self.lock_entries();
        let here = known.get_mut(&node).ok_or(Refused::Missing)?;
        if matches!(here.number, Some(FileNumber::Settled { .. })) {
            return Ok(());
        }
        if let Some(stat) = unchanged {
            here.number = Some(self.settled(node, &stat));
            return Ok(());
        }
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        if numbers.claim(number, Owner::Path(node)) {
            here.number = Some(FileNumber::Settled { number, linked: false });
        }
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
