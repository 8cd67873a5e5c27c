//! Descriptors that are closed, and objects that end with their last one.

use crate::sentry::kernel::state::Kernel;

impl Kernel {
    /// Closes descriptors of the current process, and objects that have no other.
    pub(in crate::sentry) fn close_all(&mut self, descriptors: &[u64]) {
        for gone in self.table.close_all(descriptors) {
            self.forget(Some(gone));
        }
    }
}
