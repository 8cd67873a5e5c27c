//! The keeping of exit statuses when a process is reaped, until its last descriptor is closed.

use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::state::Kernel;

impl Kernel {
    /// Whether a descriptor means a process.
    pub(in crate::sentry) fn is_described(&self, process: u32) -> bool {
        let mut all = self.table.descriptions();
        all.any(|(_, description)| description.open == FileObject::Process(process))
    }

    /// Keeps the status of a process that is reaped.
    pub(in crate::sentry::kernel) fn keep_status(&mut self, process: u32, status: i32) {
        if self.is_described(process) {
            self.exits.0.insert(process, status);
        }
    }

    /// Drops the status of a process if its last descriptor was closed.
    pub(in crate::sentry::kernel) fn drop_status(&mut self, process: u32) {
        if self.exits.0.contains_key(&process) && !self.is_described(process) {
            self.exits.0.remove(&process);
        }
    }
}
