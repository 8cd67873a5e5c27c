//! `process_vm_readv` and `process_vm_writev`: copies between the memories of processes, which the
//! guest's owner carries out.
//!
//! A process reaches its own memory, as programs do to look at addresses that may not be mapped,
//! and that of other processes of the guest that it could trace: those that are dumpable, and have
//! no capabilities that it lacks.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::peer_copy::PeerCopy;
use crate::sentry::kernel::users::REAL;
use crate::sentry::result::{SyscallControl, SyscallResult};
use crate::sentry::syscalls::read_write::pieces_of;

/// Maximum bytes of a call, as in Linux.
const MAX_COPY: u64 = 0x7fff_f000;

impl Sentry {
    /// `process_vm_readv(2)`, as on Linux.
    pub(in crate::sentry) fn sys_process_vm_readv(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        self.copy_between(process, a, false)
    }

    /// `process_vm_writev(2)`, as on Linux.
    pub(in crate::sentry) fn sys_process_vm_writev(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        self.copy_between(process, a, true)
    }

    /// Copies from remote pieces to local ones, or, if it `writes`, the other way.
    fn copy_between(&mut self, process: &mut Process, a: &[u64; 6], writes: bool) -> SyscallResult {
        let [id, local, local_count, remote, remote_count, flags] = *a;
        if flags != 0 {
            return Err(Errno::INVAL.into());
        }
        let local = pieces_of(process, local, local_count, MAX_COPY)?;
        let remote = pieces_of(process, remote, remote_count, MAX_COPY)?;
        let peer = self.process_of_thread(id as u32).ok_or(Errno::SRCH)?;
        if !self.state.may_inspect(peer, REAL) {
            return Err(Errno::PERM.into());
        }
        let (from, to) = if writes { (local, remote) } else { (remote, local) };
        Ok(SyscallControl::Peer(Box::new(PeerCopy { peer, writes, from, to })))
    }

    /// The process that has a thread.
    fn process_of_thread(&self, thread: u32) -> Option<u32> {
        let mut processes = self.state.processes.iter();
        let found = processes.find(|process| process.threads.get(thread).is_some());
        found.map(|process| process.info.id)
    }
}
