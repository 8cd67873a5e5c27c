//! Segments of shared memory that have keys and numbers in place of names (`shmget`, of System V).
//!
//! A segment is a file without a name, and attaching it maps that, so that its memory is shared,
//! reset and saved as all shared memory is.
//!
//! Promises: a segment lasts until it is removed and no process has it attached; the mappings are
//! the attachments.

use std::collections::BTreeMap;

use afresh_files::{Node, Tree};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::platform::Process;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::identity::USER;
use crate::sentry::kernel::time::now;
use crate::sentry::mm::layout::{MAX_RESERVED, PAGE};
use crate::sentry::mm::shared::Share;
use crate::sentry::{Kernel, Sentry, SyscallControl, SyscallResult, ZERO, copy_in, copy_out};

/// Segments that there may be.
pub(in crate::sentry) const MAX_SEGMENTS: usize = 4096;
/// Maximum bytes of one, as Linux has it. A guest's memory limit comes first.
pub(in crate::sentry) const MAX_SEGMENT_SIZE: u64 = u64::MAX - (1 << 24);
/// Mode bit of `shmctl` for a segment that is removed but attached.
const REMOVED: u32 = 0o1000;
/// Bytes of `struct shmid_ds`.
const SHMID_DS_LEN: usize = 112;
/// Where the mode is in it.
const MODE: usize = 20;
const EXECUTE: u64 = libc::SHM_EXEC as u64;

/// A segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SharedSegment {
    /// Key 0 finds no segment.
    key: u32,
    node: Node,
    size: u64,
    mode: u32,
    removed: bool,
    /// The processes that made it, and that attached or detached it last.
    maker: u32,
    last: u32,
    /// When it was attached, detached and changed, in seconds.
    times: [i64; 3],
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
    pub(in crate::sentry) fn drop_unmapped(&mut self, mapped: &[Node], tree: &mut Tree) {
        self.list.retain(|_, segment| {
            let lasts = !segment.removed || mapped.contains(&segment.node);
            if !lasts {
                tree.release(segment.node);
            }
            lasts
        });
    }
}

impl Kernel {
    /// The number of attachments of a segment.
    fn attached(&self, node: Node) -> u64 {
        let layouts = std::iter::once(&self.layout).chain(self.processes.layouts());
        // Parts of one that differ in protection have one beginning.
        let begins =
            |s: &crate::sentry::mm::shared::SharedMapping| s.share.offset(s.range.start) == 0;
        layouts
            .flat_map(crate::sentry::Layout::shared)
            .filter(|s| s.share.node == node && begins(s))
            .count() as u64
    }
}

impl Sentry {
    /// `shmget`.
    pub(in crate::sentry) fn sys_shmget(
        &mut self,
        key: u64,
        size: u64,
        flags: u64,
    ) -> SyscallResult {
        let (key, flags) = (key as u32, flags as i32);
        if let Some((id, segment)) = self.state.system_v.keyed(key) {
            if flags & libc::IPC_CREAT != 0 && flags & libc::IPC_EXCL != 0 {
                return Err(Errno::EXIST.into());
            }
            if size > segment.size {
                return Err(Errno::INVAL.into());
            }
            // Its owner is the only user.
            let asked = (flags as u32 >> 6 | flags as u32 >> 3 | flags as u32) & 7;
            if asked & !(segment.mode >> 6) != 0 {
                return Err(Errno::ACCESS.into());
            }
            return Ok(SyscallControl::Value(id.into()));
        }
        if key != 0 && flags & libc::IPC_CREAT == 0 {
            return Err(Errno::NOENT.into());
        }
        if size == 0 || size > MAX_SEGMENT_SIZE || flags & libc::SHM_HUGETLB != 0 {
            return Err(Errno::INVAL.into());
        }
        let whole = size.checked_next_multiple_of(PAGE).ok_or(Errno::INVAL)?;
        if whole > self.state.layout.limit() {
            return Err(Errno::NOMEM.into());
        }
        let full = self.state.system_v.list.len() >= MAX_SEGMENTS
            || self.state.system_v.next > i32::MAX as u32;
        if full {
            return Err(Errno::NOSPC.into());
        }
        let maker = self.state.processes.current_id();
        let Kernel { tree, system_v, .. } = self.change();
        let node = tree.create_unnamed(0o600, now())?;
        if let Err(refused) = tree.set_size(node, whole, now()) {
            tree.release(node);
            return Err(refused.into());
        }
        let id = system_v.next;
        system_v.next += 1;
        let (mode, times) = (flags as u32 & 0o777, [0, 0, now().seconds]);
        let segment =
            SharedSegment { key, node, size, mode, removed: false, maker, last: 0, times };
        system_v.list.insert(id, segment);
        Ok(SyscallControl::Value(id.into()))
    }

    /// `shmat`.
    pub(in crate::sentry) fn sys_shmat(&mut self, id: u64, at: u64, flags: u64) -> SyscallResult {
        let segment = self.state.system_v.get(id)?.clone();
        let flag = |flag: i32| flags as i32 & flag != 0;
        let reads = flag(libc::SHM_RDONLY);
        let asked = if reads { 4 } else { 6 };
        if asked & !(segment.mode >> 6) != 0 {
            return Err(Errno::ACCESS.into());
        }
        let at = match at {
            0 if flag(libc::SHM_REMAP) => return Err(Errno::INVAL.into()),
            0 => None,
            at if flag(libc::SHM_RND) => Some(at / PAGE * PAGE),
            at if at.is_multiple_of(PAGE) => Some(at),
            _ => return Err(Errno::INVAL.into()),
        };
        let len = segment.size.next_multiple_of(PAGE);
        if let Some(at) = at
            && !flag(libc::SHM_REMAP)
            && self.state.layout.touches(&(at..at.saturating_add(len)))
        {
            return Err(Errno::INVAL.into());
        }
        let rights = [
            (true, libc::PROT_READ),
            (!reads, libc::PROT_WRITE),
            (flags & EXECUTE != 0, libc::PROT_EXEC),
        ];
        let protection =
            rights.into_iter().filter(|(has, _)| *has).fold(0, |all, (_, bit)| all | bit as u64);
        // The budget comes before the bytes.
        self.state.layout.plan(at, false, len, protection, true)?;
        self.make_live(segment.node, 0..len, true)?;
        self.change().keep_shared(segment.node)?;
        let content = self.shared_content(segment.node, 0, len, protection)?;
        let mapped = self.change().layout.map(at, false, len, protection, Some(content));
        let (start, change) = match mapped {
            Ok(mapped) => mapped,
            Err(errno) => {
                self.drop_unshared()?;
                return Err(errno.into());
            }
        };
        let own = self.state.processes.current_id();
        let state = self.change();
        state.layout.share(start..start + len, Share::new(segment.node, start, 0));
        if let Some(segment) = state.system_v.list.get_mut(&(id as u32)) {
            segment.last = own;
            segment.times[0] = now().seconds;
        }
        self.count_shared()?;
        Ok(SyscallControl::Memory(start, change))
    }

    /// `shmdt`.
    pub(in crate::sentry) fn sys_shmdt(&mut self, at: u64) -> SyscallResult {
        let begins = |s: &crate::sentry::mm::shared::SharedMapping| {
            s.range.start == at && s.share.offset(at) == 0
        };
        let meant = self.state.layout.shared().into_iter().find(begins).ok_or(Errno::INVAL)?;
        let of = |(_, segment): &(&u32, &mut SharedSegment)| segment.node == meant.share.node;
        let own = self.state.processes.current_id();
        let state = self.change();
        let (_, segment) = state.system_v.list.iter_mut().find(of).ok_or(Errno::INVAL)?;
        segment.last = own;
        segment.times[1] = now().seconds;
        let len = segment.size.next_multiple_of(PAGE);
        // The mapping may be smaller than the segment.
        let shows = |s: &crate::sentry::mm::shared::SharedMapping| {
            s.share == meant.share && s.range.start < at + len
        };
        let end = state.layout.shared().into_iter().filter(shows).map(|s| s.range.end).max();
        let change = state.layout.unmap(at, end.unwrap_or(at + len) - at)?;
        Ok(SyscallControl::Memory(0, change))
    }

    /// `shmctl`.
    pub(in crate::sentry) fn sys_shmctl(
        &mut self,
        process: &mut Process,
        id: u64,
        command: u64,
        at: u64,
    ) -> SyscallResult {
        const SHM_STAT: i32 = 13;
        const SHM_STAT_ANY: i32 = 15;
        if let Some(answer) = self.segment_info(process, command as i32, at)? {
            return Ok(answer);
        }
        let segment = self.state.system_v.get(id)?.clone();
        match command as i32 {
            // A number is an index as well.
            command @ (libc::IPC_STAT | SHM_STAT | SHM_STAT_ANY) => {
                let reply = segment.encode_state(self.state.attached(segment.node));
                copy_out(process, at, &reply)?;
                if command != libc::IPC_STAT {
                    return Ok(SyscallControl::Value(id as u32 as u64));
                }
            }
            libc::IPC_SET => {
                let given = copy_in(process, at, SHMID_DS_LEN)?;
                let mode = u32::from(given[MODE]) | u32::from(given[MODE + 1]) << 8;
                if let Some(segment) = self.change().system_v.list.get_mut(&(id as u32)) {
                    segment.mode = mode & 0o777;
                    segment.times[2] = now().seconds;
                }
            }
            libc::IPC_RMID => {
                let state = self.change();
                if let Some(segment) = state.system_v.list.get_mut(&(id as u32)) {
                    segment.removed = true;
                }
                state.drop_unshared();
                self.prune_shared()?;
            }
            // Nothing is ever taken out of memory.
            libc::SHM_LOCK | libc::SHM_UNLOCK => {}
            _ => return Err(Errno::INVAL.into()),
        }
        Ok(ZERO)
    }
}

impl SharedSegment {
    /// The state of a segment (`struct shmid_ds`).
    fn encode_state(&self, attached: u64) -> Vec<u8> {
        let user = USER as u32;
        let owners = StructBuilder::default().int(self.key).int(user).int(user).int(user).int(user);
        let mode = self.mode | if self.removed { REMOVED } else { 0 };
        let mut reply = owners.int(mode).word(0).word(0).word(0).word(self.size);
        for time in self.times {
            reply = reply.word(time as u64);
        }
        reply.int(self.maker).int(self.last).word(attached).word(0).word(0).0
    }
}
