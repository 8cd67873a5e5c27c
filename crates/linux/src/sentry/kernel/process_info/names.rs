//! Names and credentials of the current process.

use super::Executable;
use crate::sentry::kernel::state::Kernel;

impl Kernel {
    /// Sets the auxiliary vector of the current process.
    pub(crate) fn set_auxiliary_vector(&mut self, vector: &[u8]) {
        self.processes.current.info.strings.vector = vector.into();
    }

    /// Sets the program of the current process.
    pub(crate) fn set_program(&mut self, executable: Executable) {
        let thread = self.processes.current.threads.current_mut();
        let len = executable.name.len().min(thread.name.len() - 1);
        thread.name = Default::default();
        thread.name[..len].copy_from_slice(&executable.name[..len]);
        self.processes.current.info.program = executable.program;
        self.processes.current.info.strings = executable.strings;
    }
}
