//! A result that another thread will produce, for which a call waits under its limits.
//!
//! Tools run on threads and event loops of Python. A guest's thread waits for them here, without
//! Python's lock.
//!
//! Promises: a wait ends with the future, or within a tick of the moment when the call has reached
//! a limit. May break it: a future whose callbacks are not called.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use crate::exit;

/// Time between two looks at the limits.
const TICK: Duration = Duration::from_millis(5);

/// A `concurrent.futures.Future`, and how to abandon it.
#[pyclass(frozen, module = "afresh._native")]
pub(crate) struct Pending {
    future: Py<PyAny>,
    /// Called once nothing waits for the future any more.
    abandon: Py<PyAny>,
}

#[pymethods]
impl Pending {
    #[new]
    fn new(future: Py<PyAny>, abandon: Py<PyAny>) -> Self {
        Self { future, abandon }
    }
}

#[derive(Default)]
struct Signal {
    done: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for one tick at most; whether the future is done.
    fn wait(&self) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), TICK, |done| !*done);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The callback of a future.
#[pyclass(frozen)]
struct Wake {
    signal: Arc<Signal>,
}

#[pymethods]
impl Wake {
    fn __call__(&self, _future: &Bound<'_, PyAny>) {
        *self.signal.lock() = true;
        self.signal.changed.notify_all();
    }
}

impl Pending {
    /// The result of the future; `None` once `proceeds` refuses, which abandons it. A wait begins
    /// with the callback, and ends with one of the two: `_call_threads.py` counts calls by that.
    pub(crate) fn wait<'py>(
        &self,
        py: Python<'py>,
        mut proceeds: impl FnMut() -> bool,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let future = self.future.bind(py);
        let signal = Arc::new(Signal::default());
        let wake = Wake { signal: Arc::clone(&signal) };
        future.call_method1("add_done_callback", (Bound::new(py, wake)?,))?;
        loop {
            let done = py.detach(|| {
                let done = signal.wait();
                exit::park_if_finished();
                done
            });
            if done {
                return future.call_method0("result").map(Some);
            }
            if !proceeds() {
                self.abandon.bind(py).call0()?;
                return Ok(None);
            }
        }
    }
}
