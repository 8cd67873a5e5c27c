//! The system calls of `inotify`.

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::fs::permissions::READ;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::inotify::{Inotify, InotifyWatch, MAX_INSTANCES, WATCHES};
use crate::sentry::kernel::poll_events::IN;
use crate::sentry::mm::user_memory::{copy_out, path_in};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use afresh_files::Kind;
use rustix::io::Errno;

impl Sentry {
    /// `inotify_init1(2)`: a guest has at most 64 instances.
    pub(in crate::sentry) fn sys_inotify_init1(&mut self, flags: u64) -> SyscallResult {
        if flags as i32 & !(libc::IN_CLOEXEC | libc::IN_NONBLOCK) != 0 {
            return Err(Errno::INVAL.into());
        }
        if self.state.watchers >= MAX_INSTANCES {
            return Err(Errno::MFILE.into());
        }
        let added =
            self.add(FileObject::Watches(Inotify::default()), flags as i32 | libc::O_RDONLY)?;
        self.change().watchers += 1;
        Ok(added)
    }

    /// `inotify_init(2)`: as `inotify_init1`.
    pub(in crate::sentry) fn sys_inotify_init(&mut self) -> SyscallResult {
        self.sys_inotify_init1(0)
    }

    pub(in crate::sentry) fn watches(&mut self, descriptor: u64) -> Result<&mut Inotify, Errno> {
        match &mut self.change().table.get_mut(descriptor)?.open {
            FileObject::Watches(watches) => Ok(watches),
            _ => Err(Errno::INVAL),
        }
    }

    /// `inotify_add_watch(2)`: changes by the host and writes through mappings are not reported.
    pub(in crate::sentry) fn sys_inotify_add_watch(
        &mut self,
        process: &Process,
        set: u64,
        path: u64,
        mask: u64,
    ) -> SyscallResult {
        let mask = mask as u32;
        let (adds, makes) = (mask & libc::IN_MASK_ADD != 0, mask & libc::IN_MASK_CREATE != 0);
        if mask & libc::IN_ALL_EVENTS == 0 || adds && makes {
            return Err(Errno::INVAL.into());
        }
        self.watches(set)?;
        // An empty path is no path, whatever else.
        let here = libc::AT_FDCWD as u64;
        if path_in(process, path)?.is_empty() {
            return Err(Errno::NOENT.into());
        }
        let node = self.follow(process, here, path, mask & libc::IN_DONT_FOLLOW == 0)?;
        let stat = self.state.tree.stat(node)?;
        if mask & libc::IN_ONLYDIR != 0 && stat.kind != Kind::Directory {
            return Err(Errno::NOTDIR.into());
        }
        self.state.may(node, READ)?;
        let all = self.state.all_watches();
        let watches = self.watches(set)?;
        let kept = mask & (libc::IN_ALL_EVENTS | libc::IN_ONESHOT | libc::IN_EXCL_UNLINK);
        if let Some(watch) = watches.list.get_mut(&node) {
            if makes {
                return Err(Errno::EXIST.into());
            }
            watch.mask = if adds { watch.mask | kept } else { kept };
            return Ok(SyscallControl::Value(watch.number as u64));
        }
        if all >= WATCHES || watches.last == i32::MAX {
            return Err(Errno::NOSPC.into());
        }
        watches.last += 1;
        let number = watches.last;
        watches.list.insert(node, InotifyWatch { number, mask: kept });
        Ok(SyscallControl::Value(number as u64))
    }

    /// `inotify_rm_watch(2)`, as on Linux.
    pub(in crate::sentry) fn sys_inotify_rm_watch(
        &mut self,
        set: u64,
        number: u64,
    ) -> SyscallResult {
        let watches = self.watches(set)?;
        let found = watches.list.iter().find(|(_, watch)| watch.number == number as i32);
        let node = *found.ok_or(Errno::INVAL)?.0;
        watches.drop_watch(node);
        Ok(ZERO)
    }

    /// Reads as many events as there is room for, all of each.
    pub(in crate::sentry) fn read_events(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        wanted: u64,
    ) -> SyscallResult {
        let FileObject::Watches(watches) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        let Some(first) = watches.queue.front() else {
            return self.wait_for(descriptor, IN, 0);
        };
        if first.len() as u64 > wanted {
            return Err(Errno::INVAL.into());
        }
        let (mut bytes, mut count) = (Vec::new(), 0);
        for event in &watches.queue {
            if (bytes.len() + event.len()) as u64 > wanted {
                break;
            }
            bytes.extend(event.bytes());
            count += 1;
        }
        let mut rest = &bytes[..];
        for &(to, len) in pieces {
            let (now, later) = rest.split_at(rest.len().min(len as usize));
            copy_out(process, to, now)?;
            rest = later;
        }
        let watches = self.watches(descriptor)?;
        watches.queue.drain(..count);
        watches.edges += 1;
        Ok(SyscallControl::Value(bytes.len() as u64))
    }
}
