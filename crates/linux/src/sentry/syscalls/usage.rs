//! CPU time in system calls: `getrusage`, `times`.

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::cpu_time::{TICK, usage};
use crate::sentry::mm::user_memory::copy_out;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use rustix::io::Errno;
use rustix::time::ClockId;

impl Sentry {
    /// Measures the CPU time of the current process, for limits and timers.
    pub(crate) fn account(&mut self, process: &mut Process) {
        let (spent, served) = (process.take_spent(), std::mem::take(&mut self.served));
        let state = self.change();
        state.processes.timed = true;
        state.spend(spent);
        state.spend_system(served);
    }

    /// As [`Sentry::account`], and sends the signals of expired timers.
    pub(crate) fn measure(&mut self, process: &mut Process) {
        if self.state.is_measured() {
            self.account(process);
            self.change().ring_processor();
        }
    }

    /// `getrusage(2)`: system time is that of a process, and none is a thread's. The maximum
    /// resident set is the memory that is mapped, and other counters are 0.
    pub(in crate::sentry) fn sys_getrusage(
        &mut self,
        process: &mut Process,
        who: u64,
        to: u64,
    ) -> SyscallResult {
        self.account(process);
        let [own, children] = self.state.system_times.of(self.state.processes.current_id());
        let (spent, system) = match who as i32 {
            libc::RUSAGE_SELF => (self.state.current().info.spent, own),
            libc::RUSAGE_CHILDREN => (self.state.current().info.children, children),
            libc::RUSAGE_THREAD => (self.state.current().threads.current().spent, 0),
            _ => return Err(Errno::INVAL.into()),
        };
        copy_out(process, to, &usage(spent, system, self.state.layout.bytes()))?;
        Ok(ZERO)
    }

    /// `times(2)`, as on Linux.
    pub(in crate::sentry) fn sys_times(&mut self, process: &mut Process, to: u64) -> SyscallResult {
        self.account(process);
        let own = &self.state.current().info;
        let (spent, children) = (own.spent / TICK, own.children / TICK);
        if to != 0 {
            let system = self.state.system_times.of(self.state.processes.current_id());
            let [own, theirs] = system.map(|time| time / TICK);
            let bytes = StructBuilder::default().word(spent).word(own).word(children).word(theirs);
            copy_out(process, to, &bytes.0)?;
        }
        Ok(SyscallControl::Value(self.streams.clock.read(ClockId::Boottime) / TICK))
    }
}
