//! Futexes whose word has the owner's thread (`FUTEX_LOCK_PI` and its kind). Threads of a guest run
//! by turns, so that an owner inherits no priority.
//!
//! Promises: a lock goes to the thread that has waited longest, and an owner that does not exist is
//! an error.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::kernel::time::MonotonicTime;
use crate::sentry::mm::user_memory::copy_out;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::thread::int_in;

const WAITERS: u32 = 1 << 31;
const OWNER_DIED: u32 = 1 << 30;
const OWNER: u32 = OWNER_DIED - 1;

impl Sentry {
    /// Takes a lock that is free; whether it is the caller's now.
    fn take_lock(&mut self, process: &mut Process, word: u64) -> SyscallResult<bool> {
        let own = self.state.current().threads.current_id();
        let value = int_in(process, word)?;
        let owner = value & OWNER;
        if owner == 0 {
            copy_out(process, word, &(own | value & (WAITERS | OWNER_DIED)).to_le_bytes())?;
            return Ok(true);
        }
        if owner == own {
            return Err(Errno::DEADLK.into());
        }
        let lives = self.state.processes.threads().any(|(id, _)| id == owner);
        if lives { Ok(false) } else { Err(Errno::SRCH.into()) }
    }

    /// `FUTEX_LOCK_PI`: waits until `until` at most.
    pub(in crate::sentry) fn lock_futex(
        &mut self,
        process: &mut Process,
        word: u64,
        until: Option<MonotonicTime>,
    ) -> SyscallResult {
        if let Some(wait) = &self.resumed {
            if !wait.woken {
                return Err(Errno::TIMEDOUT.into());
            }
            if int_in(process, word)? & OWNER == self.state.current().threads.current_id() {
                return Ok(ZERO);
            }
        }
        if self.take_lock(process, word)? {
            return Ok(ZERO);
        }
        let value = int_in(process, word)?;
        copy_out(process, word, &(value | WAITERS).to_le_bytes())?;
        let order = self.change().current_mut().threads.next_order();
        let place = self.shared_futex(word).place;
        let reason = WaitReason::Futex { address: word, bits: u32::MAX, order, place };
        Ok(SyscallControl::Wait(Wait::new(reason, until)))
    }

    /// `FUTEX_TRYLOCK_PI`.
    pub(in crate::sentry) fn try_lock_futex(
        &mut self,
        process: &mut Process,
        word: u64,
    ) -> SyscallResult {
        if self.take_lock(process, word)? { Ok(ZERO) } else { Err(Errno::AGAIN.into()) }
    }

    /// `FUTEX_UNLOCK_PI`: the lock goes to the thread that has waited longest.
    pub(in crate::sentry) fn unlock_futex(
        &mut self,
        process: &mut Process,
        word: u64,
    ) -> SyscallResult {
        if int_in(process, word)? & OWNER != self.state.current().threads.current_id() {
            return Err(Errno::PERM.into());
        }
        let futex = self.shared_futex(word);
        let has_place = futex.place.is_some();
        let is_shared = self.state.processes.has_other_threads(has_place);
        let state = self.change();
        let mut waiting = state.processes.current.threads.waiting_here(futex, u32::MAX);
        let mut heir = None;
        if let Some(&id) = waiting.first() {
            heir =
                state.processes.current.threads.get_mut(id).and_then(|thread| thread.wait.as_mut());
        } else if is_shared {
            for threads in state.processes.other_threads_mut(has_place) {
                waiting = threads.waiting(futex, u32::MAX);
                if let Some(&id) = waiting.first() {
                    heir = threads.get_mut(id).and_then(|thread| thread.wait.as_mut());
                    break;
                }
            }
        }
        let new = match (heir, waiting.first()) {
            (Some(wait), Some(&id)) => {
                wait.wake(futex);
                id | if waiting.len() > 1 || is_shared { WAITERS } else { 0 }
            }
            _ => 0,
        };
        copy_out(process, word, &new.to_le_bytes())?;
        Ok(ZERO)
    }
}
