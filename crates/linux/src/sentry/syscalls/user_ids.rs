//! System calls on the IDs of users and groups.
//!
//! A guest begins with one user and one group. Only processes of a guest of user 0 change to
//! others, and only in the first user namespace.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::user_namespaces::{INITIAL, SETGID, SETUID};
use crate::sentry::kernel::users::{EFFECTIVE, FOR_FILES, MAX_GROUPS, ProcessIds, REAL, SAVED};
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

/// The number that stands for none: that ID stays.
const NONE: u32 = u32::MAX;

/// Users or groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdKind {
    User,
    Group,
}

impl IdKind {
    fn of(self, ids: &ProcessIds) -> [u32; 4] {
        match self {
            Self::User => ids.user,
            Self::Group => ids.group,
        }
    }
}

impl Sentry {
    /// The IDs of the current process, as it sees them.
    fn own_ids(&self) -> ProcessIds {
        self.state.seen_ids(self.state.processes.current_id())
    }

    fn id(&self, kind: IdKind, place: usize) -> SyscallResult {
        Ok(SyscallControl::Value(kind.of(&self.own_ids())[place].into()))
    }

    /// `getuid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getuid(&self) -> SyscallResult {
        self.id(IdKind::User, REAL)
    }

    /// `geteuid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_geteuid(&self) -> SyscallResult {
        self.id(IdKind::User, EFFECTIVE)
    }

    /// `getgid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getgid(&self) -> SyscallResult {
        self.id(IdKind::Group, REAL)
    }

    /// `getegid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getegid(&self) -> SyscallResult {
        self.id(IdKind::Group, EFFECTIVE)
    }

    /// `getresuid(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getresuid(
        &mut self,
        process: &mut Process,
        &[ruid, euid, suid, ..]: &[u64; 6],
    ) -> SyscallResult {
        self.write_ids(process, [ruid, euid, suid], IdKind::User)
    }

    /// `getresgid(2)`: as `getresuid`.
    pub(in crate::sentry) fn sys_getresgid(
        &mut self,
        process: &mut Process,
        &[rgid, egid, sgid, ..]: &[u64; 6],
    ) -> SyscallResult {
        self.write_ids(process, [rgid, egid, sgid], IdKind::Group)
    }

    /// Stores the real, effective and saved ID.
    fn write_ids(&self, process: &mut Process, addresses: [u64; 3], kind: IdKind) -> SyscallResult {
        let ids = kind.of(&self.own_ids());
        for (address, id) in addresses.into_iter().zip(ids) {
            copy_out(process, address, &id.to_le_bytes())?;
        }
        Ok(ZERO)
    }

    /// `getgroups(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getgroups(
        &mut self,
        process: &mut Process,
        room: u64,
        to: u64,
    ) -> SyscallResult {
        let (room, groups) = (room as i32, self.own_ids().groups);
        if room < 0 || room > 0 && (room as usize) < groups.len() {
            return Err(Errno::INVAL.into());
        }
        if room > 0 {
            let bytes: Vec<u8> = groups.iter().flat_map(|group| group.to_le_bytes()).collect();
            copy_out(process, to, &bytes)?;
        }
        Ok(SyscallControl::Value(groups.len() as u64))
    }

    /// `setgroups(2)`: with `CAP_SETGID` in the first user namespace. At most 1024 groups.
    pub(in crate::sentry) fn sys_setgroups(
        &mut self,
        process: &Process,
        count: u64,
        from: u64,
    ) -> SyscallResult {
        if !self.may_set(IdKind::Group) {
            return Err(Errno::PERM.into());
        }
        let count = count as u32 as usize;
        if count > MAX_GROUPS {
            return Err(Errno::INVAL.into());
        }
        let bytes = copy_in(process, from, 4 * count)?;
        let (words, _) = bytes.as_chunks::<4>();
        let groups: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        if groups.contains(&NONE) {
            return Err(Errno::INVAL.into());
        }
        let new = ProcessIds { groups, ..self.state.ids() };
        self.change().change_ids(new);
        Ok(ZERO)
    }

    /// Whether the current process may change to any user, or group.
    fn may_set(&self, kind: IdKind) -> bool {
        let own = self.state.credentials();
        let capability = if kind == IdKind::User { SETUID } else { SETGID };
        own.namespace == INITIAL && own.effective & 1 << capability != 0
    }

    /// Sets the real, effective and saved ID, and that for files with the effective one. Without a
    /// capability each is the present one or in `allowed`.
    fn set(&mut self, kind: IdKind, ids: [u32; 3], allowed: [&[usize]; 3]) -> SyscallResult {
        let own = kind.of(&self.own_ids());
        let may_set = self.may_set(kind);
        let may = |(id, places): (u32, &[usize])| {
            id == NONE || may_set || places.iter().any(|place| own[*place] == id)
        };
        if !ids.into_iter().zip(allowed).all(may) {
            // Within another namespace no other number has a user.
            let is_first = self.state.credentials().namespace == INITIAL;
            return Err(if is_first { Errno::PERM } else { Errno::INVAL }.into());
        }
        if self.state.credentials().namespace != INITIAL {
            // All of them are one.
            return Ok(ZERO);
        }
        let mut new = self.state.ids();
        let list = if kind == IdKind::User { &mut new.user } else { &mut new.group };
        for (place, id) in ids.into_iter().enumerate().filter(|(_, id)| *id != NONE) {
            list[place] = id;
        }
        list[FOR_FILES] = list[EFFECTIVE];
        if new != self.state.ids() {
            self.change().change_ids(new);
        }
        Ok(ZERO)
    }

    fn set_one(&mut self, kind: IdKind, id: u64) -> SyscallResult {
        let id = id as u32;
        if id == NONE {
            return Err(Errno::INVAL.into());
        }
        let all = if self.may_set(kind) { id } else { NONE };
        self.set(kind, [all, id, all], [&[], &[REAL, SAVED], &[]])
    }

    fn set_two(&mut self, kind: IdKind, real: u64, effective: u64) -> SyscallResult {
        let (real, effective) = (real as u32, effective as u32);
        let own = kind.of(&self.own_ids());
        let saves = real != NONE || effective != NONE && effective != own[REAL];
        let saved = match effective {
            _ if !saves => NONE,
            NONE => own[EFFECTIVE],
            effective => effective,
        };
        let any = &[REAL, EFFECTIVE, SAVED][..];
        self.set(kind, [real, effective, saved], [&[REAL, EFFECTIVE], any, any])
    }

    fn set_three(&mut self, kind: IdKind, ids: [u64; 3]) -> SyscallResult {
        self.set(kind, ids.map(|id| id as u32), [&[REAL, EFFECTIVE, SAVED]; 3])
    }

    /// `setuid(2)`: user 0 may change to any ID. In a user namespace others than the own are
    /// `EINVAL`.
    pub(in crate::sentry) fn sys_setuid(&mut self, id: u64) -> SyscallResult {
        self.set_one(IdKind::User, id)
    }

    /// `setgid(2)`: as `setuid`.
    pub(in crate::sentry) fn sys_setgid(&mut self, id: u64) -> SyscallResult {
        self.set_one(IdKind::Group, id)
    }

    /// `setreuid(2)`: as `setuid`.
    pub(in crate::sentry) fn sys_setreuid(&mut self, real: u64, effective: u64) -> SyscallResult {
        self.set_two(IdKind::User, real, effective)
    }

    /// `setregid(2)`: as `setuid`.
    pub(in crate::sentry) fn sys_setregid(&mut self, real: u64, effective: u64) -> SyscallResult {
        self.set_two(IdKind::Group, real, effective)
    }

    /// `setresuid(2)`: as `setuid`.
    pub(in crate::sentry) fn sys_setresuid(
        &mut self,
        real: u64,
        effective: u64,
        saved: u64,
    ) -> SyscallResult {
        self.set_three(IdKind::User, [real, effective, saved])
    }

    /// `setresgid(2)`: as `setuid`.
    pub(in crate::sentry) fn sys_setresgid(
        &mut self,
        real: u64,
        effective: u64,
        saved: u64,
    ) -> SyscallResult {
        self.set_three(IdKind::Group, [real, effective, saved])
    }

    /// Sets the ID for files, if the process may, and returns the one before.
    fn set_for_files(&mut self, kind: IdKind, id: u64) -> SyscallResult {
        let (id, own) = (id as u32, kind.of(&self.own_ids()));
        let is_first = self.state.credentials().namespace == INITIAL;
        if is_first && id != NONE && (self.may_set(kind) || own.contains(&id)) {
            let mut new = self.state.ids();
            let list = if kind == IdKind::User { &mut new.user } else { &mut new.group };
            list[FOR_FILES] = id;
            if new != self.state.ids() {
                self.change().change_ids(new);
            }
        }
        Ok(SyscallControl::Value(own[FOR_FILES].into()))
    }

    /// `setfsuid(2)`: capabilities stay as they are.
    pub(in crate::sentry) fn sys_setfsuid(&mut self, id: u64) -> SyscallResult {
        self.set_for_files(IdKind::User, id)
    }

    /// `setfsgid(2)`: as `setfsuid`.
    pub(in crate::sentry) fn sys_setfsgid(&mut self, id: u64) -> SyscallResult {
        self.set_for_files(IdKind::Group, id)
    }
}
