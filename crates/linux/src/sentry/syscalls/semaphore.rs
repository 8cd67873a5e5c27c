//! Calls on semaphores of System V.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::{SEMAPHORE_SET_LEN, StructBuilder, semaphore_times};
use crate::sentry::kernel::semaphores::{
    MAX_IN_SET, MAX_OPERATIONS, MAX_VALUE, Refusal, Semaphore, SemaphoreOperation, SemaphoreSet,
};
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::kernel::time::{nanoseconds, now};
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::clock::length_in;

/// Bytes of `struct sembuf`, and where the mode is in `struct semid_ds`.
const OPERATION_LEN: u64 = 6;
const MODE: usize = 20;
// Commands of `semctl`.
const GETPID: i32 = 11;
const GETVAL: i32 = 12;
const GETALL: i32 = 13;
const GETNCNT: i32 = 14;
const GETZCNT: i32 = 15;
const SETVAL: i32 = 16;
const SEM_STAT: i32 = 18;
const SEM_STAT_ANY: i32 = 20;
const SETALL: i32 = 17;

/// Whether a mode lets its owner do what is asked for: 4 to read, 2 to change.
pub(in crate::sentry) fn check_mode(mode: u32, asked: u32) -> Result<(), Errno> {
    if asked & !(mode >> 6) == 0 { Ok(()) } else { Err(Errno::ACCESS) }
}

/// The rights that the flags of `semget` or `msgget` ask for.
pub(in crate::sentry) fn asked_rights(flags: u64) -> u32 {
    (flags >> 6 | flags >> 3 | flags) as u32 & 7
}

/// The first fields of a structure (`struct ipc64_perm`).
pub(in crate::sentry) fn permissions(
    key: u32,
    [user, group]: [u32; 2],
    mode: u32,
) -> StructBuilder {
    let owners = StructBuilder::default().int(key).int(user).int(group).int(user).int(group);
    owners.int(mode).word(0).word(0).word(0)
}

impl Sentry {
    /// `semget(2)`, as on Linux.
    pub(in crate::sentry) fn sys_semget(
        &mut self,
        key: u64,
        count: u64,
        flags: u64,
    ) -> SyscallResult {
        let (key, count) = (key as u32, count as u32 as usize);
        let has = |flag: i32| flags as i32 & flag != 0;
        if count > MAX_IN_SET {
            return Err(Errno::INVAL.into());
        }
        if let Some((id, set)) = self.state.semaphores.keyed(key) {
            if has(libc::IPC_CREAT) && has(libc::IPC_EXCL) {
                return Err(Errno::EXIST.into());
            }
            if count > set.list.len() {
                return Err(Errno::INVAL.into());
            }
            check_mode(set.mode, asked_rights(flags))?;
            return Ok(SyscallControl::Value(id.into()));
        }
        if key != 0 && !has(libc::IPC_CREAT) {
            return Err(Errno::NOENT.into());
        }
        if count == 0 {
            return Err(Errno::INVAL.into());
        }
        let (list, times) = (vec![Semaphore::default(); count], [0, now().seconds]);
        let set = SemaphoreSet { key, mode: flags as u32 & 0o777, list, times };
        Ok(SyscallControl::Value(self.change().semaphores.add(set)?.into()))
    }

    /// `semop(2)`, as on Linux.
    pub(in crate::sentry) fn sys_semop(
        &mut self,
        process: &Process,
        id: u64,
        operations: u64,
        count: u64,
    ) -> SyscallResult {
        self.sys_semtimedop(process, id, operations, count, 0)
    }

    /// `semtimedop(2)`, as on Linux.
    pub(in crate::sentry) fn sys_semtimedop(
        &mut self,
        process: &Process,
        id: u64,
        operations: u64,
        count: u64,
        limit: u64,
    ) -> SyscallResult {
        if count == 0 {
            return Err(Errno::INVAL.into());
        }
        if count > MAX_OPERATIONS as u64 {
            return Err(Errno::TOOBIG.into());
        }
        let given = copy_in(process, operations, (count * OPERATION_LEN) as usize)?;
        let half = |bytes: &[u8]| u16::from(bytes[0]) | u16::from(bytes[1]) << 8;
        let operations: Vec<_> = given
            .chunks_exact(OPERATION_LEN as usize)
            .map(|bytes| SemaphoreOperation {
                number: half(bytes),
                change: half(&bytes[2..]) as i16,
                flags: half(&bytes[4..]),
            })
            .collect();
        let until = match (&self.resumed, limit) {
            (Some(wait), _) => wait.until,
            (None, 0) => None,
            (None, at) => Some(self.now().saturating_add(nanoseconds(length_in(process, at)?))),
        };
        let id = i32::try_from(id as i64).ok().filter(|id| *id >= 0).ok_or(Errno::INVAL)? as u32;
        let changes = operations.iter().any(|operation| operation.change != 0);
        match self.state.semaphores.get(id.into()) {
            Ok(set) => check_mode(set.mode, if changes { 2 } else { 4 })?,
            // It was removed while the call waited.
            Err(_) if self.resumed.is_some() => return Err(Errno::IDRM.into()),
            Err(errno) => return Err(errno.into()),
        }
        let own = self.state.processes.current_id();
        match self.change().semaphores.operate(id, &operations, own, now().seconds) {
            Ok(()) => Ok(ZERO),
            Err(Refusal::Waits(true)) => Err(Errno::AGAIN.into()),
            Err(Refusal::Waits(false)) if self.passed(until) => Err(Errno::AGAIN.into()),
            Err(Refusal::Waits(false)) => {
                self.state.processes.check_wait(operations.len())?;
                let reason = WaitReason::Semaphores(id, operations);
                Ok(SyscallControl::Wait(Wait::new(reason, until)))
            }
            Err(Refusal::Errno(errno)) => Err(errno.into()),
        }
    }

    /// `semctl(2)`: `IPC_SET` changes only the mode.
    pub(in crate::sentry) fn sys_semctl(
        &mut self,
        process: &mut Process,
        id: u64,
        number: u64,
        command: u64,
        argument: u64,
    ) -> SyscallResult {
        let id = i32::try_from(id as i64).ok().filter(|id| *id >= 0).ok_or(Errno::INVAL)? as u64;
        let command = command as i32 & 0xff;
        if let Some(answer) = self.semaphore_info(process, command, argument)? {
            return Ok(answer);
        }
        let set = self.state.semaphores.get(id)?;
        let count = set.list.len();
        let asked = match command {
            SETVAL | SETALL => 2,
            libc::IPC_RMID | libc::IPC_SET | SEM_STAT_ANY => 0,
            _ => 4,
        };
        check_mode(set.mode, asked)?;
        let one = || set.list.get(number as u32 as usize).copied().ok_or(Errno::INVAL);
        let value = match command {
            GETVAL => one()?.value.into(),
            GETPID => one()?.last.into(),
            GETNCNT | GETZCNT => {
                one()?;
                self.state.waiting_for_semaphore(id, number, command == GETZCNT)
            }
            GETALL => {
                let values =
                    set.list.iter().fold(StructBuilder::default(), |all, s| all.half(s.value));
                copy_out(process, argument, &values.0)?;
                0
            }
            // A number is an index as well.
            libc::IPC_STAT | SEM_STAT | SEM_STAT_ANY => {
                let [used, changed] = set.times.map(|time| time as u64);
                let reply = permissions(set.key, self.state.namespaces.users.owner, set.mode);
                let reply = semaphore_times(reply, [used, changed]);
                copy_out(process, argument, &reply.word(count as u64).word(0).word(0).0)?;
                if command == libc::IPC_STAT { 0 } else { id }
            }
            SETVAL => {
                one()?;
                let value = u16::try_from(argument as i32).ok().filter(|value| *value <= MAX_VALUE);
                let value = value.ok_or(Errno::RANGE)?;
                self.set_semaphores(id, number as usize, &[value])?;
                0
            }
            SETALL => {
                let given = copy_in(process, argument, 2 * count)?;
                let half = |bytes: &[u8]| u16::from(bytes[0]) | u16::from(bytes[1]) << 8;
                let values: Vec<u16> = given.chunks_exact(2).map(half).collect();
                if values.iter().any(|value| *value > MAX_VALUE) {
                    return Err(Errno::RANGE.into());
                }
                self.set_semaphores(id, 0, &values)?;
                0
            }
            libc::IPC_SET => {
                let given = copy_in(process, argument, SEMAPHORE_SET_LEN)?;
                let set = self.change().semaphores.get_mut(id)?;
                set.mode = (u32::from(given[MODE]) | u32::from(given[MODE + 1]) << 8) & 0o777;
                set.times[1] = now().seconds;
                0
            }
            libc::IPC_RMID => {
                self.change().semaphores.remove(id);
                0
            }
            _ => return Err(Errno::INVAL.into()),
        };
        Ok(SyscallControl::Value(value))
    }

    /// Gives values to the semaphores from `first` on.
    fn set_semaphores(&mut self, id: u64, first: usize, values: &[u16]) -> SyscallResult<()> {
        let own = self.state.processes.current_id();
        let all = &mut self.change().semaphores;
        let number = if values.len() == 1 { u16::try_from(first).ok() } else { None };
        all.forget_adjustments(id, number);
        let set = all.get_mut(id)?;
        for (semaphore, value) in set.list.iter_mut().skip(first).zip(values) {
            *semaphore = Semaphore { value: *value, last: own };
        }
        set.times[1] = now().seconds;
        Ok(())
    }
}
