//! Robust mutexes: what a thread holds when it ends is marked, and one of its waiters woken.
//!
//! Promises: as many entries of a list are followed as in Linux, and each once, however the guest
//! has linked them.

use std::collections::BTreeSet;

use rustix::io::Errno;

use crate::platform::{PlatformError, Process};
use crate::sentry::Sentry;
use crate::sentry::mm::user_memory::{copy_in, copy_out, word_in};
use crate::sentry::result::{SyscallError, SyscallResult, ZERO};

/// Length of `struct robust_list_head`.
const HEAD_LEN: u64 = 24;
/// Entries that are followed (`ROBUST_LIST_LIMIT`).
const ENTRIES: usize = 2048;
// A mutex's word.
const WAITERS: u32 = 0x8000_0000;
const OWNER_DIED: u32 = 0x4000_0000;
const OWNER: u32 = 0x3fff_ffff;

impl Sentry {
    /// `set_robust_list(2)`, as on Linux.
    pub(in crate::sentry) fn sys_set_robust_list(&mut self, head: u64, size: u64) -> SyscallResult {
        if size != HEAD_LEN {
            return Err(Errno::INVAL.into());
        }
        if self.state.current().threads.current().robust != head {
            self.change().current_mut().threads.current_mut().robust = head;
        }
        Ok(ZERO)
    }

    /// `get_robust_list(2)`: threads of other processes are `ESRCH`.
    pub(in crate::sentry) fn sys_get_robust_list(
        &mut self,
        process: &mut Process,
        thread: u64,
        head: u64,
        len: u64,
    ) -> SyscallResult {
        let threads = &self.state.current().threads;
        let id = if thread as u32 == 0 { threads.current_id() } else { thread as u32 };
        let robust = threads.get(id).ok_or(Errno::SRCH)?.robust;
        copy_out(process, len, &HEAD_LEN.to_le_bytes())?;
        copy_out(process, head, &robust.to_le_bytes())?;
        Ok(ZERO)
    }

    /// The current thread ends, or runs another program: marks the mutexes that it holds.
    pub(in crate::sentry) fn mark_mutexes(&mut self, process: &mut Process) -> SyscallResult<()> {
        let thread = self.state.current().threads.current_id();
        let head = self.state.current().threads.current().robust;
        if head == 0 {
            return Ok(());
        }
        self.mark_list(process, thread, head)
    }

    /// The lists of the threads of the current process, with their threads.
    pub(crate) fn robust_lists(&self) -> Vec<(u32, u64)> {
        let threads = self.state.current().threads.iter().filter(|(_, thread)| thread.robust != 0);
        threads.map(|(id, thread)| (id, thread.robust)).collect()
    }

    /// Marks the mutexes of one of the [lists](Self::robust_lists), whose process ends. A list that
    /// cannot be read ends there.
    pub(crate) fn mark_robust_list(
        &mut self,
        process: &mut Process,
        (thread, head): (u32, u64),
    ) -> Result<(), PlatformError> {
        match self.mark_list(process, thread, head) {
            Ok(()) | Err(SyscallError::Errno(_) | SyscallError::Paused) => Ok(()),
            Err(SyscallError::Broken(error)) => Err(error),
        }
    }

    fn mark_list(&mut self, process: &mut Process, thread: u32, head: u64) -> SyscallResult<()> {
        let word = |process: &Process, at: u64| word_in(process, at);
        let offset = word(process, head.wrapping_add(8))?;
        let pending = word(process, head.wrapping_add(16))?;
        let mut entry = word(process, head)?;
        let mut seen = BTreeSet::from([head]);
        // A further visit of an entry would find its mutex marked.
        while seen.len() <= ENTRIES && seen.insert(entry & !1) {
            // The entry may be linked anew once its mutex is marked.
            let next = word(process, entry & !1);
            if entry != pending {
                self.mark_mutex(process, thread, (entry & !1).wrapping_add(offset), false)?;
            }
            entry = next?;
        }
        if pending & !1 != 0 {
            self.mark_mutex(process, thread, (pending & !1).wrapping_add(offset), true)?;
        }
        Ok(())
    }

    fn mark_mutex(
        &mut self,
        process: &mut Process,
        thread: u32,
        at: u64,
        pending: bool,
    ) -> SyscallResult<()> {
        if !at.is_multiple_of(4) {
            return Err(Errno::INVAL.into());
        }
        let bytes = copy_in(process, at, 4)?;
        let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        if word & OWNER == thread {
            let marked = word & WAITERS | OWNER_DIED;
            copy_out(process, at, &marked.to_le_bytes())?;
        }
        // Its release may have woken no thread yet.
        let owned = word & OWNER == thread && word & WAITERS != 0;
        if owned || pending && word & OWNER == 0 {
            let futex = self.shared_futex(at);
            self.wake(futex, 1, u32::MAX);
        }
        Ok(())
    }
}
