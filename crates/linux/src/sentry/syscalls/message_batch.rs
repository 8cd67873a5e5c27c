//! Several messages in one call: `sendmmsg` and `recvmmsg`, each as so many calls for one.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::threads::Wait;
use crate::sentry::mm::user_memory::{copy_in, copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult};
use crate::sentry::syscalls::read_write::MAX_TRANSFER;

/// Maximum messages of a call.
const UIO_MAXIOV: u64 = 1024;
/// A message (`struct mmsghdr`), and the place of its length.
const MMSGHDR_LEN: u64 = 64;
const MSG_LEN_OFFSET: u64 = 56;
/// Bytes that are copied in one step of a call.
const BYTES_PER_STEP: usize = 4096;

impl Sentry {
    /// `sendmmsg(2)`: as `sendmsg` for each message.
    pub(in crate::sentry) fn sys_sendmmsg(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        let done = self.resumed_bytes();
        self.one_by_one(process, a, done, |sentry, process, at, _| {
            sentry.sys_sendmsg(process, a[0], at, a[3])
        })
    }

    /// `recvmmsg(2)`: as `recvmsg` for each message, without `MSG_WAITALL`.
    pub(in crate::sentry) fn sys_recvmmsg(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        let (done, mut until) = match &self.resumed {
            Some(wait) => (wait.done, wait.until),
            None => (0, None),
        };
        if a[4] != 0 && self.resumed.is_none() {
            let seconds = word_in(process, a[4])?;
            let nanos = u64::from_le_bytes(
                copy_in(process, a[4].wrapping_add(8), 8)?.try_into().unwrap_or_default(),
            );
            if seconds > i64::MAX as u64 || nanos >= 1_000_000_000 {
                return Err(Errno::INVAL.into());
            }
            let length = seconds.saturating_mul(1_000_000_000).saturating_add(nanos);
            until = Some(self.now().saturating_add(length));
        }
        let outcome = self.one_by_one(process, a, done, |sentry, process, at, first| {
            // Only the first is waited for, where the caller says so.
            let later = a[3] as i32 & libc::MSG_WAITFORONE != 0 && !first;
            // A partly sent message cannot be reported after others.
            let flags = a[3] & !((libc::MSG_WAITFORONE | libc::MSG_WAITALL) as u64);
            let flags = if later { flags | libc::MSG_DONTWAIT as u64 } else { flags };
            sentry.sys_recvmsg(process, a[0], at, flags)
        })?;
        // The time is looked at between two messages.
        Ok(match (outcome, until) {
            (SyscallControl::Wait(wait), Some(at)) if at <= self.now() => {
                SyscallControl::Value(wait.done)
            }
            (SyscallControl::Wait(wait), until) => SyscallControl::Wait(Wait { until, ..wait }),
            (other, _) => other,
        })
    }

    /// Serves the messages from number `done` on, until one has to wait or cannot be served, or
    /// until they have the bytes of the largest message.
    fn one_by_one(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
        mut done: u64,
        one: impl Fn(&mut Self, &mut Process, u64, bool) -> SyscallResult,
    ) -> SyscallResult {
        self.socket_of(a[0])?;
        // The wait of one message does not count for the next.
        self.resumed = None;
        let mut bytes = 0;
        while done < a[2].min(UIO_MAXIOV) && bytes < MAX_TRANSFER {
            let at = a[1].wrapping_add(done * MMSGHDR_LEN);
            match one(self, process, at, done == 0) {
                Ok(SyscallControl::Value(len)) => {
                    copy_out(
                        process,
                        at.wrapping_add(MSG_LEN_OFFSET),
                        &(len as u32).to_le_bytes(),
                    )?;
                    done += 1;
                    bytes += len;
                    if self.is_spent(1 + len as usize / BYTES_PER_STEP) {
                        break;
                    }
                }
                Ok(SyscallControl::Wait(wait)) => {
                    return Ok(SyscallControl::Wait(Wait { done, ..wait }));
                }
                // The next call reports it.
                Err(SyscallError::Errno(_)) if done > 0 => break,
                other => return other,
            }
        }
        Ok(SyscallControl::Value(done))
    }
}
