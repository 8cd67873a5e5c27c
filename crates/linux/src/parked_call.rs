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
    /// error. The current one does not run. If a process does not come, the guest is lost, and its
    /// other processes are left where they are.
    pub(crate) fn unpark_all(&mut self) -> Result<(), PlatformError> {
        if planted::is(Bug::ParkedCall) {
            return Ok(());
        }
        let mut done = self.body.unpark();
        for body in self.others.iter_mut() {
            if !matches!(done, Ok(()) | Err(PlatformError::Ended(_))) {
                break;
            }
            let next = body.unpark();
            done = done.and(next);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;
    use crate::error::WarmError;
    use crate::guest::{StopReason, after};
    use crate::platform::StubCommands;
    use crate::program::Program;
    use crate::sentry::{OutputSink, OutputSinks};

    /// A child that reads a pipe, and is asked twice for each line.
    const ASKS: &str = "mkfifo /tmp/to /tmp/back; cat /tmp/to >/tmp/back & exec 8<>/tmp/to 9<>/tmp/back; \
        while read line; do for turn in one two; do echo $turn >&8; read answer <&9; echo $answer; done; done";

    #[test]
    fn a_process_that_is_killed_while_it_waits_ends_the_call_alone() {
        let limit = Duration::from_secs(100);
        let program = Program::new("/bin/sh").arg("-c").arg(ASKS).env("PATH", "/usr/bin:/bin");
        let mut guest = match program.start(true, |_| Ok(())) {
            Ok(guest) => guest,
            Err(WarmError::Platform(error @ PlatformError::Missing { .. })) => {
                println!("SKIPPED: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let StopReason::Idle(wait) = guest.run(after(limit)).unwrap() else {
            panic!("it waits for a line");
        };
        let children: Vec<u32> = guest.others.iter_mut().map(|body| body.process.id()).collect();
        let [child] = children[..] else { panic!("one child: {children:?}") };
        let (sender, answers) = mpsc::channel();
        let hearer = OutputSink(Box::new(move |_, bytes| {
            sender.send(bytes.to_vec()).unwrap();
            kill_process(Pid::from_raw(child as i32).unwrap(), Signal::KILL).unwrap();
            true
        }));
        guest.sentry.streams.set_sinks(OutputSinks { hearer: Some(hearer), log: None, view: None });
        let orders = StubCommands::default();
        let resumed = guest.resume(&wait, Some(b"go\n"), orders, after(limit)).unwrap();
        assert!(resumed.is_none());
        let ended = guest.run(after(limit)).unwrap_err();
        assert!(matches!(ended, PlatformError::Ended(_)), "{ended}");
        assert_eq!(answers.try_iter().collect::<Vec<_>>(), [b"one\n"]);
    }
}
