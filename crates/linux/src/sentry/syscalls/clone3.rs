//! `clone3`: the same as `clone`, with its arguments in a structure.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::mm::user_memory::copy_in;
use crate::sentry::result::{SyscallControl, SyscallResult};

/// Bytes of the first version of `struct clone_args`, and of the known one.
const FIRST_LEN: u64 = 64;
const LEN: usize = 88;
/// Handlers of the child are the default ones.
const CLEAR_HANDLERS: u64 = 1 << 32;
/// The child starts in a given control group.
const INTO_CGROUP: u64 = 1 << 33;

impl Sentry {
    /// `clone3(2)`: as `clone`. `CLONE_INTO_CGROUP`, and `CLONE_PIDFD` with `CLONE_PARENT_SETTID`,
    /// are `ENOSYS`.
    pub(in crate::sentry) fn sys_clone3(
        &mut self,
        process: &mut Process,
        at: u64,
        size: u64,
    ) -> SyscallResult {
        if size < FIRST_LEN {
            return Err(Errno::INVAL.into());
        }
        if size > PAGE {
            return Err(Errno::TOOBIG.into());
        }
        let mut given = copy_in(process, at, size as usize)?;
        if given.iter().skip(LEN).any(|byte| *byte != 0) {
            return Err(Errno::TOOBIG.into());
        }
        given.resize(LEN, 0);
        let words: Vec<u64> = given
            .chunks_exact(8)
            .map(|word| word.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
            .collect();
        let [flags, pidfd, child, parent, signal, stack, stack_len, base, ids, id_count, _] =
            words[..]
        else {
            return Err(Errno::INVAL.into());
        };
        // Choosing the numbers takes a privilege.
        if ids != 0 || id_count != 0 {
            return Err(if id_count > 32 { Errno::INVAL } else { Errno::PERM }.into());
        }
        let described = flags & libc::CLONE_PIDFD as u64 != 0;
        let sets_parent_tid = flags & libc::CLONE_PARENT_SETTID as u64 != 0;
        let clears = flags & CLEAR_HANDLERS != 0;
        if flags & 0xff != 0
            || flags & !(u64::from(u32::MAX) | CLEAR_HANDLERS | INTO_CGROUP) != 0
            || signal > 64
            || (stack == 0) != (stack_len == 0)
            || clears && flags & libc::CLONE_SIGHAND as u64 != 0
            || flags & libc::CLONE_DETACHED as u64 != 0
        {
            return Err(Errno::INVAL.into());
        }
        // There is one control group. `clone` has one place for the number of the parent and for
        // the descriptor.
        if flags & INTO_CGROUP != 0 || described && sets_parent_tid {
            return self.refuse_unknown(libc::SYS_clone3);
        }
        let top = stack.checked_add(stack_len).ok_or(Errno::INVAL)?;
        let place = if described { pidfd } else { parent };
        let args = [flags & u64::from(u32::MAX) | signal, top, place, child, base, 0];
        let outcome = self.sys_clone(process, &args)?;
        if let SyscallControl::Fork(fork) = &outcome
            && clears
        {
            self.change().with(fork.id, |state| {
                state.processes.current.handlers.retain(|_, handler| {
                    let entry = handler.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
                    entry == libc::SIG_IGN as u64
                });
            });
        }
        Ok(outcome)
    }
}
