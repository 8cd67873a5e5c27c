//! Calls of the guest that wait in the kernel while other processes run.
//!
//! A call that arrives without the stub and has to wait stays in the kernel, unanswered, and
//! another process runs. The call is answered once its wait is over. To take it to the stub first
//! would cost an interrupt and another notification, which is a third of a hand-over by pipe.
//!
//! Only a process with one thread and unshared memory waits there: its registers are in the kernel,
//! so no other thread could run. Signals and orders need the stub, and take the call there
//! first. So does a halt of the guest, for all processes: a freeze or a reset finds every process
//! in the stub.
//!
//! Promises: no signal but one that ends the process ends such a wait, because the filter has
//! `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`; so the notification stays valid, and the call is
//! answered once. May break it: a use of the registers of a process that is not known to be in the
//! stub.

use afresh_sys::planted::{self, Bug};

use crate::guest::Guest;
use crate::platform::{Call, PlatformError, Trap};
use crate::subprocess::Subprocess;

impl Subprocess {
    /// Leaves `call` in the kernel until its wait is over, if it is there.
    fn park(&mut self, call: &Call) {
        self.parked = Some(*call).filter(|call| matches!(call.place, Trap::Kernel(_)));
    }

    /// Takes a call that waits in the kernel to the stub.
    pub(crate) fn unpark(&mut self) -> Result<(), PlatformError> {
        if let Some(call) = self.parked {
            self.detach(&call)?;
            // A process that could not be taken there cannot be frozen.
            self.parked = None;
        }
        Ok(())
    }

    /// The call whose wait is over.
    pub(crate) fn waited_call(&mut self) -> Call {
        self.parked.take().unwrap_or_else(|| self.process.call())
    }
}

impl Guest {
    /// Keeps `call` of the current thread, which waits, where it costs least.
    pub(crate) fn park(&mut self, call: &Call) -> Result<(), PlatformError> {
        let processes = &self.sentry.state.processes;
        let current = &processes.current;
        let has_own_memory =
            current.info.memory == current.info.id && processes.borrowers().is_empty();
        if current.threads.len() == 1 && has_own_memory && !self.sentry.unattached {
            self.body.park(call);
            return Ok(());
        }
        self.body.detach(call)
    }

    /// Has every process in the stub, but for those that the host has ended, and returns the first
    /// error. The current one does not run.
    pub(crate) fn unpark_all(&mut self) -> Result<(), PlatformError> {
        if planted::is(Bug::ParkedCall) {
            return Ok(());
        }
        let own = self.body.unpark();
        self.others.iter_mut().map(Subprocess::unpark).fold(own, |first, next| first.and(next))
    }
}
