//! System calls on the IDs of the user and the group. A guest has one of each.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::user_namespaces::INITIAL;
use crate::sentry::mm::user_memory::copy_out;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

impl Sentry {
    /// `getuid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getuid(&self) -> SyscallResult {
        Ok(SyscallControl::Value(self.state.user_id().into()))
    }

    /// `geteuid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_geteuid(&self) -> SyscallResult {
        self.sys_getuid()
    }

    /// `getgid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getgid(&self) -> SyscallResult {
        Ok(SyscallControl::Value(self.state.group_id().into()))
    }

    /// `getegid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getegid(&self) -> SyscallResult {
        self.sys_getgid()
    }

    /// `getresuid(2)`: the three IDs are one.
    pub(in crate::sentry) fn sys_getresuid(
        &mut self,
        process: &mut Process,
        &[ruid, euid, suid, ..]: &[u64; 6],
    ) -> SyscallResult {
        let user = self.state.user_id();
        Self::write_ids(process, [ruid, euid, suid], user)
    }

    /// `getresgid(2)`: the three IDs are one.
    pub(in crate::sentry) fn sys_getresgid(
        &mut self,
        process: &mut Process,
        &[rgid, egid, sgid, ..]: &[u64; 6],
    ) -> SyscallResult {
        let group = self.state.group_id();
        Self::write_ids(process, [rgid, egid, sgid], group)
    }

    /// Stores the real, effective and saved number, which are one.
    fn write_ids(process: &mut Process, addresses: [u64; 3], id: u32) -> SyscallResult {
        for address in addresses {
            copy_out(process, address, &id.to_le_bytes())?;
        }
        Ok(ZERO)
    }

    /// `getgroups(2)`: the list is empty.
    pub(in crate::sentry) fn sys_getgroups(&self, room: u64) -> SyscallResult {
        if (room as i32) < 0 { Err(Errno::INVAL.into()) } else { Ok(ZERO) }
    }

    /// `setgroups(2)`: `EPERM`, because a guest has no privileges.
    pub(in crate::sentry) fn sys_setgroups(&self) -> SyscallResult {
        Err(Errno::PERM.into())
    }

    /// `setuid(2)`: the guest's own ID. Others are `EPERM`, and `EINVAL` in a user namespace.
    pub(in crate::sentry) fn sys_setuid(&mut self, id: u64) -> SyscallResult {
        self.set_ids(self.state.user_id(), &[id])
    }

    /// `setgid(2)`: as `setuid`.
    pub(in crate::sentry) fn sys_setgid(&mut self, id: u64) -> SyscallResult {
        self.set_ids(self.state.group_id(), &[id])
    }

    /// `setreuid(2)`: as `setuid`.
    pub(in crate::sentry) fn sys_setreuid(&mut self, real: u64, effective: u64) -> SyscallResult {
        self.set_ids(self.state.user_id(), &[real, effective])
    }

    /// `setregid(2)`: as `setuid`.
    pub(in crate::sentry) fn sys_setregid(&mut self, real: u64, effective: u64) -> SyscallResult {
        self.set_ids(self.state.group_id(), &[real, effective])
    }

    /// `setresuid(2)`: as `setuid`.
    pub(in crate::sentry) fn sys_setresuid(
        &mut self,
        real: u64,
        effective: u64,
        saved: u64,
    ) -> SyscallResult {
        self.set_ids(self.state.user_id(), &[real, effective, saved])
    }

    /// `setresgid(2)`: as `setuid`.
    pub(in crate::sentry) fn sys_setresgid(
        &mut self,
        real: u64,
        effective: u64,
        saved: u64,
    ) -> SyscallResult {
        self.set_ids(self.state.group_id(), &[real, effective, saved])
    }

    /// `setuid` and its kind: only to the present number.
    pub(in crate::sentry) fn set_ids(&mut self, own: u32, ids: &[u64]) -> SyscallResult {
        let stays = |id: &u64| *id as u32 == u32::MAX || *id as u32 == own;
        if ids.iter().all(stays) {
            return Ok(ZERO);
        }
        // Within a namespace no other number has a user.
        let first = self.state.credentials().namespace == INITIAL;
        Err(if first { Errno::PERM } else { Errno::INVAL }.into())
    }

    /// `setfsuid(2)`: the ID stays, and is returned.
    pub(in crate::sentry) fn sys_setfsuid(&mut self) -> SyscallResult {
        self.sys_getuid()
    }

    /// `setfsgid(2)`: the ID stays, and is returned.
    pub(in crate::sentry) fn sys_setfsgid(&mut self) -> SyscallResult {
        self.sys_getgid()
    }
}
