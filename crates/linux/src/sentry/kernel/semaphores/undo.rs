//! Adjustments of semaphores as a process ends.

use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::WaitReason;

impl Kernel {
    /// Threads that wait until a semaphore is zero, or, if not `zero`, until it grows.
    pub(in crate::sentry) fn waiting_for_semaphore(&self, id: u64, number: u64, zero: bool) -> u64 {
        let threads = self.processes.threads();
        let waits =
            threads.filter(|(_, thread)| match &thread.wait.as_ref().map(|wait| &wait.reason) {
                Some(WaitReason::Semaphores(set, operations)) if u64::from(*set) == id => {
                    operations.iter().any(|operation| {
                        u64::from(operation.number) == number && (operation.change == 0) == zero
                    })
                }
                _ => false,
            });
        waits.count() as u64
    }
}
