//! No counters of the processor.

use crate::{Call, SysError};

/// Counts instructions; cannot be started here.
#[derive(Debug)]
pub enum Instructions {}

impl Instructions {
    /// Always fails.
    ///
    /// # Errors
    /// `ENOSYS`.
    pub fn start() -> Result<Self, SysError> {
        Err(SysError::new(Call::Perf, libc::ENOSYS))
    }

    /// Unreachable: no value exists.
    ///
    /// # Errors
    /// None.
    pub fn count(&self) -> Result<u64, SysError> {
        match *self {}
    }
}
