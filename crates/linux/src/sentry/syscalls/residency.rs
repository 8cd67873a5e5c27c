//! Calls on memory that is resident, as all guest memory is, and on memory that threads see: they
//! run one at a time.

use std::ops::Range;

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::mm::user_memory::{copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

/// Bytes that are written at a time.
const CHUNK_SIZE: u64 = 64 << 10;
const MLOCK_ONFAULT: u64 = 1;
const MCL_CURRENT: u64 = 1;
const MCL_FUTURE: u64 = 2;
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

/// The pages that a range has a part in.
fn pages_around(start: u64, len: u64) -> Result<Range<u64>, Errno> {
    let first = start & !(PAGE - 1);
    let end = start.checked_add(len).and_then(|end| end.checked_next_multiple_of(PAGE));
    Ok(first..end.ok_or(Errno::INVAL)?)
}

impl Sentry {
    /// Whether all of a range is mapped, whole pages.
    fn check_mapped(&self, start: u64, len: u64) -> Result<(), Errno> {
        let range = pages_around(start, len)?;
        let mapped = range.is_empty() || self.state.layout.allows(&range, 0);
        if mapped { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// `mlock(2)`: all memory is resident. Locks count against `RLIMIT_MEMLOCK`.
    pub(in crate::sentry) fn sys_mlock(&mut self, start: u64, len: u64) -> SyscallResult {
        self.lock_pages(start, len, true)
    }

    /// `mlock2(2)`: as `mlock`. With `MLOCK_ONFAULT` the memory may be inaccessible.
    pub(in crate::sentry) fn sys_mlock2(
        &mut self,
        start: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags & !MLOCK_ONFAULT != 0 {
            return Err(Errno::INVAL.into());
        }
        self.lock_pages(start, len, flags & MLOCK_ONFAULT == 0)
    }

    /// Locks the pages of a range, which `touched` pages must be readable for.
    fn lock_pages(&mut self, start: u64, len: u64, touched: bool) -> SyscallResult {
        let limit = self.state.current().info.limits.locked_bytes();
        if limit == 0 {
            return Err(Errno::PERM.into());
        }
        let range = pages_around(start, len)?;
        let layout = &self.state.layout;
        let new = range.end - range.start - layout.locked_within(&range);
        if layout.locked_bytes().saturating_add(new) > limit {
            return Err(Errno::NOMEM.into());
        }
        self.change().layout.set_locked(&range, true)?;
        let parts = self.state.layout.parts(&range);
        let closed = touched && parts.iter().any(|(_, m)| m.protection == 0);
        if closed { Err(Errno::NOMEM.into()) } else { Ok(ZERO) }
    }

    /// `munlock(2)`: all memory stays resident.
    pub(in crate::sentry) fn sys_munlock(&mut self, start: u64, len: u64) -> SyscallResult {
        self.change().layout.set_locked(&pages_around(start, len)?, false)?;
        Ok(ZERO)
    }

    /// `mlockall(2)`: as `mlock`.
    pub(in crate::sentry) fn sys_mlockall(&mut self, flags: u64) -> SyscallResult {
        if flags & !MCL_ALL != 0 || flags & (MCL_ALL & !MCL_ONFAULT) == 0 {
            return Err(Errno::INVAL.into());
        }
        let limit = self.state.current().info.limits.locked_bytes();
        if limit == 0 {
            return Err(Errno::PERM.into());
        }
        let current = flags & MCL_CURRENT != 0;
        if current && self.state.layout.bytes() > limit {
            return Err(Errno::NOMEM.into());
        }
        let layout = &mut self.change().layout;
        layout.set_locks_new(flags & MCL_FUTURE != 0);
        if current {
            layout.set_all_locked(true);
        }
        Ok(ZERO)
    }

    /// `munlockall(2)`: all memory stays resident.
    pub(in crate::sentry) fn sys_munlockall(&mut self) -> SyscallResult {
        let layout = &mut self.change().layout;
        layout.set_locks_new(false);
        layout.set_all_locked(false);
        Ok(ZERO)
    }

    /// Refuses to lock `more` bytes than the process may.
    pub(in crate::sentry) fn may_lock_more(&self, more: u64) -> Result<(), Errno> {
        let locked = self.state.layout.locked_bytes().saturating_add(more);
        let fits = locked <= self.state.current().info.limits.locked_bytes();
        if fits { Ok(()) } else { Err(Errno::AGAIN) }
    }

    /// `mincore(2)`: all memory is resident.
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

    /// `cachestat(2)`: all pages of a file are resident, and none is written back.
    pub(in crate::sentry) fn sys_cachestat(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        range: u64,
        to: u64,
        flags: u64,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        if description.is_path() {
            return Err(Errno::BADF.into());
        }
        let (start, len) = (word_in(process, range)?, word_in(process, range.wrapping_add(8))?);
        let FileObject::File(open) = &description.open else {
            return Err(Errno::OPNOTSUPP.into());
        };
        if flags as u32 != 0 {
            return Err(Errno::INVAL.into());
        }
        let pages = self.state.tree.stat(open.node)?.size.div_ceil(PAGE);
        let end = if len == 0 { u64::MAX } else { start.saturating_add(len) };
        let cached = end.div_ceil(PAGE).min(pages).saturating_sub(start / PAGE);
        copy_out(process, to, &StructBuilder::default().word(cached).zeros(32).0)?;
        Ok(ZERO)
    }

    /// `membarrier(2)`: threads run one at a time, so that each has seen the writes of the others.
    /// The commands for restartable sequences are `EINVAL`.
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
