//! `prlimit64`, `getrlimit` and `setrlimit`: limits that a process has set itself.

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::users::REAL;
use crate::sentry::mm::user_memory::{copy_out, word_in};
use crate::sentry::result::{SyscallResult, ZERO};
use rustix::io::Errno;

impl Sentry {
    /// `prlimit64(2)`: enforced are the limits of CPU time, file size, descriptors, tasks, address
    /// space, data and locked memory. Others are stored.
    pub(in crate::sentry) fn sys_prlimit64(
        &mut self,
        process: &mut Process,
        id: u64,
        resource: u64,
        new: u64,
        old: u64,
    ) -> SyscallResult {
        let id = if id == 0 { self.state.processes.current_id() } else { id as u32 };
        let resource = resource as u32;
        let known = self.state.limit_of(id, resource).ok_or(Errno::INVAL)?;
        if !self.state.processes.lives(id) {
            return Err(Errno::SRCH.into());
        }
        if id != self.state.processes.current_id() && !self.state.has_all_ids_of(id, REAL) {
            return Err(Errno::PERM.into());
        }
        let new = match new {
            0 => None,
            at => Some((word_in(process, at)?, word_in(process, at.wrapping_add(8))?)),
        };
        if let Some((soft, hard)) = new {
            if soft > hard {
                return Err(Errno::INVAL.into());
            }
            if hard > known.1 {
                return Err(Errno::PERM.into());
            }
        }
        if old != 0 {
            copy_out(process, old, &StructBuilder::default().word(known.0).word(known.1).0)?;
        }
        if let Some(new) = new.filter(|new| *new != known) {
            let state = self.change();
            if let Some(info) = state.processes.info_mut(id) {
                info.limits.set(resource, new);
            }
            state.heed_limits();
        }
        Ok(ZERO)
    }

    /// `getrlimit(2)`: as `prlimit64`.
    pub(in crate::sentry) fn sys_getrlimit(
        &mut self,
        process: &mut Process,
        resource: u64,
        to: u64,
    ) -> SyscallResult {
        self.sys_prlimit64(process, 0, resource, 0, to)
    }

    /// `setrlimit(2)`: as `prlimit64`.
    pub(in crate::sentry) fn sys_setrlimit(
        &mut self,
        process: &mut Process,
        resource: u64,
        from: u64,
    ) -> SyscallResult {
        self.sys_prlimit64(process, 0, resource, from, 0)
    }
}
