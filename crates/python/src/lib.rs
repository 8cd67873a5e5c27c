//! The native half of the Python package `afresh`: guests, sessions, commands, and the host side of
//! interpreters.
//!
//! Promises: no call of a guest holds Python's lock; one evaluation crosses between the languages
//! once; values from a guest are checked before they are converted. May break it: tools, which are
//! code of the caller and hold the lock.

// `afresh::linux` is missing elsewhere, and the errors of missing names would not give the reason.
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!(
    "the Python package of afresh has Linux programs, so it builds for Linux on x86_64 and aarch64 only"
);

mod background;
mod call;
mod error;
mod exec;
mod exit;
mod files;
mod linux;
mod objects;
mod outcome;
mod pending;
mod program;
mod python_type;
mod session;
mod signals;
mod text;
mod unlocked;
mod value;
mod warm;

use pyo3::prelude::*;

/// The parts of the Python module.
#[pymodule]
#[pyo3(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<linux::Connection>()?;
    module.add_class::<pending::Pending>()?;
    module.add_class::<session::Checkpoint>()?;
    module.add_class::<session::Session>()?;
    module.add_class::<session::Stopper>()?;
    module.add_class::<warm::Warm>()?;
    module.add_function(wrap_pyfunction!(value::encode, module)?)?;
    module.add_function(wrap_pyfunction!(value::decode, module)?)?;
    module.add_function(wrap_pyfunction!(linux::command, module)?)?;
    module.add_function(wrap_pyfunction!(linux::start_command, module)?)?;
    module.add_function(wrap_pyfunction!(linux::adopt_command, module)?)?;
    module.add_function(wrap_pyfunction!(linux::take_output, module)?)?;
    module.add_function(wrap_pyfunction!(linux::command_cost, module)?)?;
    module.add_function(wrap_pyfunction!(linux::begin_wait, module)?)?;
    module.add_function(wrap_pyfunction!(linux::check_wait, module)?)?;
    module.add_function(wrap_pyfunction!(linux::drive, module)?)?;
    module.add_function(wrap_pyfunction!(linux::dial, module)?)?;
    module.add_function(wrap_pyfunction!(linux::exchange, module)?)?;
    module.add_function(wrap_pyfunction!(linux::hang_up, module)?)?;
    module.add_function(wrap_pyfunction!(exec::run_program, module)?)?;
    module.add_function(wrap_pyfunction!(exit::end_calls, module)?)?;
    module.add_function(wrap_pyfunction!(exit::forget_calls, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)
}
