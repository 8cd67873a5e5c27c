//! The end of the interpreter, while daemon threads still run guests.
//!
//! A thread that takes Python's lock after finalization has begun is ended by CPython with
//! `pthread_exit`, also in a callback or a tool that this library called: that unwinds its frames,
//! and aborts the process. (Where PyO3 takes the lock, it lets the thread hang.) So a hook of
//! `atexit`, which runs before finalization, ends every call and waits for it. Its thread then
//! parks instead of returning to Python.
//!
//! Promises: no thread that ran a guest returns to Python once the hook has begun. The hook returns
//! while a call is under way only after [`CALLS_TIMEOUT`]. May break it: a tool without a time
//! limit, on a thread that `atexit` does not wait for and that is not a daemon.

use std::cell::Cell;
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

thread_local! {
    /// The calls in [`CALLS`] that this thread makes, one inside another.
    static OWN_CALLS: Cell<usize> = const { Cell::new(0) };
}

/// A call that the hook waits for.
struct CallGuard;

impl CallGuard {
    /// Python's lock is held, so the hook either sees the call or has begun.
    fn begin(_: Python<'_>) -> PyResult<Self> {
        if has_begun() && !is_main_thread() {
            return Err(SessionError::new_err("the interpreter is shutting down"));
        }
        CALLS.fetch_add(1, Ordering::AcqRel);
        OWN_CALLS.set(OWN_CALLS.get() + 1);
        Ok(Self)
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        release(1);
        OWN_CALLS.set(OWN_CALLS.get().saturating_sub(1));
    }
}

/// Ends so many calls. A child of a fork starts from zero, also inside a call.
fn release(count: usize) {
    let _ = CALLS.fetch_update(Ordering::AcqRel, Ordering::Acquire, |calls| {
        Some(calls.saturating_sub(count))
    });
}

/// Runs `work`, which may release Python's lock and take it again, as one call that the hook waits
/// for.
pub(crate) fn hold<R>(py: Python<'_>, work: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
    // Until the lock is held again: the hook does not return before.
    let running = CallGuard::begin(py)?;
    let result = work();
    if has_begun() {
        py.detach(park_if_exiting);
    }
    drop(running);
    result
}

/// Runs `work` without Python's lock, as one call that the hook waits for.
pub(crate) fn detach<R: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> PyResult<R> + Send,
) -> PyResult<R> {
    hold(py, || {
        py.detach(|| {
            let result = work();
            park_if_exiting();
            result
        })
    })
}

/// Keeps a thread other than the main one from returning to Python. The hook waits for its calls no
/// longer.
pub(crate) fn park_if_exiting() {
    if has_begun() && !is_main_thread() {
        park();
    }
}

/// Keeps a thread other than the main one from taking Python's lock once the hook has returned.
pub(crate) fn park_if_finished() {
    if FINISHED.load(Ordering::Acquire) && !is_main_thread() {
        park();
    }
}

fn park() -> ! {
    release(OWN_CALLS.take());
    loop {
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
