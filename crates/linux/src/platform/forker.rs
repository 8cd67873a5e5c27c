//! A stub process that forks on request, and the messages between it and the sentry.
//!
//! On a socket it receives a control area, and the other descriptors for its child. It answers with
//! the child's number. No guest ever runs in it.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use afresh_sys::host::process_cpu_time;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recv, sendmsg, socketpair,
};
use rustix::process::{
    Gid, Pid, PidfdFlags, Signal, Uid, WaitOptions, getegid, geteuid, pidfd_open,
    pidfd_send_signal, waitpid,
};
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

use super::control::Control;
use super::stub::STUB_TIMEOUT;
use super::{PlatformError, boot, stub};

/// A process that was forked for us. It is our child, though another made it.
#[derive(Debug)]
pub(super) struct SpawnedProcess {
    pub(super) pid: Pid,
    pub(super) pidfd: OwnedFd,
    /// The processor that it is kept on, if it is kept on one.
    pub(super) core: Option<usize>,
    /// The address of the vDSO, if it exists: the same in every process.
    pub(super) clock: Option<u64>,
    status: Option<ExitStatus>,
    /// Its CPU time when it ended.
    spent: Duration,
}

impl SpawnedProcess {
    /// The child `pid` of this process, which no thread has waited for, so the PID is its own.
    pub(super) fn new(pid: Pid, core: Option<usize>, clock: Option<u64>) -> Result<Self, Errno> {
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { pid, pidfd, core, clock, status: None, spent: Duration::ZERO })
    }

    pub(super) fn kill(&self) {
        // Only if it has ended already.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    pub(super) fn wait(&mut self) -> io::Result<ExitStatus> {
        let status = self.ended(WaitOptions::empty())?;
        status.ok_or_else(|| Errno::CHILD.into())
    }

    /// How it has ended, if it has.
    pub(super) fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.ended(WaitOptions::NOHANG)
    }

    /// Whether it has ended, though it may not be reaped.
    pub(super) fn has_ended(&self) -> bool {
        let mut wait = [PollFd::new(&self.pidfd, PollFlags::IN)];
        poll(&mut wait, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Its CPU time so far, if that is known.
    pub(super) fn cpu_time(&self) -> Option<Duration> {
        match self.status {
            // Its PID may be another process's.
            Some(_) => Some(self.spent),
            None => process_cpu_time(self.pid.as_raw_nonzero().get().unsigned_abs()),
        }
    }

    fn ended(&mut self, how: WaitOptions) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            if !how.contains(WaitOptions::NOHANG) {
                retry_on_intr(|| poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], None))?;
            }
            if self.has_ended() {
                self.spent = self.cpu_time().unwrap_or_default();
            }
            let found = retry_on_intr(|| waitpid(Some(self.pid), how))?;
            self.status = found.map(|(_, status)| ExitStatus::from_raw(status.as_raw()));
        }
        Ok(self.status)
    }
}

/// Descriptors that it can be sent at a time: a control area, an image's files, a socket.
const MAX_DESCRIPTORS: usize = 2 + boot::FILES;
/// A control message has a head of 16 bytes.
const _: () = assert!(16 + 4 * MAX_DESCRIPTORS <= stub::LENT_LEN);

/// Why it did not fork.
pub(super) enum ForkError {
    /// It has ended.
    Gone,
    /// The kernel refused.
    Errno(Errno),
}

impl From<Errno> for ForkError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::AGAIN => Self::Gone,
            errno => Self::Errno(errno),
        }
    }
}

/// The sentry's side of a process that forks.
pub(super) struct Forker {
    pub(super) pid: Pid,
    socket: OwnedFd,
    /// Where the vDSO is in it and its children.
    pub(super) clock: Option<u64>,
    user: (Uid, Gid),
    /// Its seccomp listener, while it boots.
    pub(super) control: Control,
}

/// The two ends of its socket: ours, and its own.
pub(super) fn ends() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // It may have been stopped from outside.
    set_socket_timeout(&ours, Timeout::Recv, Some(STUB_TIMEOUT))?;
    Ok((ours, theirs))
}

fn user() -> (Uid, Gid) {
    (geteuid(), getegid())
}

impl Forker {
    pub(super) fn new(pid: Pid, socket: OwnedFd, control: Control) -> Self {
        Self { pid, socket, clock: None, user: user(), control }
    }

    /// Whether its children have this process's IDs.
    pub(super) fn is_ours(&self) -> bool {
        self.user == user()
    }

    /// Takes a step of its preparation, which ends with a word that names the failed step.
    pub(super) fn prepared(
        &self,
        step: impl FnOnce(&Self) -> Result<i64, ForkError>,
    ) -> Result<(), PlatformError> {
        match step(self) {
            Ok(0) => Ok(()),
            Ok(error) => Err(unprepared(Errno::from_raw_os_error(error.wrapping_neg() as i32))),
            Err(ForkError::Errno(error)) => Err(unprepared(error)),
            Err(ForkError::Gone) => Err(unprepared(Errno::CHILD)),
        }
    }

    pub(super) fn say(&self, bytes: &[u8], lent: &[BorrowedFd<'_>]) -> Result<(), ForkError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !lent.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(lent));
        }
        let bytes = [IoSlice::new(bytes)];
        let flags = SendFlags::NOSIGNAL;
        retry_on_intr(|| sendmsg(&self.socket, &bytes, &mut ancillary, flags))?;
        Ok(())
    }

    /// A word of it.
    pub(super) fn hear(&self) -> Result<i64, ForkError> {
        let mut word = [0; 8];
        let heard = retry_on_intr(|| recv(&self.socket, &mut word, RecvFlags::empty()))?;
        match heard {
            (8, _) => Ok(i64::from_le_bytes(word)),
            _ => Err(ForkError::Gone),
        }
    }

    /// Has it fork: a child that carries out the orders in `control`; `lent` are its descriptors
    /// for those.
    pub(super) fn fork(
        &self,
        control: &Control,
        lent: &[BorrowedFd<'_>],
    ) -> Result<SpawnedProcess, ForkError> {
        // Here, for a word across processors takes ten times as long; its child is kept here then.
        let core = sched_getcpu();
        let mut here = CpuSet::new();
        here.set(core);
        let kept = sched_setaffinity(Some(self.pid), &here);
        let lent: Vec<_> = std::iter::once(control.file()).chain(lent.iter().copied()).collect();
        self.say(&[0], &lent)?;
        let made = self.hear()?;
        let pid = i32::try_from(made).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw);
        let Some(pid) = pid else {
            return Err(ForkError::Errno(Errno::from_raw_os_error(made.wrapping_neg() as i32)));
        };
        Ok(SpawnedProcess::new(pid, kept.is_ok().then_some(core), self.clock)?)
    }
}

pub(super) fn unprepared(error: impl Into<io::Error>) -> PlatformError {
    PlatformError::missing(
        "preparing the guest's process",
        error,
        "its mappings must not be sealed (CONFIG_MSEAL_SYSTEM_MAPPINGS), and the seccomp profile must allow memory calls",
    )
}
