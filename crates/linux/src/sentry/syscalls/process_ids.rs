//! System calls on the IDs of processes, groups and sessions.

use rustix::io::Errno;

use crate::sentry::Sentry;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

impl Sentry {
    /// `getpid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getpid(&self) -> SyscallResult {
        Ok(SyscallControl::Value(self.state.processes.current_id().into()))
    }

    /// `getppid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getppid(&self) -> SyscallResult {
        Ok(SyscallControl::Value(self.state.current().info.parent.into()))
    }

    /// `gettid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_gettid(&self) -> SyscallResult {
        Ok(SyscallControl::Value(self.state.current().threads.current_id().into()))
    }

    /// `getpgrp(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getpgrp(&self) -> SyscallResult {
        self.process_group_or_session(0, false)
    }

    /// `getpgid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getpgid(&self, pid: u64) -> SyscallResult {
        self.process_group_or_session(pid, false)
    }

    /// `getsid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getsid(&self, pid: u64) -> SyscallResult {
        self.process_group_or_session(pid, true)
    }

    /// The group, or the session, of a process.
    pub(in crate::sentry) fn process_group_or_session(
        &self,
        id: u64,
        session: bool,
    ) -> SyscallResult {
        let processes = &self.state.processes;
        let id = if id == 0 { processes.current_id() } else { id as u32 };
        let info = processes.info(id).ok_or(Errno::SRCH)?;
        Ok(SyscallControl::Value(if session { info.session } else { info.group }.into()))
    }

    /// `setpgid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_setpgid(&mut self, id: u64, group: u64) -> SyscallResult {
        let own = self.state.current().info.clone();
        let id = if id == 0 { own.id } else { id as u32 };
        let group = if group == 0 { id } else { group as u32 };
        if group > i32::MAX as u32 {
            return Err(Errno::INVAL.into());
        }
        let info = self.state.processes.info(id).ok_or(Errno::SRCH)?;
        if info.id != own.id && info.parent != own.id {
            return Err(Errno::SRCH.into());
        }
        // A child that runs another program than its parent is its own.
        if info.id != own.id && info.program != own.program {
            return Err(Errno::ACCESS.into());
        }
        let known = group == id || !self.state.processes.group(group).is_empty();
        if info.session != own.session || info.session == info.id || !known {
            return Err(Errno::PERM.into());
        }
        if let Some(info) = self.change().processes.info_mut(id) {
            info.group = group;
        }
        Ok(ZERO)
    }

    /// `setsid(2)`: `EPERM` for the leader of a group only.
    pub(in crate::sentry) fn sys_setsid(&mut self) -> SyscallResult {
        let id = self.state.processes.current_id();
        if self.state.current().info.group == id {
            return Err(Errno::PERM.into());
        }
        let own = &mut self.change().current_mut().info;
        (own.group, own.session) = (id, id);
        Ok(SyscallControl::Value(id.into()))
    }
}
