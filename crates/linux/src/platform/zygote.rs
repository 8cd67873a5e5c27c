//! The process that guests' processes are forked from.
//!
//! It is a stub in which no guest has ever run: it has given up what a guest's process must not have, and forks when it is asked to. To
//! fork a process of five mappings takes a fraction of what a new program takes. Its children are this process's, and end with it.
//!
//! It stays where it was started: its children have the user, the groups and the cgroup that this process had then, and the zygote's
//! own namespaces, where the host gives it some. When the user or the group is another one, there is a new zygote. A child that this process forks has a zygote of its own.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};

use afresh_sys::{Memfd, PerProcess};
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
use rustix::thread::{CpuSet, UnshareFlags, sched_getcpu, sched_setaffinity, unshare_unsafe};

use super::control::Control;
use super::process::PATIENCE;
use super::{PlatformError, boot, spawn, stub};

/// A process that was forked for us. It is our child, though another made it.
#[derive(Debug)]
pub(super) struct Born {
    pub(super) pid: Pid,
    pub(super) pidfd: OwnedFd,
    /// The processor that it is kept on, if it is kept on one.
    pub(super) core: Option<usize>,
    /// Where the vDSO is, if there is one: at the same place in every process.
    pub(super) clock: Option<u64>,
    status: Option<ExitStatus>,
}

impl Born {
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

    fn ended(&mut self, how: WaitOptions) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            let found = retry_on_intr(|| waitpid(Some(self.pid), how))?;
            self.status = found.map(|(_, status)| ExitStatus::from_raw(status.as_raw()));
        }
        Ok(self.status)
    }
}

/// Why it did not fork.
enum Refusal {
    /// It is no more.
    Gone,
    /// The kernel refused.
    Errno(Errno),
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::AGAIN => Self::Gone,
            errno => Self::Errno(errno),
        }
    }
}

struct Zygote {
    process: Child,
    socket: OwnedFd,
    clock: Option<u64>,
    user: (Uid, Gid),
    /// What it waits in. It is ours only as long as it boots.
    control: Control,
}

static ZYGOTE: PerProcess<Mutex<Option<Zygote>>> = PerProcess::new(|| Mutex::new(None));

/// Starts a process that carries out the orders in `control`; `image` is its descriptor for those.
pub(super) fn start(
    control: &Control,
    image: Option<BorrowedFd<'_>>,
) -> Result<Born, PlatformError> {
    let mut held = ZYGOTE.get().lock().unwrap_or_else(PoisonError::into_inner);
    let refused = |errno: Errno| PlatformError::kernel("making a guest's process", errno);
    if let Some(zygote) = held.as_ref().filter(|zygote| zygote.user == user()) {
        match zygote.fork(control, image) {
            Ok(born) => return Ok(born),
            Err(Refusal::Errno(errno)) => return Err(refused(errno)),
            Err(Refusal::Gone) => {}
        }
    }
    // None yet, or one that somebody has killed.
    *held = None;
    held.insert(Zygote::new()?).fork(control, image).map_err(|refusal| match refusal {
        Refusal::Errno(errno) => refused(errno),
        Refusal::Gone => refused(Errno::CHILD),
    })
}

/// Moves this process, which has one thread, into namespaces of its own: no network, no queues and mounts that others see, no rights but
/// over these. A second wall, should a call ever pass. Where the host gives none to who asks, the first has to do.
fn move_apart() {
    let all = UnshareFlags::NEWUSER
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWNS
        | UnshareFlags::NEWUTS;
    // SAFETY: no memory and no descriptors are unshared.
    let _ = unsafe { unshare_unsafe(all) };
}

fn user() -> (Uid, Gid) {
    (geteuid(), getegid())
}

impl Zygote {
    fn new() -> Result<Self, PlatformError> {
        let failed = |error: io::Error| PlatformError::kernel("preparing to make processes", error);
        let program = Memfd::new(c"afresh-stub")
            .and_then(|file| {
                let code = stub::program();
                file.set_len(code.len())?;
                file.write_at(&code, 0)?;
                file.seal()?;
                Ok(file)
            })
            .map_err(|e| {
                PlatformError::kernel("writing the stub", io::Error::from_raw_os_error(e.errno))
            })?;
        let control = Control::new()?;
        let pair =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (socket, theirs) = pair.map_err(|error| failed(error.into()))?;
        // Somebody may have stopped it.
        let patience = set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE));
        patience.map_err(|error| failed(error.into()))?;
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_fd().as_raw_fd()));
        command
            .env_clear()
            .process_group(0)
            .stdin(Stdio::from(control.file().try_clone_to_owned().map_err(failed)?))
            .stdout(Stdio::from(theirs))
            .stderr(Stdio::null());
        // SAFETY: between fork and exec the closure makes system calls alone, and allocates nothing.
        unsafe {
            command.pre_exec(|| {
                move_apart();
                Ok(())
            });
        }
        let process = spawn::spawn(command).map_err(|error| {
            PlatformError::missing(
                "starting the stub from a memory file",
                error,
                "vm.memfd_noexec must be 0, and the limit of processes not reached",
            )
        })?;
        let mut zygote = Self { process, socket, clock: None, user: user(), control };
        // Whoever starts a program goes on before that has all that the kernel maps for it.
        zygote.prepared(|zygote| zygote.hear())?;
        let list = std::fs::read_to_string(format!("/proc/{}/maps", zygote.process.id()))
            .map_err(|e| PlatformError::kernel("reading the list of mappings", e))?;
        zygote.clock = boot::write_zygote(&mut zygote.control, &list);
        zygote.prepared(|zygote| zygote.say(&[0; 8], &[]).and_then(|()| zygote.hear()))?;
        Ok(zygote)
    }

    /// Takes a step of its preparation, which ends with a word that says what failed.
    fn prepared(
        &self,
        step: impl FnOnce(&Self) -> Result<i64, Refusal>,
    ) -> Result<(), PlatformError> {
        match step(self) {
            Ok(0) => Ok(()),
            Ok(error) => Err(unprepared(Errno::from_raw_os_error(error.wrapping_neg() as i32))),
            Err(Refusal::Errno(error)) => Err(unprepared(error)),
            Err(Refusal::Gone) => Err(unprepared(Errno::CHILD)),
        }
    }

    fn say(&self, bytes: &[u8], lent: &[BorrowedFd<'_>]) -> Result<(), Refusal> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
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
    fn hear(&self) -> Result<i64, Refusal> {
        let mut word = [0; 8];
        let heard = retry_on_intr(|| recv(&self.socket, &mut word, RecvFlags::empty()))?;
        match heard {
            (8, _) => Ok(i64::from_le_bytes(word)),
            _ => Err(Refusal::Gone),
        }
    }

    fn fork(&self, control: &Control, image: Option<BorrowedFd<'_>>) -> Result<Born, Refusal> {
        // Here, for a word across processors takes ten times as long; its child is kept here then.
        let core = sched_getcpu();
        let mut here = CpuSet::new();
        here.set(core);
        let kept = sched_setaffinity(Some(Pid::from_child(&self.process)), &here);
        let lent: Vec<_> = std::iter::once(control.file()).chain(image).collect();
        self.say(&[0], &lent)?;
        let made = self.hear()?;
        let pid = i32::try_from(made).ok().filter(|pid| *pid > 0).and_then(Pid::from_raw);
        let Some(pid) = pid else {
            return Err(Refusal::Errno(Errno::from_raw_os_error(made.wrapping_neg() as i32)));
        };
        // Nobody but us can have waited for it, so the number is its own.
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let (core, clock) = (kept.is_ok().then_some(core), self.clock);
        Ok(Born { pid, pidfd, core, clock, status: None })
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(super) fn unprepared(error: impl Into<io::Error>) -> PlatformError {
    PlatformError::missing(
        "preparing the guest's process",
        error,
        "its mappings must not be sealed (CONFIG_MSEAL_SYSTEM_MAPPINGS), and the seccomp profile must allow memory calls",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::Together;

    #[test]
    fn every_zygote_has_the_clock_of_the_kernel() {
        let own = std::fs::read_to_string("/proc/self/maps").unwrap();
        if !own.contains("[vdso]") {
            return println!("SKIPPED: this kernel gives programs no clock");
        }
        // On one processor whoever starts a program goes on before that has all that the kernel maps for it.
        let _together = Together::new();
        for _ in 0..20 {
            match Zygote::new() {
                Ok(zygote) => assert!(zygote.clock.is_some()),
                Err(error @ PlatformError::Missing { .. }) => return println!("SKIPPED: {error}"),
                Err(error) => panic!("{error}"),
            }
        }
    }

    #[test]
    fn a_zygote_that_was_killed_is_replaced() {
        let made = || {
            let mut control = Control::new()?;
            boot::write_child(&mut control, None);
            start(&control, None)
        };
        let mut first = match made() {
            Ok(born) => born,
            Err(error @ PlatformError::Missing { .. }) => return println!("SKIPPED: {error}"),
            Err(error) => panic!("{error}"),
        };
        let kill = || {
            let held = ZYGOTE.get().lock().unwrap();
            let pid = Pid::from_child(&held.as_ref().unwrap().process);
            rustix::process::kill_process(pid, Signal::KILL).unwrap();
        };
        kill();
        let mut second = made().unwrap();
        assert_ne!(first.pid, second.pid);
        for born in [&mut first, &mut second] {
            assert_eq!(born.try_wait().unwrap(), None);
            born.kill();
            assert_eq!(born.wait().unwrap().signal(), Some(libc::SIGKILL));
        }
    }
}
