//! Locks that a process takes and leaves.

use crate::sentry::kernel::state::Kernel;

impl Kernel {
    /// Releases locks whose owners have ended.
    pub(in crate::sentry) fn drop_unowned(&mut self) {
        let (processes, table) = (&self.processes, &self.table);
        self.locks.retain(|id| processes.lives(id), |id| table.description(id).is_some());
    }
}
