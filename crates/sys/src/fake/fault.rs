//! No signals in the interpreter: registrations are accepted and never called.

use std::sync::Arc;

use crate::SysError;

/// Which signal a fault came as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultSignal {
    /// SIGBUS.
    Bus,
    /// SIGSEGV.
    Segv,
}

/// Answers faults in a registered range.
pub trait FaultHandler: Send + Sync {
    /// Handles a fault at `address`.
    fn on_fault(&self, address: usize, signal: FaultSignal) -> bool;
}

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

/// Nothing to install.
///
/// # Errors
/// None.
pub fn ensure_installed() -> Result<(), SysError> {
    Ok(())
}
