//! Forks of a guest process: the kernel gives the child the same mappings, and shares private pages copy-on-write.
//!
//! The stub of the parent makes the call, as an order of the sentry. The child closes its descriptors, maps its own
//! control area and waits for orders. It is not watched. The filter and its listener are inherited, so the listener of
//! all descendants of a process is one. The kernel reports the process that makes a call.
//!
//! Promises: the child runs no code of the guest before its first orders. A fork that fails leaves no process behind.
//! May break it: content of an image that is missing, which the caller waits for, because reports of missing pages are
//! not inherited.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::{Expected, Process, ReceiptSource, STUB_TIMEOUT};
use crate::platform::commands::{Continuation, StubCommands};
use crate::platform::control::Control;
use crate::platform::forker::SpawnedProcess;
use crate::platform::listener::{Answer, SeccompNotification};
use crate::platform::{PlatformError, boot, stub, zygote};

/// How long the child of a parent that has failed is looked for.
const STRAY_TIMEOUT: Duration = Duration::from_secs(1);

/// The call that forks.
const FORK: [u64; 7] = [libc::SYS_clone as u64, stub::FORK_FLAGS as u64, 0, 0, 0, 0, 0];

/// Lets the process `pid` make processes, or none.
pub(super) fn allow_processes(pid: Pid, allowed: bool) -> Result<(), PlatformError> {
    let failed =
        || PlatformError::kernel("limiting a guest's processes", std::io::Error::last_os_error());
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let number = pid.as_raw_nonzero().get();
    // SAFETY: the call writes one such structure, and reads none.
    let read =
        unsafe { libc::prlimit(number, libc::RLIMIT_NPROC, std::ptr::null(), &raw mut limit) };
    if read != 0 {
        return Err(failed());
    }
    limit.rlim_cur = if allowed { limit.rlim_max } else { 0 };
    // SAFETY: the call reads one such structure, and writes none.
    let set = unsafe {
        libc::prlimit(number, libc::RLIMIT_NPROC, &raw const limit, std::ptr::null_mut())
    };
    if set == 0 { Ok(()) } else { Err(failed()) }
}

/// Ends the child `pid` of this process, which no thread has waited for.
fn end(pid: Pid) {
    let _ = kill_process(pid, Signal::KILL);
    let _ = retry_on_intr(|| waitpid(Some(pid), WaitOptions::empty()));
}

impl Process {
    /// Forks it, while the stub waits for orders.
    ///
    /// # Errors
    /// [`PlatformError::Kernel`] when the kernel has no room for a further process; this one waits for orders then.
    /// [`PlatformError::Missing`] when walls are required, and the host lacks one.
    pub(crate) fn fork(&mut self) -> Result<Self, PlatformError> {
        zygote::check()?;
        // The child starts where this process is.
        self.follow();
        let mut control = Control::new()?;
        let mut receipts = ReceiptSource::new();
        let receipt = receipts.next();
        let steps = boot::write_fork(&mut control, receipt);
        allow_processes(self.born.pid, true)?;
        let mut first = None;
        let made = self.order_fork(&mut first);
        let limited = match &made {
            // It has been reaped, and its PID may be another process's.
            Err(PlatformError::Ended(_)) => Ok(()),
            _ => allow_processes(self.born.pid, false),
        };
        let Some((call, pid)) = first.filter(|_| made.is_ok()) else {
            // A refused call has made no child, and its stub asks again.
            let refused = matches!(made, Err(PlatformError::Kernel { .. })) && self.asked.is_some();
            match first {
                Some((_, pid)) => end(pid),
                None if refused => {}
                None => self.end_stray(),
            }
            return Err(made.err().unwrap_or(PlatformError::Late));
        };
        let born = SpawnedProcess::new(pid, self.born.core, self.born.clock).map_err(|error| {
            end(pid);
            PlatformError::kernel("forking a guest's process", error)
        })?;
        // From here on it ends with this value.
        let mut child = Self::with_listener(born, Arc::clone(&self.listener), control, receipts);
        child.window = self.window;
        child.mappings_bound = self.mappings_bound;
        limited?;
        allow_processes(child.born.pid, false)?;
        child.start_forked(call, &steps, receipt)?;
        Ok(child)
    }

    /// Has the stub fork. `first` is the first call of the child, which waits, and the child.
    fn order_fork(
        &mut self,
        first: &mut Option<(SeccompNotification, Pid)>,
    ) -> Result<(), PlatformError> {
        let deadline = Instant::now() + STUB_TIMEOUT;
        let frame = self.frame.unwrap_or(stub::ORDERS_LEN);
        let receipt = self.receipts.next();
        let orders = StubCommands { calls: vec![FORK], ..StubCommands::default() };
        self.control.write(0, &orders.encode(Continuation::Ask, self.bases, frame, receipt));
        let id = self.asked.take().ok_or_else(|| self.forged("it takes no orders now"))?;
        self.send(id, Answer::Value(0))?;
        let call = self.receive(deadline)?.ok_or(PlatformError::Late)?;
        self.require_order(&call, &FORK)?;
        self.send(call.id, Answer::Made)?;
        // Parent and child come in any order; a parent whose call failed comes alone.
        while first.is_none() || self.asked.is_none() {
            let call = self.receive_any(deadline)?.ok_or(PlatformError::Late)?;
            match call.process() {
                Some(pid) if pid != self.born.pid => *first = Some((call, pid)),
                _ => self.check_question(&call, Expected { receipt, frame })?,
            }
        }
        Ok(())
    }

    /// Takes a forked process from its first call to its first question.
    fn start_forked(
        &mut self,
        first: SeccompNotification,
        steps: &[[u64; 7]],
        receipt: u64,
    ) -> Result<(), PlatformError> {
        let deadline = Instant::now() + STUB_TIMEOUT;
        self.require_order(&first, &boot::control_area())?;
        self.listener.lend_as(first.id, self.control.file(), stub::CONTROL_FILE)?;
        self.send(first.id, Answer::Made)?;
        self.make_calls(steps, deadline)?;
        self.question(Expected { receipt, frame: stub::ORDERS_LEN }, deadline)
    }

    /// Ends this process, and a child that it made before it failed.
    fn end_stray(&mut self) {
        // It makes no child after this.
        self.born.kill();
        let _ = self.born.wait();
        let deadline = Instant::now() + STRAY_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let timeout = Timespec::try_from(left).unwrap_or_default();
            let mut wait = [PollFd::new(&*self.listener, PollFlags::IN)];
            match poll(&mut wait, Some(&timeout)) {
                Ok(1..) if wait[0].revents().contains(PollFlags::IN) => {}
                Err(Errno::INTR) => continue,
                // A hang-up alone: no process has this filter, so none is left.
                _ => return,
            }
            let Ok(Some(call)) = self.listener.receive() else { continue };
            if let Some(pid) = call.process().filter(|pid| *pid != self.born.pid) {
                return end(pid);
            }
        }
    }
}
