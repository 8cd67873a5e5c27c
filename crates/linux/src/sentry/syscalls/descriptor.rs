//! System calls that duplicate and close descriptors: `dup` and `close`.

use rustix::io::Errno;

use crate::sentry::Sentry;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

/// Descriptors that `close_range` closes before it looks whether it has to end.
const CLOSED_TOGETHER: usize = 256;

impl Sentry {
    /// `dup(2)`, as on Linux.
    pub(in crate::sentry) fn sys_dup(&mut self, old: u64) -> SyscallResult {
        let number = self.change().table.duplicate(old, 0, false)?;
        Ok(SyscallControl::Value(u64::from(number)))
    }

    /// `dup2(2)`, as on Linux.
    pub(in crate::sentry) fn sys_dup2(&mut self, old: u64, new: u64) -> SyscallResult {
        if old as u32 == new as u32 {
            return self.replace(old, new, 0, true);
        }
        self.closing(vec![new], |sentry| sentry.replace(old, new, 0, true))
    }

    /// `dup3(2)`, as on Linux.
    pub(in crate::sentry) fn sys_dup3(&mut self, old: u64, new: u64, flags: u64) -> SyscallResult {
        if flags & !(libc::O_CLOEXEC as u64) != 0 || old as u32 == new as u32 {
            return Err(Errno::INVAL.into());
        }
        self.closing(vec![new], |sentry| sentry.replace(old, new, flags, false))
    }

    pub(in crate::sentry) fn replace(
        &mut self,
        old: u64,
        new: u64,
        flags: u64,
        same: bool,
    ) -> SyscallResult {
        self.state.table.get(old)?;
        if old as u32 == new as u32 {
            return if same { Ok(SyscallControl::Value(new)) } else { Err(Errno::INVAL.into()) };
        }
        let close_on_exec = flags & libc::O_CLOEXEC as u64 != 0;
        let state = self.change();
        state.hold_for_waits(&[new]);
        let (number, last) = state.table.replace(old, new, close_on_exec)?;
        state.forget(last);
        Ok(SyscallControl::Value(u64::from(number)))
    }

    /// `close(2)`, as on Linux.
    pub(in crate::sentry) fn sys_close(&mut self, fd: u64) -> SyscallResult {
        self.closing(vec![fd], |sentry| sentry.close(fd))
    }

    pub(in crate::sentry) fn close(&mut self, descriptor: u64) -> SyscallResult {
        self.state.table.get(descriptor)?;
        let state = self.change();
        state.hold_for_waits(&[descriptor]);
        let last = state.table.close(descriptor)?;
        state.forget(last);
        Ok(ZERO)
    }

    /// `close_range(2)`: after `CLOSE_RANGE_UNSHARE` threads still share their descriptors.
    pub(in crate::sentry) fn sys_close_range(
        &mut self,
        first: u64,
        last: u64,
        flags: u64,
    ) -> SyscallResult {
        const UNSHARE: u32 = 2;
        const CLOEXEC: u32 = 4;
        let (first, last, flags) = (first as u32, last as u32, flags as u32);
        if first > last || flags & !(CLOEXEC | UNSHARE) != 0 {
            return Err(Errno::INVAL.into());
        }
        let own = self.state.processes.current_id();
        if flags & UNSHARE != 0 && self.state.table.is_shared(own) {
            self.state.table.check_unshare(own)?;
            self.change().table.unshare(own);
        }
        let numbers = self.state.table.numbers(first.into(), last.into());
        if flags & CLOEXEC != 0 {
            let table = &mut self.change().table;
            numbers.into_iter().try_for_each(|number| table.set_close_on_exec(number, true))?;
            return Ok(ZERO);
        }
        for part in numbers.chunks(CLOSED_TOGETHER) {
            self.closing(part.to_vec(), |sentry| {
                let state = sentry.change();
                state.hold_for_waits(part);
                state.close_all(part);
                Ok(ZERO)
            })?;
            // Each of them is an event of watchers.
            self.spend(part.len() * (1 + self.state.watchers as usize))?;
        }
        Ok(ZERO)
    }
}
