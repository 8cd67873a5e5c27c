//! Long operations without a guest's call: opening, compiling, warming up, downloading, saving.
//!
//! They run on a separate thread, as in `exec.rs`. The caller's thread waits and looks at signals,
//! which Python handles on its main thread alone.
//!
//! Promises: an interruption and the end of the interpreter end the wait within [`STOP_TIMEOUT`].
//! An operation that cannot be stopped continues on its thread, and its result is dropped. May
//! break it: a handler of a signal that does not return.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::Builder;
use std::time::Duration;

use pyo3::prelude::*;

use crate::error::StoppedError;
use crate::exit;

/// Maximum time between two looks at signals.
const TICK: Duration = Duration::from_millis(10);
/// Maximum time that a stopped operation has to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Stack of the thread in bytes: enough for the largest Wasm guest and its compiler.
const STACK: usize = 32 << 20;

/// Runs `work` on another thread and waits for its result. `stop` ends it early.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    stop: impl Fn(),
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    exit::hold(py, || {
        let (send, mut done) = sync_channel(1);
        let thread = Builder::new().name("afresh-open".to_owned()).stack_size(STACK);
        let thread = thread.spawn(move || drop(send.send(work())))?;
        loop {
            match wait(py, &mut done, TICK) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => match thread.join() {
                    Err(panic) => std::panic::resume_unwind(panic),
                    Ok(()) => unreachable!("a thread that did not panic has sent its result"),
                },
            }
            if let Err(failed) = check(py) {
                stop();
                let late = wait(py, &mut done, STOP_TIMEOUT);
                py.detach(move || drop(late));
                return Err(failed);
            }
        }
    })
}

/// Waits without Python's lock.
fn wait<T: Send>(
    py: Python<'_>,
    done: &mut Receiver<T>,
    length: Duration,
) -> Result<T, RecvTimeoutError> {
    py.detach(move || {
        let result = done.recv_timeout(length);
        exit::park_if_finished();
        result
    })
}

/// The reason to end the wait now, as an error.
fn check(py: Python<'_>) -> PyResult<()> {
    py.check_signals()?;
    match exit::has_begun() && !exit::is_main_thread() {
        true => Err(StoppedError::new_err("the interpreter is shutting down")),
        false => Ok(()),
    }
}
