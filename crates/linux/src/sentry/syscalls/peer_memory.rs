//! `process_vm_readv` and `process_vm_writev`: copies between the memories of processes.
//!
//! A process reaches its own memory, as programs do to look at addresses that may not be mapped.
//! That of others takes a privilege of a tracer, which no guest has.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::syscalls::read_write::pieces;
use crate::sentry::{Sentry, SyscallControl, SyscallResult, copy_in};

/// Bytes that are copied at a time.
const CHUNK_SIZE: u64 = 1 << 18;

impl Sentry {
    /// `process_vm_readv`.
    pub(in crate::sentry) fn sys_process_vm_readv(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        self.copy_between(process, a, false)
    }

    /// `process_vm_writev`.
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
        let local = pieces(process, local, local_count)?;
        let remote = pieces(process, remote, remote_count)?;
        let id = u32::try_from(id).map_err(|_| Errno::SRCH)?;
        let is_own = id == self.state.processes.current_id()
            || self.state.current().threads.get(id).is_some();
        if !is_own {
            let known = self.state.processes.lives(id);
            return Err(if known { Errno::PERM } else { Errno::SRCH }.into());
        }
        let (from, to) = if writes { (local, remote) } else { (remote, local) };
        let (mut from, mut to) = (from.into_iter(), to.into_iter());
        let (mut source, mut target, mut done) = ((0, 0), (0, 0), 0);
        loop {
            while source.1 == 0 {
                match from.next() {
                    Some(piece) => source = piece,
                    None => return Ok(SyscallControl::Value(done)),
                }
            }
            while target.1 == 0 {
                match to.next() {
                    Some(piece) => target = piece,
                    None => return Ok(SyscallControl::Value(done)),
                }
            }
            // Up to the ends of pages: the next one may not be mapped.
            let page = |at: u64| crate::sentry::PAGE - at % crate::sentry::PAGE;
            let len =
                source.1.min(target.1).min(CHUNK_SIZE).min(page(source.0)).min(page(target.0));
            let moved = copy_in(process, source.0, len as usize)
                .and_then(|bytes| crate::sentry::copy_out(process, target.0, &bytes));
            match moved {
                Ok(()) => {}
                Err(_) if done > 0 => return Ok(SyscallControl::Value(done)),
                Err(error) => return Err(error),
            }
            done += len;
            source = (source.0.wrapping_add(len), source.1 - len);
            target = (target.0.wrapping_add(len), target.1 - len);
        }
    }
}
