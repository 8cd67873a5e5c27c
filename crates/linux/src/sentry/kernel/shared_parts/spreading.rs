//! Changes of parts that processes share, made for all of them.

use super::SharedPart;
use crate::sentry::kernel::state::Kernel;

impl Kernel {
    /// The current process has changed its directories or its mask: so do those that share them.
    pub(in crate::sentry) fn spread_directories(&mut self) {
        let own = self.processes.current_id();
        for peer in self.shared_parts.peers(SharedPart::Directories, own) {
            let current = &self.processes.current;
            let (directory, root, umask) = (current.directory, current.root, current.umask);
            // The current process has both open, so that they can be held again.
            if [Some(directory), root]
                .into_iter()
                .flatten()
                .any(|node| self.tree.hold(node).is_err())
            {
                continue;
            }
            let Some(process) = self.processes.get_mut(peer) else { continue };
            let old = [Some(process.directory), process.root];
            (process.directory, process.root, process.umask) = (directory, root, umask);
            old.into_iter().flatten().for_each(|node| self.tree.release(node));
        }
    }

    /// The current process has set an action of a signal: so do those that share them.
    pub(in crate::sentry) fn spread_action(&mut self, signal: u64) {
        let own = self.processes.current_id();
        let action = self.processes.current.handlers.get(&signal).copied().unwrap_or_default();
        for peer in self.shared_parts.peers(SharedPart::Handlers, own) {
            if let Some(process) = self.processes.get_mut(peer) {
                process.handlers.insert(signal, action);
            }
        }
    }
}
