//! SIGTERM and SIGINT as a flag, for services that put things in order before they end.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Call, SysError, inject};

static ASKED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: libc::c_int) {
    ASKED.store(true, Ordering::Release);
}

/// Turns the first SIGTERM or SIGINT into a flag, which this returns; system calls that wait end with `EINTR` then.
/// The next one of the same kind ends the process as usual, so that a service which does not end in time can be
/// ended.
///
/// # Errors
/// Any error of `sigaction`.
pub fn watch() -> Result<&'static AtomicBool, SysError> {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        inject::gate(Call::Signal)?;
        // SAFETY: an all-zero action with a handler is valid; the handler only stores to an atomic, which is allowed
        // in a signal handler, and is never unloaded.
        let rc = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESETHAND;
            libc::sigaction(signal, &action, std::ptr::null_mut())
        };
        if rc != 0 {
            return Err(SysError::last(Call::Signal));
        }
    }
    Ok(&ASKED)
}
