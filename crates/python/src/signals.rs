//! Who else handles the signals by which a guest's trap is noticed.
//!
//! wasmtime notices traps by SIGILL and its like. Python's own handlers (`faulthandler`, `signal.signal`) pass nothing on
//! to handlers from before theirs, so one that comes after the engine would turn a guest's trap into the end of the process.
//! Those that come before are passed what is not the engine's. wasmtime of other packages passes on, too.

use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;

use crate::error::SessionError;

/// The handler that was found good last.
static GOOD: AtomicUsize = AtomicUsize::new(0);

/// Refuses to run a guest whose trap would end the process.
pub(crate) fn check() -> PyResult<()> {
    // SAFETY: all zeroes are a valid value of the plain structure, and the call only fills it in.
    let handler = unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGILL, std::ptr::null(), &raw mut now) != 0 {
            return Ok(());
        }
        now.sa_sigaction
    };
    if GOOD.load(Ordering::Relaxed) == handler {
        return Ok(());
    }
    if handler > libc::SIG_IGN && is_of_python(handler) {
        return Err(SessionError::new_err(
            "Python handles SIGILL itself since after the first guest was opened, and would end the process at a guest's \
             trap: call `faulthandler.enable()` before the first `afresh.warm`, or `faulthandler.disable()` now",
        ));
    }
    GOOD.store(handler, Ordering::Relaxed);
    Ok(())
}

/// Whether a function lies in the same file as the interpreter.
#[cold]
fn is_of_python(function: usize) -> bool {
    let file = |address: usize| {
        // SAFETY: as above; the call only looks addresses up, whatever they are.
        unsafe {
            let mut found: libc::Dl_info = std::mem::zeroed();
            (libc::dladdr(address as *const _, &raw mut found) != 0)
                .then_some(found.dli_fbase as usize)
        }
    };
    let interpreter: unsafe extern "C" fn() -> std::ffi::c_int = pyo3::ffi::Py_IsInitialized;
    file(function).is_some_and(|base| Some(base) == file(interpreter as usize))
}
