//! Waiting for a word in memory to change. Both calls may be made in a signal handler.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Waits until `word` is woken, no longer equals `expected`, or `timeout` has passed; may return
/// early for no reason, so the caller looks again.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: the word and the timeout live through the call.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            expected,
            &raw const timeout,
        );
    }
}

/// Wakes all waiters for `word`.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: the call takes the word's address only as a key.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            i32::MAX,
        );
    }
}
