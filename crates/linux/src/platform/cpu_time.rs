//! CPU time of a process that runs a guest process, since the last measurement.

use std::time::Duration;

use super::process::Process;

impl Process {
    /// Nanoseconds since the last measurement, which this call renews. `None` without one since the
    /// last reset.
    pub(crate) fn take_spent(&mut self) -> u64 {
        let Some(used) = self.born.cpu_time() else { return 0 };
        let used = used.as_nanos() as u64;
        used.saturating_sub(self.counted.replace(used).unwrap_or(used))
    }

    /// The CPU time so far, if that is known.
    pub(crate) fn cpu_time(&self) -> Option<Duration> {
        self.born.cpu_time()
    }

    /// Drops the CPU time until now, or if it need not be exact, until the next measurement.
    pub(crate) fn forget_spent(&mut self, exact: bool) {
        self.counted = None;
        if exact {
            self.take_spent();
        }
    }
}
