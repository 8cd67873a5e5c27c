//! Processor time of a process that plays one of the guest's: what it has used since that was last looked at.

use afresh_sys::host::process_cpu_time;

use super::process::Process;

impl Process {
    /// Nanoseconds since the last look, and notes this one. None where nobody has looked since it was brought back.
    pub(crate) fn take_spent(&mut self) -> u64 {
        let Some(used) = process_cpu_time(self.id()) else { return 0 };
        let used = used.as_nanos() as u64;
        used.saturating_sub(self.counted.replace(used).unwrap_or(used))
    }

    /// What it has used until now counts for nobody: until the next look, or, if it is to be exact, until now.
    pub(crate) fn forget_spent(&mut self, exact: bool) {
        self.counted = None;
        if exact {
            self.take_spent();
        }
    }
}
