//! System calls on the IDs of processes, groups and sessions.

use std::cmp::Ordering;

use rustix::io::Errno;

use crate::sentry::Sentry;
use crate::sentry::kernel::process_info::INIT_PID;
use crate::sentry::kernel::shared_parts::SharedPart;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::users::FOR_FILES;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

// Kinds of `kcmp`.
const KCMP_FILE: i32 = 0;
const KCMP_VM: i32 = 1;
const KCMP_FILES: i32 = 2;
const KCMP_FS: i32 = 3;
const KCMP_SYSVSEM: i32 = 6;
/// The parts that the kinds from [`KCMP_FS`] on compare.
const SHARED_PARTS: [SharedPart; 4] =
    [SharedPart::Directories, SharedPart::Handlers, SharedPart::Io, SharedPart::Undo];

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
        if id == INIT_PID {
            return Ok(SyscallControl::Value(INIT_PID.into()));
        }
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
        let processes = &self.state.processes;
        let session = |id: &u32| processes.info(*id).map(|info| info.session);
        let known =
            group == id || processes.group(group).first().and_then(session) == Some(own.session);
        if info.session != own.session || info.session == info.id || !known {
            return Err(Errno::PERM.into());
        }
        if let Some(info) = self.change().processes.info_mut(id) {
            info.group = group;
        }
        Ok(ZERO)
    }

    /// `setsid(2)`: `EPERM` if a group has the number of the process.
    pub(in crate::sentry) fn sys_setsid(&mut self) -> SyscallResult {
        let id = self.state.processes.current_id();
        if !self.state.processes.group(id).is_empty() {
            return Err(Errno::PERM.into());
        }
        let own = &mut self.change().current_mut().info;
        (own.group, own.session) = (id, id);
        Ok(SyscallControl::Value(id.into()))
    }

    /// `kcmp(2)`: compares open files, memory, and what threads of a process share. Other kinds are
    /// `EINVAL`, and of another user `EPERM`.
    pub(in crate::sentry) fn sys_kcmp(
        &mut self,
        first: u64,
        second: u64,
        kind: u64,
        index: u64,
        other_index: u64,
    ) -> SyscallResult {
        let ids = [first, second].map(|id| self.state.home_of_thread(id as u32));
        let [first, second] = [ids[0].ok_or(Errno::SRCH)?, ids[1].ok_or(Errno::SRCH)?];
        if [first, second].iter().any(|id| !self.state.may_inspect(*id, FOR_FILES)) {
            return Err(Errno::PERM.into());
        }
        let open = |id: u32, number: u64| {
            let mut all = self.state.descriptors_of(id);
            let found = all.find(|(known, ..)| u64::from(*known) == number);
            found.map(|(_, description, _)| description).ok_or(Errno::BADF)
        };
        let memory = |id: u32| self.state.processes.info(id).map(|info| u64::from(info.memory));
        let pair = match kind as i32 {
            KCMP_FILE => [open(first, index)?, open(second, other_index)?],
            KCMP_VM => [memory(first), memory(second)].map(Option::unwrap_or_default),
            KCMP_FILES => [first, second].map(|id| self.state.table.table_owner(id).into()),
            kind @ KCMP_FS..=KCMP_SYSVSEM => {
                let part = SHARED_PARTS[(kind - KCMP_FS) as usize];
                [first, second].map(|id| self.state.shared_parts.group(part, id).into())
            }
            _ => return Err(Errno::INVAL.into()),
        };
        let order = match pair[0].cmp(&pair[1]) {
            Ordering::Equal => 0,
            Ordering::Less => 1,
            Ordering::Greater => 2,
        };
        Ok(SyscallControl::Value(order))
    }
}

impl Kernel {
    /// The living process that a number means, which may be that of a thread.
    pub(in crate::sentry) fn home_of_thread(&self, id: u32) -> Option<u32> {
        if self.processes.lives(id) {
            return Some(id);
        }
        let has = |home: &u32| {
            self.processes.get(*home).is_some_and(|home| home.threads.get(id).is_some())
        };
        self.processes.infos().map(|info| info.id).find(has)
    }
}
