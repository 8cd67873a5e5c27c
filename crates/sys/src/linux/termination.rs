//! SIGTERM and SIGINT as a flag, for services that put things in order before they end; and signals
//! that a thread waits for, for commands that pass them on.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Call, SysError, inject};

static REQUESTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: libc::c_int) {
    REQUESTED.store(true, Ordering::Release);
}

/// Turns the first SIGTERM or SIGINT into a flag, which this returns; system calls that wait end
/// with `EINTR` then. The next one of the same kind ends the process as usual, so that a service
/// which does not end in time can be ended.
///
/// # Errors
/// Any error of `sigaction`.
pub fn watch() -> Result<&'static AtomicBool, SysError> {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        inject::gate(Call::Signal)?;
        // SAFETY: an all-zero action with a handler is valid; the handler only stores to an atomic,
        // which is allowed in a signal handler, and is never unloaded.
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
    Ok(&REQUESTED)
}

/// Signals that are blocked in this thread, and in those that it starts from then on, and are
/// waited for.
#[derive(Clone, Copy)]
pub struct AwaitedSignals(libc::sigset_t);

impl std::fmt::Debug for AwaitedSignals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AwaitedSignals")
    }
}

impl AwaitedSignals {
    /// Blocks `signals`. Threads that run already still take them.
    ///
    /// # Errors
    /// Whatever `pthread_sigmask` says.
    pub fn block(signals: &[i32]) -> Result<Self, SysError> {
        inject::gate(Call::Signal)?;
        // SAFETY: the set is initialised before it is read; all calls only read and write it.
        let (set, rc) = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in signals {
                libc::sigaddset(&raw mut set, *signal);
            }
            (set, libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()))
        };
        if rc != 0 {
            return Err(SysError::new(Call::Signal, rc));
        }
        Ok(Self(set))
    }

    /// Waits for the next of them.
    #[must_use]
    pub fn wait(&self) -> Option<i32> {
        let mut signal = 0;
        // SAFETY: both pointers are to values of this frame.
        let rc = unsafe { libc::sigwait(&raw const self.0, &raw mut signal) };
        (rc == 0).then_some(signal)
    }
}
