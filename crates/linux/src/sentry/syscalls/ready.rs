//! Readiness of descriptors and threads, as the system calls and the scheduler see it.

use crate::sentry::Sentry;
use crate::sentry::kernel::epoll::ReadySets;
use crate::sentry::kernel::readiness::PortCaller;
use crate::sentry::kernel::time::MonotonicTime;

impl Sentry {
    /// The current thread, as one that asks.
    pub(in crate::sentry) fn asker(&self) -> PortCaller<'_> {
        PortCaller { streams: &self.streams, thread: self.state.current().threads.current_id() }
    }

    /// The threads of the current process in turn, the current one last; none if it is stopped.
    pub(crate) fn threads_in_turn(&self) -> Vec<u32> {
        let current = self.state.current();
        let stopped = current.info.stopped.is_some();
        if stopped { Vec::new() } else { current.threads.in_turn().map(|(id, _)| id).collect() }
    }

    /// Whether a thread of the current process may run, or its wait is over, or a signal ends it.
    pub(crate) fn is_ready(&self, id: u32, now: MonotonicTime, sets: &mut ReadySets) -> bool {
        let Some(thread) = self.state.current().threads.get(id) else { return false };
        if self.state.processes.tracing.is_stopped(id) {
            return false;
        }
        thread.wait.as_ref().is_none_or(|wait| {
            self.state.deliverable(id) || self.state.is_over(&self.streams, id, wait, now, sets)
        })
    }
}
