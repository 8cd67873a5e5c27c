//! Errors of the engine as Python exceptions: each keeps its cause, and the cause's cause.

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyTimeoutError};
use pyo3::prelude::*;

create_exception!(afresh, AfreshError, PyException, "The base of every error of this package.");
create_exception!(afresh, OpenError, AfreshError, "A guest cannot be opened or warmed.");
create_exception!(
    afresh,
    GuestError,
    AfreshError,
    "The guest failed: it trapped, or ended itself."
);
create_exception!(afresh, StoppedError, AfreshError, "The call was stopped by its host.");
create_exception!(
    afresh,
    SessionError,
    AfreshError,
    "A sandbox cannot be used or moved like this."
);
create_exception!(
    afresh,
    BusyError,
    SessionError,
    "Another call is under way in the same sandbox."
);
create_exception!(afresh, SaveError, AfreshError, "A state cannot be saved.");
create_exception!(
    afresh,
    MarshalError,
    AfreshError,
    "A value cannot be carried between host and guest."
);

/// The type of time limits: a subclass of `TimeoutError` and of our base class.
const TIMEOUT: &std::ffi::CStr = c"
class TimeLimitError(AfreshError, TimeoutError):
    '''The call ran longer than its time limit.'''
";

/// Adds the types to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    for (name, ty) in [
        ("AfreshError", py.get_type::<AfreshError>()),
        ("OpenError", py.get_type::<OpenError>()),
        ("GuestError", py.get_type::<GuestError>()),
        ("StoppedError", py.get_type::<StoppedError>()),
        ("SessionError", py.get_type::<SessionError>()),
        ("BusyError", py.get_type::<BusyError>()),
        ("SaveError", py.get_type::<SaveError>()),
        ("MarshalError", py.get_type::<MarshalError>()),
    ] {
        module.add(name, ty)?;
    }
    let scope = pyo3::types::PyDict::new(py);
    scope.set_item("AfreshError", py.get_type::<AfreshError>())?;
    scope.set_item("__name__", "afresh")?;
    py.run(TIMEOUT, Some(&scope), None)?;
    let Some(timeout) = scope.get_item("TimeLimitError")? else {
        unreachable!("it was just defined")
    };
    module.add("TimeLimitError", timeout)
}

/// An exception with every cause in its message, and each as its `__cause__`.
pub(crate) fn raise<E: pyo3::PyTypeInfo>(error: &dyn std::error::Error) -> PyErr {
    Python::attach(|py| {
        let raised = PyErr::from_type(py.get_type::<E>(), afresh::describe_error(error));
        if let Some(cause) = error.source() {
            raised.set_cause(py, Some(raise::<AfreshError>(cause)));
        }
        raised
    })
}

/// The exception for a time limit.
pub(crate) fn time_limit(message: String) -> PyErr {
    Python::attach(|py| {
        let found = py.import("afresh._native").and_then(|native| native.getattr("TimeLimitError"));
        match found.and_then(|ty| ty.call1((&message,))) {
            Ok(value) => PyErr::from_value(value),
            Err(_) => PyTimeoutError::new_err(message),
        }
    })
}

/// The Python exception for a failed call, unless the call itself has a more specific one.
pub(crate) fn of_call(error: &afresh::CallError) -> PyErr {
    match error {
        afresh::CallError::Timeout { .. } | afresh::CallError::CpuTime { .. } => {
            time_limit(afresh::describe_error(error))
        }
        afresh::CallError::Stopped { .. } => raise::<StoppedError>(error),
        _ => raise::<GuestError>(error),
    }
}

/// The Python exception for a refusing session.
pub(crate) fn of_session(error: &afresh::SessionError) -> PyErr {
    match error {
        afresh::SessionError::Call(error) => of_call(error),
        other => raise::<SessionError>(other),
    }
}
