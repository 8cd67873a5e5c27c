//! Calls on segments of shared memory: `shmget`, `shmat`, `shmdt`, `shmctl`.

use afresh_files::Node;
use rustix::io::Errno;

use super::{MAX_SEGMENT_SIZE, MAX_SEGMENTS, SharedSegment};
use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::time::now;
use crate::sentry::mm::file_backing::FileBacking;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::mm::layout::traits::MappingTraits;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

/// Bytes of `struct shmid_ds`.
const SHMID_DS_LEN: usize = 112;

/// Where the mode is in it.
const MODE: usize = 20;

const EXECUTE: u64 = libc::SHM_EXEC as u64;

impl Kernel {
    /// The number of attachments of a segment.
    fn attached(&self, node: Node) -> u64 {
        let layouts = std::iter::once(&self.layout).chain(self.processes.layouts());
        // Parts of one that differ in protection have one beginning.
        let begins =
            |s: &crate::sentry::mm::file_backing::SharedMapping| s.share.offset(s.range.start) == 0;
        layouts
            .flat_map(crate::sentry::Layout::shared)
            .filter(|s| s.share.node == node && begins(s))
            .count() as u64
    }
}

impl Sentry {
    /// `shmget(2)`: `SHM_HUGETLB` is `EINVAL`.
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
        let segment = SharedSegment {
            key,
            node,
            size,
            mode,
            removed: false,
            maker,
            last: 0,
            times,
            locked: false,
        };
        system_v.list.insert(id, segment);
        Ok(SyscallControl::Value(id.into()))
    }

    /// `shmat(2)`, as on Linux.
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
        state.layout.share(start..start + len, FileBacking::new(segment.node, start, 0));
        let traits = MappingTraits { read_only: reads, ..MappingTraits::default() };
        state.layout.set_traits(&(start..start + len), traits);
        if let Some(segment) = state.system_v.list.get_mut(&(id as u32)) {
            segment.last = own;
            segment.times[0] = now().seconds;
        }
        self.count_shared()?;
        Ok(SyscallControl::Memory(start, change))
    }

    /// `shmdt(2)`, as on Linux.
    pub(in crate::sentry) fn sys_shmdt(&mut self, at: u64) -> SyscallResult {
        let begins = |s: &crate::sentry::mm::file_backing::SharedMapping| {
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
        let shows = |s: &crate::sentry::mm::file_backing::SharedMapping| {
            s.share == meant.share && s.range.start < at + len
        };
        let end = state.layout.shared().into_iter().filter(shows).map(|s| s.range.end).max();
        let change = state.layout.unmap(at, end.unwrap_or(at + len) - at)?;
        Ok(SyscallControl::Memory(0, change))
    }

    /// `shmctl(2)`: `IPC_SET` changes only the mode. `SHM_LOCK` sets a mark, because all memory is
    /// resident.
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
                let reply = segment.encode_state(
                    self.state.namespaces.users.owner,
                    self.state.attached(segment.node),
                );
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
            command @ (libc::SHM_LOCK | libc::SHM_UNLOCK) => {
                let locks = command == libc::SHM_LOCK;
                let limit = self.state.current().info.limits.locked_bytes();
                if locks && segment.stored_size() > limit {
                    return Err(if limit == 0 { Errno::PERM } else { Errno::NOMEM }.into());
                }
                if let Some(segment) = self.change().system_v.list.get_mut(&(id as u32)) {
                    segment.locked = locks;
                }
            }
            _ => return Err(Errno::INVAL.into()),
        }
        Ok(ZERO)
    }
}
