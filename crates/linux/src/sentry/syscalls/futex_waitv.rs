//! `futex_waitv`: a wait for any of several futexes.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::threads::{FutexKey, MAX_FUTEXES, Wait, WaitReason};
use crate::sentry::mm::user_memory::copy_in;
use crate::sentry::result::{SyscallControl, SyscallResult};
use crate::sentry::syscalls::clock::length_in;
use crate::sentry::syscalls::thread::{PRIVATE, int_in};

/// Bytes of `struct futex_waitv`.
const WAITER_LEN: usize = 24;
/// The word has 32 bits (`FUTEX_32`), the only size that Linux serves.
const WORD_32: u32 = 2;

/// A futex in the list of a call.
struct Waiter {
    address: u64,
    flags: u32,
    value: u32,
}

/// The futexes of a call, checked as by Linux.
fn waiters_in(process: &Process, at: u64, count: usize) -> SyscallResult<Vec<Waiter>> {
    let bytes = copy_in(process, at, count * WAITER_LEN)?;
    let waiter = |bytes: &[u8]| {
        let word = |at: usize| [0, 1, 2, 3].map(|n| bytes[at + n]);
        let int = |at: usize| u32::from_le_bytes(word(at));
        let address = u64::from(int(8)) | u64::from(int(12)) << 32;
        let (value, flags, reserved) = (int(0), int(16), int(20));
        let known = WORD_32 | PRIVATE as u32;
        let sized = flags & WORD_32 != 0 && flags & !known == 0;
        if !sized || reserved != 0 || !address.is_multiple_of(4) {
            return Err(Errno::INVAL.into());
        }
        Ok(Waiter { address, flags, value })
    };
    bytes.chunks_exact(WAITER_LEN).map(waiter).collect()
}

impl Sentry {
    /// `futex_waitv(2)`, as on Linux.
    pub(in crate::sentry) fn sys_futex_waitv(
        &mut self,
        process: &Process,
        &[waiters, count, flags, timeout, clock, _]: &[u64; 6],
    ) -> SyscallResult {
        if let Some(wait) = &self.resumed {
            // A thread that continues was woken, or its time is over.
            return match wait.woken {
                true => Ok(SyscallControl::Value(wait.done)),
                false => Err(Errno::TIMEDOUT.into()),
            };
        }
        let count = count as u32 as usize;
        if flags as u32 != 0 || waiters == 0 || !(1..=MAX_FUTEXES).contains(&count) {
            return Err(Errno::INVAL.into());
        }
        let until = match timeout {
            0 => None,
            at => {
                if ![libc::CLOCK_MONOTONIC, libc::CLOCK_REALTIME].contains(&(clock as i32)) {
                    return Err(Errno::INVAL.into());
                }
                Some(self.moment_after(clock, length_in(process, at)?, true)?)
            }
        };
        let waiters = waiters_in(process, waiters, count)?;
        for waiter in &waiters {
            if int_in(process, waiter.address)? != waiter.value {
                return Err(Errno::AGAIN.into());
            }
        }
        self.state.processes.check_wait(count)?;
        let word = |waiter: &Waiter| self.futex_at(waiter.address, waiter.flags as i32);
        let words: Vec<FutexKey> = waiters.iter().map(word).collect();
        let order = self.change().current_mut().threads.next_order();
        Ok(SyscallControl::Wait(Wait::new(WaitReason::Futexes { words, order }, until)))
    }
}
