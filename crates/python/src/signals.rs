//! Other handlers of the signals that wasmtime uses for traps.
//!
//! wasmtime notices traps by SIGILL and its like. Python's own handlers (`faulthandler`,
//! `signal.signal`) pass nothing on to handlers from before theirs, so one that comes after the
//! engine would turn a guest's trap into the end of the process. Those that come before receive
//! faults that are not the engine's. wasmtime of other packages passes on, too.

use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;

use crate::error::SessionError;

/// The signals of traps, faults and protected memory, with their names.
const SIGNALS: [(libc::c_int, &str); 4] = [
    (libc::SIGILL, "SIGILL"),
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGFPE, "SIGFPE"),
];

/// For each signal, the last handler that was found not to be Python's.
static CHECKED: [AtomicUsize; SIGNALS.len()] = [const { AtomicUsize::new(0) }; SIGNALS.len()];

/// Refuses to run a guest whose traps and faults would reach a Python handler: it would end the
/// process, or return to the faulting instruction without end.
pub(crate) fn check() -> PyResult<()> {
    for ((signal, name), checked) in SIGNALS.iter().zip(&CHECKED) {
        // SAFETY: all zeroes are a valid value of the plain structure, and the call only fills it
        // in.
        let handler = unsafe {
            let mut now: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(*signal, std::ptr::null(), &raw mut now) != 0 {
                continue;
            }
            now.sa_sigaction
        };
        if checked.load(Ordering::Relaxed) == handler {
            continue;
        }
        let removed = handler <= libc::SIG_IGN && checked.load(Ordering::Relaxed) > libc::SIG_IGN;
        if removed || handler > libc::SIG_IGN && is_of_python(handler) {
            return Err(SessionError::new_err(format!(
                "the handler of {name}, which notices guests' traps and faults, was replaced: call \
                 `signal.signal` and `faulthandler.enable()` before the first `afresh.warm`, or undo the latter with \
                 `faulthandler.disable()`"
            )));
        }
        checked.store(handler, Ordering::Relaxed);
    }
    Ok(())
}

/// Whether a function is in the same file as the interpreter.
#[cold]
fn is_of_python(function: usize) -> bool {
    let file = |address: usize| {
        // SAFETY: as above; the call only looks addresses up, and accepts any.
        unsafe {
            let mut found: libc::Dl_info = std::mem::zeroed();
            (libc::dladdr(address as *const _, &raw mut found) != 0)
                .then_some(found.dli_fbase as usize)
        }
    };
    let interpreter: unsafe extern "C" fn() -> std::ffi::c_int = pyo3::ffi::Py_IsInitialized;
    file(function).is_some_and(|base| Some(base) == file(interpreter as usize))
}
