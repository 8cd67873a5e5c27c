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
        let spent = process.take_spent();
        let state = self.change();
        state.processes.timed = true;
        state.spend(spent);
    }

    /// As [`Sentry::account`], and sends the signals of expired timers.
    pub(crate) fn measure(&mut self, process: &mut Process) {
        if self.state.is_measured() {
            self.account(process);
            self.change().ring_processor();
        }
    }

    /// `getrusage(2)`: all CPU time is user time, the maximum resident set is the memory that is
    /// mapped, and other counters are 0.
    pub(in crate::sentry) fn sys_getrusage(
        &mut self,
        process: &mut Process,
        who: u64,
        to: u64,
    ) -> SyscallResult {
        self.account(process);
        let spent = match who as i32 {
            libc::RUSAGE_SELF => self.state.current().info.spent,
            libc::RUSAGE_CHILDREN => self.state.current().info.children,
            libc::RUSAGE_THREAD => self.state.current().threads.current().spent,
            _ => return Err(Errno::INVAL.into()),
        };
        copy_out(process, to, &usage(spent, self.state.layout.bytes()))?;
        Ok(ZERO)
    }

    /// `times(2)`: all CPU time is user time.
    pub(in crate::sentry) fn sys_times(&mut self, process: &mut Process, to: u64) -> SyscallResult {
        self.account(process);
        let own = &self.state.current().info;
        let (spent, children) = (own.spent / TICK, own.children / TICK);
        if to != 0 {
            let bytes = StructBuilder::default().word(spent).word(0).word(children).word(0);
            copy_out(process, to, &bytes.0)?;
        }
        Ok(SyscallControl::Value(self.streams.clock.read(ClockId::Boottime) / TICK))
    }
}
