//! The memory limit of a program between two calls.

use super::Instance;
use crate::error::CallError;
use crate::sentry::MAX_RESERVED;

impl Instance {
    /// Sets the memory limit of the program in its present state, as
    /// [`Program::memory_limit`](crate::Program::memory_limit). Memory that is already mapped
    /// stays, also beyond the limit. A reset or a switch restores the limit of its state.
    ///
    /// # Errors
    /// [`CallError::NeedsReset`] after a call that was cut short; when the host cannot run guests.
    pub fn limit_memory(&mut self, bytes: u64) -> Result<(), CallError> {
        let bytes = bytes.min(MAX_RESERVED);
        if self.memory_limit() != bytes {
            self.live_sentry()?.change().limit_memory(bytes);
        }
        Ok(())
    }

    /// Bytes that the processes of the program have mapped together in its present state, as the
    /// memory limit counts them.
    #[must_use]
    pub fn mapped_memory(&self) -> u64 {
        self.state().mapped_memory()
    }

    /// The memory limit of the program in its present state.
    #[must_use]
    pub fn memory_limit(&self) -> u64 {
        self.state().memory_limit()
    }
}
