//! No signals: registrations are accepted and never called.

use std::sync::Arc;

pub use crate::cause::{Fault, FaultCause, FaultHandler, FaultSignal};

use crate::SysError;

/// Keeps a range registered.
#[derive(Debug)]
pub struct Registration(());

/// Accepts a range.
///
/// # Errors
/// None.
pub fn register(
    _start: *const u8,
    _len: usize,
    _handler: Arc<dyn FaultHandler>,
) -> Result<Registration, SysError> {
    Ok(Registration(()))
}

/// No runtime traps here.
#[must_use]
pub fn traps(_address: usize) -> bool {
    false
}

/// Nothing to install.
///
/// # Errors
/// None.
pub fn ensure_installed() -> Result<(), SysError> {
    Ok(())
}

/// Nothing to take away.
///
/// # Errors
/// None.
pub fn step_aside() -> Result<(), SysError> {
    Ok(())
}
