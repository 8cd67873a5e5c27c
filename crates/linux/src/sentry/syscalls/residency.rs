//! Calls on memory that change nothing here: all guest memory is resident, and threads run one at a
//! time.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::{Sentry, SyscallControl, SyscallResult, ZERO, copy_out};

/// Bytes that are written at a time.
const CHUNK_SIZE: u64 = 64 << 10;
const MLOCK_ONFAULT: u64 = 1;
const MCL_ALL: u64 = 7;
const MCL_ONFAULT: u64 = 4;

// Commands of `membarrier`.
const QUERY: u32 = 0;
const GLOBAL: u32 = 1;
const GLOBAL_EXPEDITED: u32 = 1 << 1;
const REGISTER_GLOBAL_EXPEDITED: u32 = 1 << 2;
const PRIVATE_EXPEDITED: u32 = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: u32 = 1 << 4;
const PRIVATE_EXPEDITED_SYNC_CORE: u32 = 1 << 5;
const REGISTER_PRIVATE_EXPEDITED_SYNC_CORE: u32 = 1 << 6;
const COMMANDS: u32 = (1 << 7) - 1;

impl Sentry {
    /// Whether all of a range is mapped, whole pages.
    fn check_mapped(&self, start: u64, len: u64) -> Result<(), Errno> {
        let first = start & !(PAGE - 1);
        let end = start.checked_add(len).and_then(|end| end.checked_next_multiple_of(PAGE));
        let end = end.ok_or(Errno::INVAL)?;
        if end > first && !self.state.layout.allows(&(first..end), 0) {
            return Err(Errno::NOMEM);
        }
        Ok(())
    }

    pub(in crate::sentry) fn sys_mlock(&mut self, start: u64, len: u64) -> SyscallResult {
        self.check_mapped(start, len)?;
        Ok(ZERO)
    }

    pub(in crate::sentry) fn sys_mlock2(
        &mut self,
        start: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags & !MLOCK_ONFAULT != 0 {
            return Err(Errno::INVAL.into());
        }
        self.sys_mlock(start, len)
    }

    pub(in crate::sentry) fn sys_munlock(&mut self, start: u64, len: u64) -> SyscallResult {
        self.sys_mlock(start, len)
    }

    pub(in crate::sentry) fn sys_mlockall(&mut self, flags: u64) -> SyscallResult {
        if flags & !MCL_ALL != 0 || flags & (MCL_ALL & !MCL_ONFAULT) == 0 {
            return Err(Errno::INVAL.into());
        }
        Ok(ZERO)
    }

    pub(in crate::sentry) fn sys_munlockall(&mut self) -> SyscallResult {
        Ok(ZERO)
    }

    pub(in crate::sentry) fn sys_mincore(
        &mut self,
        process: &mut Process,
        start: u64,
        len: u64,
        to: u64,
    ) -> SyscallResult {
        if !start.is_multiple_of(PAGE) {
            return Err(Errno::INVAL.into());
        }
        match self.check_mapped(start, len) {
            Err(Errno::INVAL) => return Err(Errno::NOMEM.into()),
            checked => checked?,
        }
        let pages = len.div_ceil(PAGE);
        for at in (0..pages).step_by(CHUNK_SIZE as usize) {
            let part = vec![1; (pages - at).min(CHUNK_SIZE) as usize];
            copy_out(process, to.wrapping_add(at), &part)?;
        }
        Ok(ZERO)
    }

    pub(in crate::sentry) fn sys_membarrier(&mut self, command: u64, flags: u64) -> SyscallResult {
        let (command, flags) = (command as u32, flags as u32);
        let registers = REGISTER_GLOBAL_EXPEDITED
            | REGISTER_PRIVATE_EXPEDITED
            | REGISTER_PRIVATE_EXPEDITED_SYNC_CORE;
        if flags != 0 {
            return Err(Errno::INVAL.into());
        }
        let barriers = self.state.current().info.traits.barriers;
        match command {
            QUERY => Ok(SyscallControl::Value(COMMANDS.into())),
            // A thread that runs has seen all that others did before.
            GLOBAL | GLOBAL_EXPEDITED => Ok(ZERO),
            command if command.is_power_of_two() && command & registers != 0 => {
                if barriers & command == 0 {
                    self.change().current_mut().info.traits.barriers |= command;
                }
                Ok(ZERO)
            }
            PRIVATE_EXPEDITED | PRIVATE_EXPEDITED_SYNC_CORE if barriers & command << 1 != 0 => {
                Ok(ZERO)
            }
            PRIVATE_EXPEDITED | PRIVATE_EXPEDITED_SYNC_CORE => Err(Errno::PERM.into()),
            _ => Err(Errno::INVAL.into()),
        }
    }
}
