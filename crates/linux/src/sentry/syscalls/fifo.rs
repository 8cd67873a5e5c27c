//! System calls that make and open named pipes.

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::fs::special_files::{FIFO, SOCKET};
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::open_fifo::{Fifo, PendingOpen};
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::AT_FDCWD;
use afresh_files::{Access, New, Node};
use rustix::io::Errno;
use std::sync::Arc;

impl Sentry {
    /// Opens a named pipe, or waits for the other end.
    pub(in crate::sentry) fn open_fifo(
        &mut self,
        node: Node,
        access: Access,
        flags: i32,
        found: Option<(Node, Arc<[u8]>)>,
    ) -> SyscallResult {
        self.state.table.check_room()?;
        let known = self.state.fifo_channel(node);
        let ends = known.and_then(|id| self.state.channels.get(id));
        let (readers, writers) = ends.map_or((0, 0), |channel| (channel.readers, channel.writers));
        let waits = flags & libc::O_NONBLOCK == 0;
        if access.write && !access.read && readers == 0 && !waits {
            return Err(Errno::NXIO.into());
        }
        let state = self.change();
        let open = state.tree.open(node, access)?;
        let channel = match state.join_fifo(known, access) {
            Ok(channel) => channel,
            Err(errno) => {
                state.tree.close(open);
                return Err(errno.into());
            }
        };
        state.meet(channel, access);
        let fifo = Fifo { channel, open, unmet: !access.write && writers == 0 };
        let met = match (access.read, access.write) {
            (true, false) => writers > 0,
            (false, true) => readers > 0,
            _ => true,
        };
        if met || !waits {
            return self.add_found(FileObject::Fifo(fifo), flags, found);
        }
        let found = found.map(|(above, name)| (above, name.to_vec()));
        Ok(SyscallControl::Wait(Wait::new(WaitReason::Fifo(PendingOpen { fifo, found }), None)))
    }

    /// The open of the current call, now that the other end is open.
    pub(in crate::sentry) fn met(&mut self, flags: i32) -> Option<SyscallResult> {
        if !matches!(self.resumed, Some(Wait { reason: WaitReason::Fifo(_), .. })) {
            return None;
        }
        let Some(Wait { reason: WaitReason::Fifo(PendingOpen { mut fifo, found }), .. }) =
            self.resumed.take()
        else {
            return None;
        };
        fifo.unmet = false;
        let found = found.map(|(above, name)| (above, name.into()));
        Some(self.add_found(FileObject::Fifo(fifo), flags, found))
    }

    /// `mknodat(2)`: makes named pipes, files and names of sockets. Devices are `EPERM`.
    pub(in crate::sentry) fn sys_mknodat(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        let new = match mode as u32 & libc::S_IFMT {
            0 | libc::S_IFREG => New::File,
            libc::S_IFIFO => New::Device(FIFO),
            libc::S_IFSOCK => New::Device(SOCKET),
            libc::S_IFCHR | libc::S_IFBLK | libc::S_IFDIR => return Err(Errno::PERM.into()),
            _ => return Err(Errno::INVAL.into()),
        };
        let place = self.place(process, at, path)?;
        self.create_name(&place, new, mode as u32 & 0o7777)?;
        Ok(ZERO)
    }

    /// `mknod(2)`: as `mknodat` from the current directory.
    pub(in crate::sentry) fn sys_mknod(
        &mut self,
        process: &Process,
        path: u64,
        mode: u64,
    ) -> SyscallResult {
        self.sys_mknodat(process, AT_FDCWD, path, mode)
    }
}
