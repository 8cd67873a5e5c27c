//! Forks of a guest process: the kernel gives the child the same mappings, and shares private pages
//! copy-on-write.
//!
//! The stub of the parent makes the call, as an order of the sentry. The child closes its
//! descriptors, maps its own control area and waits for orders. It is not watched. The filter and
//! its listener are inherited, so the listener of all descendants of a process is one. The kernel
//! reports the process that makes a call.
//!
//! A child may end before its first call: the kernel's OOM killer ends processes at any time. So
//! the kernel also writes its PID to the control area of the parent. A guest that forges orders
//! could write another PID there. The sentry accepts a PID only of a process with the [`ForkMark`]
//! of this fork.
//!
//! Promises: the child runs no code of the guest before its first orders. A fork that fails leaves
//! no process behind, and the end of a child fails its fork at once. May break it: content of an
//! image that is missing, which the caller waits for, because reports of missing pages are not
//! inherited. A host with a low limit of file locks, where processes get no mark.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_sys::host::random_word;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::{ExpectedReceipt, Process, ReceiptSource, STUB_TIMEOUT};
use crate::platform::commands::{Continuation, StubCommands};
use crate::platform::control::Control;
use crate::platform::forker::SpawnedProcess;
use crate::platform::listener::{Answer, SeccompNotification};
use crate::platform::{PlatformError, boot, stub, zygote};
use crate::resource_numbers::{RLIMIT_LOCKS, RLIMIT_NPROC};

/// The call that forks.
const FORK: [u64; 7] = [
    libc::SYS_clone as u64,
    stub::FORK_FLAGS as u64,
    0,
    stub::CONTROL + stub::CHILD_PID as u64,
    0,
    0,
    0,
];

/// How long the child without a mark of a parent that has failed is looked for.
const STRAY_TIMEOUT: Duration = Duration::from_secs(5);

const FORKING: &str = "forking a guest's process";

/// A child ended before it was ready.
pub(super) fn child_ended() -> PlatformError {
    PlatformError::kernel(FORKING, io::Error::other("a signal ended the new process"))
}

/// Reads a resource limit of the process `pid`.
fn limit(pid: Pid, resource: u32) -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    prlimit(pid, resource, std::ptr::null(), &raw mut limit)?;
    Ok(limit)
}

/// Sets a resource limit of the process `pid`.
fn set_limit(pid: Pid, resource: u32, limit: &libc::rlimit) -> io::Result<()> {
    prlimit(pid, resource, limit, std::ptr::null_mut())
}

/// `prlimit64`, with pointers that are null or valid for the call.
fn prlimit(
    pid: Pid,
    resource: u32,
    new: *const libc::rlimit,
    old: *mut libc::rlimit,
) -> io::Result<()> {
    // SAFETY: on 64-bit Linux `rlimit` is the `rlimit64` of the kernel. The call reads one such
    // structure at `new` and writes one at `old`. Both callers above pass null or a live reference.
    let done = unsafe {
        libc::syscall(libc::SYS_prlimit64, pid.as_raw_nonzero().get(), resource, new, old)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn limiting(error: io::Error) -> PlatformError {
    PlatformError::kernel("limiting a guest's processes", error)
}

/// Lets the process `pid` make processes, or none.
pub(super) fn allow_processes(pid: Pid, allowed: bool) -> Result<(), PlatformError> {
    let mut limit = limit(pid, RLIMIT_NPROC).map_err(limiting)?;
    limit.rlim_cur = if allowed { limit.rlim_max } else { 0 };
    set_limit(pid, RLIMIT_NPROC, &limit).map_err(limiting)
}

/// A random value in the limit of file locks, which a child inherits from its parent and a guest
/// cannot change. Linux has not used that limit since 2.4. Only the parent and the child of one
/// fork have the same value.
struct ForkMark(Option<u64>);

impl ForkMark {
    /// Marks the process `parent` for one fork.
    fn new(parent: Pid) -> Result<Self, PlatformError> {
        let mut limit = limit(parent, RLIMIT_LOCKS).map_err(limiting)?;
        // Under a low limit marks would not differ.
        if limit.rlim_max <= u32::MAX.into() {
            return Ok(Self(None));
        }
        let mark = random_word() % limit.rlim_max;
        limit.rlim_cur = mark;
        set_limit(parent, RLIMIT_LOCKS, &limit).map_err(limiting)?;
        Ok(Self(Some(mark)))
    }

    /// Whether `pid` is a process of this fork.
    fn is_of(&self, pid: Pid) -> bool {
        self.0.is_some() && limit(pid, RLIMIT_LOCKS).ok().map(|limit| limit.rlim_cur) == self.0
    }
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
    /// [`PlatformError::Kernel`] when the kernel has no room for a further process, or has ended
    /// it; this one waits for orders then. [`PlatformError::Missing`] when isolation is required,
    /// and the host lacks a layer.
    pub(crate) fn fork(&mut self) -> Result<Self, PlatformError> {
        zygote::check()?;
        // The child starts where this process is.
        self.follow();
        let mut control = Control::new()?;
        let mut receipts = ReceiptSource::new();
        let receipt = receipts.next();
        let steps = boot::write_fork(&mut control, receipt);
        let mark = ForkMark::new(self.born.pid)?;
        allow_processes(self.born.pid, true)?;
        let mut child = None;
        let made = self.order_fork(&mark, &mut child);
        let limited = match &made {
            // It has been reaped, and its PID may be another process's.
            Err(PlatformError::Ended(_)) => Ok(()),
            _ => allow_processes(self.born.pid, false),
        };
        let failed = made.as_ref().err();
        // A refused call has made no child, and its stub asks again.
        let refused = matches!(failed, Some(PlatformError::Kernel { .. })) && self.asked.is_some();
        if failed.is_some() && child.is_none() && !refused {
            // It makes no child after this.
            self.born.kill();
            let _ = self.born.wait();
            child = match mark.0 {
                Some(_) => self.made_child(&mark).unwrap_or_default(),
                None => self.stray(),
            };
        }
        self.control.write_word(stub::CHILD_PID, 0);
        let first = match made {
            Ok(first) => first,
            Err(error) => {
                child.into_iter().for_each(|child| end(child.pid));
                return Err(error);
            }
        };
        let Some(born) = child else { return Err(PlatformError::Late) };
        // From here on it ends with this value.
        let mut child = Self::with_listener(born, Arc::clone(&self.listener), control, receipts);
        child.window = self.window;
        child.mappings_bound = self.mappings_bound;
        limited?;
        allow_processes(child.born.pid, false)?;
        child.start_forked(first, &steps, receipt).map_err(|error| match error {
            PlatformError::Ended(_) => child_ended(),
            error => error,
        })?;
        Ok(child)
    }

    /// Has the stub fork. Returns the first call of the child, which waits.
    fn order_fork(
        &mut self,
        mark: &ForkMark,
        child: &mut Option<SpawnedProcess>,
    ) -> Result<SeccompNotification, PlatformError> {
        let deadline = Instant::now() + STUB_TIMEOUT;
        let frame = self.frame.unwrap_or(stub::ORDERS_LEN);
        let receipt = self.receipts.next();
        let orders = StubCommands { calls: vec![FORK], ..StubCommands::default() };
        self.control.write(0, &orders.encode(Continuation::Ask, self.bases, frame, receipt));
        self.control.write_word(stub::CHILD_PID, 0);
        let id = self.asked.take().ok_or_else(|| self.forged("it takes no orders now"))?;
        self.send(id, Answer::Value(0))?;
        let call = self.receive(deadline)?.ok_or(PlatformError::Late)?;
        self.require_order(&call, &FORK)?;
        self.send(call.id, Answer::Made)?;
        let (mut first, expected) = (None, ExpectedReceipt { receipt, frame });
        let waited = self.await_fork(expected, deadline, mark, &mut first, child);
        if child.is_none()
            && let Some((_, pid)) = &first
        {
            *child = Some(self.spawned(*pid)?);
        }
        waited?;
        first.map(|(call, _)| call).ok_or(PlatformError::Late)
    }

    /// Waits until the parent asks for orders and the child has made its first call: `first`, with
    /// its caller.
    fn await_fork(
        &mut self,
        expected: ExpectedReceipt,
        deadline: Instant,
        mark: &ForkMark,
        first: &mut Option<(SeccompNotification, Pid)>,
        child: &mut Option<SpawnedProcess>,
    ) -> Result<(), PlatformError> {
        // Parent and child come in any order; a parent whose call failed comes alone.
        while first.is_none() || self.asked.is_none() {
            let call = self.receive_any(deadline, child.as_ref())?.ok_or(PlatformError::Late)?;
            let Some(pid) = call.process().filter(|pid| *pid != self.born.pid) else {
                self.check_question(&call, expected)?;
                if first.is_none() {
                    *child = self.made_child(mark)?;
                }
                continue;
            };
            // It waits for an answer, so the PID is its own.
            if child.as_ref().is_some_and(|child| child.pid != pid) {
                end(pid);
                return Err(self.forged("another process has called"));
            }
            *first = Some((call, pid));
        }
        Ok(())
    }

    /// The child that the kernel has reported to the parent, which has made its call. `None`
    /// without a mark.
    fn made_child(&self, mark: &ForkMark) -> Result<Option<SpawnedProcess>, PlatformError> {
        if mark.0.is_none() {
            return Ok(None);
        }
        let reported = self.control.read_word(stub::CHILD_PID) as i32;
        let pid = Some(reported).filter(|pid| *pid > 0).and_then(Pid::from_raw);
        // Nothing has waited for the child, so the PID is its own.
        let pid = pid.filter(|pid| *pid != self.born.pid && mark.is_of(*pid));
        pid.map_or_else(|| Err(child_ended()), |pid| self.spawned(pid).map(Some))
    }

    /// The child without a mark that this process made before it ended, which calls soon. All other
    /// processes of the listener wait for answers.
    fn stray(&self) -> Option<SpawnedProcess> {
        let deadline = Instant::now() + STRAY_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let timeout = Timespec::try_from(left).unwrap_or_default();
            let mut wait = [PollFd::new(&*self.listener, PollFlags::IN)];
            match poll(&mut wait, Some(&timeout)) {
                Ok(1..) if wait[0].revents().contains(PollFlags::IN) => {}
                Err(Errno::INTR) => continue,
                // A hang-up alone: no process has this filter, so none is left.
                _ => return None,
            }
            let Ok(Some(call)) = self.listener.receive() else { continue };
            if let Some(pid) = call.process().filter(|pid| *pid != self.born.pid) {
                return self.spawned(pid).ok();
            }
        }
    }

    /// The forked process `pid`, which is ended if this process has no room for its descriptor.
    fn spawned(&self, pid: Pid) -> Result<SpawnedProcess, PlatformError> {
        SpawnedProcess::new(pid, self.born.core, self.born.clock).map_err(|error| {
            end(pid);
            PlatformError::kernel(FORKING, error)
        })
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
        self.question(ExpectedReceipt { receipt, frame: stub::ORDERS_LEN }, deadline)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use rustix::process::test_kill_process;

    use super::*;

    /// Stops a process at its next fork, by `ptrace`, and calls `then` with its child, which has
    /// run nothing. Returns once it is ready for the fork; `None` where this host forbids it.
    fn at_next_fork(
        parent: Pid,
        then: impl FnOnce(Pid) + Send + 'static,
    ) -> Option<std::thread::JoinHandle<Pid>> {
        let (ready, is_ready) = mpsc::channel();
        // A process has one thread that traces it, which waits for it, too.
        let tracer = std::thread::spawn(move || {
            let number = parent.as_raw_nonzero().get();
            let options = libc::PTRACE_O_TRACEFORK | libc::PTRACE_O_TRACECLONE;
            // SAFETY: the call reads and writes no memory of this process.
            let traced = unsafe { libc::ptrace(libc::PTRACE_SEIZE, number, 0, options) };
            ready.send(traced == 0).unwrap();
            if traced != 0 {
                return parent;
            }
            let (mut status, mut child) = (0, 0 as libc::c_ulong);
            // SAFETY: the calls write the two values, which live on.
            unsafe {
                assert_eq!(libc::waitpid(number, &raw mut status, libc::__WALL), number);
                assert!(matches!(status >> 16, libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_CLONE));
                assert_eq!(libc::ptrace(libc::PTRACE_GETEVENTMSG, number, 0, &raw mut child), 0);
            }
            let child = Pid::from_raw(child as i32).unwrap();
            then(child);
            // SAFETY: as above. A process that `then` has ended refuses it.
            unsafe { libc::ptrace(libc::PTRACE_DETACH, number, 0, 0) };
            child
        });
        if is_ready.recv().unwrap() {
            return Some(tracer);
        }
        println!("SKIPPED: this host allows no ptrace");
        None
    }

    fn process() -> Option<Process> {
        match Process::new(None, None) {
            Ok(process) => Some(process),
            Err(error @ PlatformError::Missing { .. }) => {
                println!("SKIPPED: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn kill(pid: Pid) {
        kill_process(pid, Signal::KILL).unwrap();
    }

    #[test]
    fn a_child_that_is_killed_before_its_first_call_fails_its_fork_alone() {
        let Some(mut parent) = process() else { return };
        let Some(tracer) = at_next_fork(parent.born.pid, kill) else { return };
        let error = parent.fork().unwrap_err();
        assert!(matches!(error, PlatformError::Kernel { .. }), "{error}");
        let child = tracer.join().unwrap();
        assert!(test_kill_process(child).is_err(), "it was not reaped");
        let next = parent.fork().unwrap();
        assert!(test_kill_process(next.born.pid).is_ok());
    }

    #[test]
    fn a_parent_that_is_killed_with_its_child_leaves_no_process() {
        let Some(mut parent) = process() else { return };
        let pid = parent.born.pid;
        let both = move |child| [child, pid].into_iter().for_each(kill);
        let Some(tracer) = at_next_fork(pid, both) else { return };
        let error = parent.fork().unwrap_err();
        assert!(matches!(error, PlatformError::Ended(_)), "{error}");
        let child = tracer.join().unwrap();
        assert!(test_kill_process(child).is_err(), "it was not reaped");
        assert!(parent.fork().is_err());
    }

    #[test]
    fn a_child_without_a_mark_is_ended_with_its_parent() {
        let Some(mut parent) = process() else { return };
        let pid = parent.born.pid;
        let low = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        set_limit(pid, RLIMIT_LOCKS, &low).unwrap();
        let Some(tracer) = at_next_fork(pid, move |_| kill(pid)) else { return };
        let error = parent.fork().unwrap_err();
        assert!(matches!(error, PlatformError::Ended(_)), "{error}");
        let child = tracer.join().unwrap();
        assert!(test_kill_process(child).is_err(), "it was not ended");
    }

    #[test]
    fn a_mark_is_of_one_fork() {
        let (Some(mut parent), Some(other)) = (process(), process()) else { return };
        let mark = ForkMark::new(parent.born.pid).unwrap();
        if mark.0.is_none() {
            return println!("SKIPPED: the limit of file locks is low");
        }
        let child = parent.fork().unwrap();
        assert!(!mark.is_of(child.born.pid) && !mark.is_of(other.born.pid));
        let mark = ForkMark::new(parent.born.pid).unwrap();
        assert!(mark.is_of(parent.born.pid) && !mark.is_of(child.born.pid));
        // As a forged PID would be.
        let report = u64::from(other.id());
        parent.control.write_word(stub::CHILD_PID, report);
        assert!(parent.made_child(&mark).is_err());
    }
}
