//! Segments of shared memory that have keys and numbers in place of names (`shmget`, of System V).
//!
//! A segment is a file without a name, and attaching it maps that, so that its memory is shared,
//! reset and saved as all shared memory is.
//!
//! Promises: a segment lasts until it is removed and no process has it attached; the mappings are
//! the attachments.

mod calls;

use std::collections::{BTreeMap, BTreeSet};

use afresh_files::{Node, Tree};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::sentry::abi::StructBuilder;
use crate::sentry::mm::layout::{MAX_RESERVED, PAGE};

/// Segments that there may be.
pub(in crate::sentry) const MAX_SEGMENTS: usize = 4096;

/// Maximum bytes of one, as Linux has it. A guest's memory limit comes first.
pub(in crate::sentry) const MAX_SEGMENT_SIZE: u64 = u64::MAX - (1 << 24);

/// Mode bit of `shmctl` for a segment that is removed but attached.
const REMOVED: u32 = 0o1000;

/// Mode bit for one that is locked.
const LOCKED: u32 = 0o2000;

/// A segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct SharedSegment {
    /// Key 0 finds no segment.
    pub(in crate::sentry) key: u32,
    pub(in crate::sentry) node: Node,
    pub(in crate::sentry) size: u64,
    mode: u32,
    removed: bool,
    /// The processes that made it, and that attached or detached it last.
    pub(in crate::sentry) maker: u32,
    pub(in crate::sentry) last: u32,
    /// When it was attached, detached and changed, in seconds.
    pub(in crate::sentry) times: [i64; 3],
    /// Whether it is locked (`SHM_LOCK`). A snapshot has the locks behind its older parts.
    #[serde(skip)]
    locked: bool,
}

/// All segments of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedSegments {
    list: BTreeMap<u32, SharedSegment>,
    next: u32,
}

impl SharedSegments {
    /// The highest number in use, and the numbers of segments and bytes.
    pub(in crate::sentry) fn totals(&self) -> (Option<u32>, usize, u64) {
        let bytes = self.list.values().map(|segment| segment.size.next_multiple_of(PAGE)).sum();
        (self.list.keys().next_back().copied(), self.list.len(), bytes)
    }

    fn get(&self, id: u64) -> Result<&SharedSegment, Errno> {
        self.list.get(&(id as u32)).ok_or(Errno::INVAL)
    }

    fn keyed(&self, key: u32) -> Option<(u32, &SharedSegment)> {
        let mut live = self.list.iter().filter(|(_, s)| s.key == key && !s.removed);
        if key == 0 { None } else { live.next().map(|(id, segment)| (*id, segment)) }
    }

    /// All segments by their numbers.
    pub(in crate::sentry) fn listed(&self) -> impl Iterator<Item = (u32, &SharedSegment)> {
        self.list.iter().map(|(id, segment)| (*id, segment))
    }

    /// The numbers of locked segments, as a snapshot stores them.
    pub(in crate::sentry) fn packed_locks(&self) -> Vec<u32> {
        self.listed().filter(|(_, segment)| segment.locked).map(|(id, _)| id).collect()
    }

    /// Locks the segments of a snapshot. Returns whether all of them exist.
    pub(in crate::sentry) fn unpack_locks(&mut self, locked: &[u32]) -> bool {
        locked.iter().all(|id| self.list.get_mut(id).map(|segment| segment.locked = true).is_some())
    }

    /// Whether a file is that of a segment which is removed.
    pub(in crate::sentry) fn is_removed(&self, node: Node) -> bool {
        self.list.values().any(|segment| segment.node == node && segment.removed)
    }

    pub(in crate::sentry) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Whether a guest could have made them; `is_file` knows the files.
    pub(in crate::sentry) fn is_sound(&self, is_file: impl Fn(Node) -> bool) -> bool {
        let sound = |(id, segment): (&u32, &SharedSegment)| {
            let sized = (1..=MAX_RESERVED).contains(&segment.size);
            *id < self.next && segment.mode & !0o777 == 0 && sized && is_file(segment.node)
        };
        self.list.len() <= MAX_SEGMENTS && self.list.iter().all(sound)
    }

    /// Drops those that are removed and not among the `mapped`, and releases their files.
    pub(in crate::sentry) fn drop_unmapped(&mut self, mapped: &BTreeSet<Node>, tree: &mut Tree) {
        self.list.retain(|_, segment| {
            let lasts = !segment.removed || mapped.contains(&segment.node);
            if !lasts {
                tree.release(segment.node);
            }
            lasts
        });
    }
}

impl SharedSegment {
    /// Permissions, and whether it is removed or locked.
    pub(in crate::sentry) fn mode_bits(&self) -> u32 {
        let bit = |has: bool, bit: u32| if has { bit } else { 0 };
        self.mode | bit(self.removed, REMOVED) | bit(self.locked, LOCKED)
    }

    /// Bytes in whole pages. All are resident.
    pub(in crate::sentry) fn stored_size(&self) -> u64 {
        self.size.next_multiple_of(PAGE)
    }

    /// The state of a segment (`struct shmid_ds`).
    fn encode_state(&self, [user, group]: [u32; 2], attached: u64) -> Vec<u8> {
        let owners = StructBuilder::default().int(self.key);
        let owners = owners.int(user).int(group).int(user).int(group);
        let mut reply = owners.int(self.mode_bits()).word(0).word(0).word(0).word(self.size);
        for time in self.times {
            reply = reply.word(time as u64);
        }
        reply.int(self.maker).int(self.last).word(attached).word(0).word(0).0
    }
}
