//! The end of the interpreter, while daemon threads still run guests.
//!
//! A thread that takes Python's lock after finalization has begun is ended by CPython with `pthread_exit`, which
//! unwinds this library's frames and aborts the process. So a hook of `atexit`, which runs before finalization,
//! ends every call and waits for it. Its thread then parks instead of returning to Python.
//!
//! Promises: no thread that ran a guest returns to Python once the hook has begun.
//! May break it: a tool without a time limit, on a thread that `atexit` does not wait for and that is not a daemon.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::error::SessionError;

/// Maximum time that the hook waits for calls to end.
const CALLS_TIMEOUT: Duration = Duration::from_secs(2);

static EXITING: AtomicBool = AtomicBool::new(false);
static FINISHED: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Whether the interpreter is about to end, so that calls must.
pub(crate) fn has_begun() -> bool {
    EXITING.load(Ordering::Acquire)
}

/// Whether this is the thread that the interpreter ends on.
pub(crate) fn is_main_thread() -> bool {
    // SAFETY: both calls only return a number.
    unsafe { libc::getpid() == libc::gettid() }
}

/// Runs `work` without Python's lock, as one call that the hook waits for.
pub(crate) fn detach<R: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> PyResult<R> + Send,
) -> PyResult<R> {
    struct Running;
    impl Drop for Running {
        fn drop(&mut self) {
            // A child of a fork starts from zero, also inside a call.
            let _ = CALLS
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |calls| calls.checked_sub(1));
        }
    }
    if has_begun() && !is_main_thread() {
        return Err(SessionError::new_err("the interpreter is shutting down"));
    }
    py.detach(|| {
        CALLS.fetch_add(1, Ordering::AcqRel);
        let running = Running;
        let result = work();
        drop(running);
        park_if_exiting();
        result
    })
}

/// Keeps a thread other than the main one from returning to Python.
pub(crate) fn park_if_exiting() {
    while has_begun() && !is_main_thread() {
        std::thread::park();
    }
}

/// Keeps a thread other than the main one from taking Python's lock once the hook has returned.
pub(crate) fn park_if_finished() {
    while FINISHED.load(Ordering::Acquire) && !is_main_thread() {
        std::thread::park();
    }
}

/// Forgets the calls of other threads, which a child of a fork does not have.
#[pyfunction]
pub(crate) fn forget_calls() {
    CALLS.store(0, Ordering::Release);
}

/// The hook.
#[pyfunction]
pub(crate) fn end_calls(py: Python<'_>) {
    EXITING.store(true, Ordering::Release);
    py.detach(|| {
        let started = Instant::now();
        while CALLS.load(Ordering::Acquire) > 0 && started.elapsed() < CALLS_TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
        FINISHED.store(true, Ordering::Release);
    });
}
