//! Readiness of descriptors, as the system calls see it.

use crate::sentry::Sentry;
use crate::sentry::kernel::readiness::PortCaller;
use crate::sentry::kernel::threads::MonotonicTime;

impl Sentry {
    /// The current thread, as one that asks.
    pub(in crate::sentry) fn asker(&self) -> PortCaller<'_> {
        PortCaller { streams: &self.streams, thread: self.state.current().threads.current_id() }
    }

    /// Whether a thread may run, or its wait is over, or a signal ends it.
    pub(in crate::sentry) fn is_ready(
        &self,
        id: u32,
        thread: &crate::sentry::kernel::threads::Thread,
        now: MonotonicTime,
    ) -> bool {
        match &thread.wait {
            None => true,
            Some(wait) => {
                self.state.deliverable(id) || self.state.is_over(&self.streams, id, wait, now)
            }
        }
    }

    /// The next thread in turn that may run; the current one last.
    pub(crate) fn next_ready(&self, now: MonotonicTime) -> Option<u32> {
        if self.state.current().info.stopped.is_some() {
            return None;
        }
        let mut turns = self.state.current().threads.in_turn();
        turns.find(|(id, thread)| self.is_ready(*id, thread, now)).map(|(id, _)| id)
    }
}
