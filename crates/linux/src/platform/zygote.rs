//! The process that guests' processes are forked from.
//!
//! It is a stub in which no guest has ever run: it has dropped the rights that a guest process must
//! not have, and forks on request. Forking a process of five mappings takes a fraction of the time
//! of a new program. Its children are this process's, and end with it.
//!
//! It stays where it was started: its children have the user, the groups and the cgroup that this
//! process had then, and the zygote's own namespaces, where the host gives it some. When the user
//! or the group is another one, there is a new zygote. A child that this process forks has another
//! zygote.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use afresh_sys::{Memfd, PerProcess};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::control::Control;
use super::forker::{ForkError, Forker, SpawnedProcess, ends};
use super::isolation::{self, IsolationLayer, NAMESPACES};
use super::{PlatformError, boot, spawn, stub};

struct Zygote {
    process: Child,
    forker: Forker,
    layers: Vec<IsolationLayer>,
}

static ZYGOTE: PerProcess<Mutex<Option<Zygote>>> = PerProcess::new(|| Mutex::new(None));
/// Whether a process that lacks an isolation layer is refused. Children that this process forks
/// inherit it.
static REQUIRED: AtomicBool = AtomicBool::new(false);

/// The isolation layers of guest processes on this host: those in place, and those that are
/// missing.
///
/// # Errors
/// [`PlatformError`] when this host runs no guests.
pub fn isolation_layers() -> Result<Vec<IsolationLayer>, PlatformError> {
    let mut held = ZYGOTE.get().lock().unwrap_or_else(PoisonError::into_inner);
    match held.as_ref().filter(|zygote| zygote.forker.is_ours()) {
        Some(zygote) => Ok(zygote.layers.clone()),
        None => Ok(held.insert(Zygote::new()?).layers.clone()),
    }
}

/// Has this process make no further process of a guest that lacks one of the
/// [`isolation_layers`]. Guests that run already are not ended.
///
/// # Errors
/// [`PlatformError::Missing`] names the layers that this host lacks, and how to get each.
pub fn require_isolation() -> Result<(), PlatformError> {
    REQUIRED.store(true, Ordering::SeqCst);
    isolation::require_all(&isolation_layers()?)
}

/// Checks, before another process than the zygote forks one of a guest, that no layer is missing or
/// none is required.
///
/// # Errors
/// [`PlatformError::Missing`] as in [`require_isolation`].
pub(super) fn check() -> Result<(), PlatformError> {
    if REQUIRED.load(Ordering::SeqCst) {
        isolation::require_all(&isolation_layers()?)
    } else {
        Ok(())
    }
}

/// Starts a process that carries out the orders in `control`; `lent` are its descriptors for those.
pub(super) fn start(
    control: &Control,
    lent: &[BorrowedFd<'_>],
) -> Result<SpawnedProcess, PlatformError> {
    let mut held = ZYGOTE.get().lock().unwrap_or_else(PoisonError::into_inner);
    let refused = |errno: Errno| PlatformError::kernel("making a guest's process", errno);
    if let Some(zygote) = held.as_ref().filter(|zygote| zygote.forker.is_ours()) {
        if REQUIRED.load(Ordering::SeqCst) {
            isolation::require_all(&zygote.layers)?;
        }
        match zygote.forker.fork(control, lent) {
            Ok(born) => return Ok(born),
            Err(ForkError::Errno(errno)) => return Err(refused(errno)),
            Err(ForkError::Gone) => {}
        }
    }
    // None yet, or one that was killed.
    *held = None;
    held.insert(Zygote::new()?).forker.fork(control, lent).map_err(|refusal| match refusal {
        ForkError::Errno(errno) => refused(errno),
        ForkError::Gone => refused(Errno::CHILD),
    })
}

/// Moves this process, which has one thread, into new namespaces: no network, no queues and mounts
/// that others see, no capabilities outside them. A second layer, should a call ever pass. A host
/// may refuse some of them; [`isolation_layers`] reports those.
fn move_apart() {
    let [users, others @ ..] = NAMESPACES.map(|(flag, ..)| flag);
    let all = others.into_iter().fold(users, UnshareFlags::union);
    // SAFETY: no memory and no descriptors are unshared.
    let apart = |flags| unsafe { unshare_unsafe(flags) }.is_ok();
    if !apart(all) {
        // Each alone, that of users first: it grants the others, and root needs no grant.
        std::iter::once(users).chain(others).for_each(|flag| {
            apart(flag);
        });
    }
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
        let (socket, theirs) = ends().map_err(failed)?;
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_fd().as_raw_fd()));
        command
            .env_clear()
            .process_group(0)
            .stdin(Stdio::from(control.file().try_clone_to_owned().map_err(failed)?))
            .stdout(Stdio::from(theirs))
            .stderr(Stdio::null());
        // SAFETY: between fork and exec the closure makes system calls alone, and allocates
        // nothing.
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
        let forker = Forker::new(Pid::from_child(&process), socket, control);
        let mut zygote = Self { process, forker, layers: Vec::new() };
        // The starter of a program continues before the kernel has mapped everything for it.
        zygote.forker.prepared(Forker::hear)?;
        let list = std::fs::read_to_string(format!("/proc/{}/maps", zygote.process.id()))
            .map_err(|e| PlatformError::kernel("reading the list of mappings", e))?;
        zygote.forker.clock = boot::write_zygote(&mut zygote.forker.control, &list);
        zygote.forker.prepared(|forker| forker.say(&[0; 8], &[]).and_then(|()| forker.hear()))?;
        zygote.layers = isolation::layers_of(zygote.process.id());
        if REQUIRED.load(Ordering::SeqCst) {
            isolation::require_all(&zygote.layers)?;
        }
        Ok(zygote)
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::sync::mpsc::channel;

    use afresh_sys::run_isolated;
    use rustix::process::Signal;

    use crate::platform::CpuPinning;

    #[test]
    fn every_zygote_has_the_clock_of_the_kernel() {
        let own = std::fs::read_to_string("/proc/self/maps").unwrap();
        if !own.contains("[vdso]") {
            return println!("SKIPPED: this kernel gives programs no clock");
        }
        // On one CPU the starter of a program continues before the kernel has mapped everything for
        // it.
        let _together = CpuPinning::new();
        for _ in 0..20 {
            match Zygote::new() {
                Ok(zygote) => assert!(zygote.forker.clock.is_some()),
                Err(error @ PlatformError::Missing { .. }) => return println!("SKIPPED: {error}"),
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn spawn_child() -> Result<SpawnedProcess, PlatformError> {
        let mut control = Control::new()?;
        boot::write_child(&mut control, None, &[]);
        start(&control, &[])
    }

    fn is_killed(mut born: SpawnedProcess) -> bool {
        born.kill();
        born.wait().is_ok_and(|status| status.signal() == Some(libc::SIGKILL))
    }

    /// Another thread starts a process of a guest at the moment of the fork.
    #[test]
    fn a_forked_child_waits_for_no_lock_of_its_parents_threads() {
        const NAME: &str =
            "platform::zygote::tests::a_forked_child_waits_for_no_lock_of_its_parents_threads";
        run_isolated(NAME, || {
            match spawn_child() {
                Ok(born) => assert!(is_killed(born)),
                Err(error @ PlatformError::Missing { .. }) => return println!("SKIPPED: {error}"),
                Err(error) => panic!("{error}"),
            }
            let (held, is_held) = channel();
            let (end, ended) = channel::<()>();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let _locks = (ZYGOTE.get().lock(), spawn::hold());
                    held.send(()).unwrap();
                    ended.recv().unwrap();
                });
                is_held.recv().unwrap();
                // SAFETY: the child uses the allocator, which the C library's fork keeps whole, and
                // new locks.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: ends a child that waits.
                    unsafe { libc::alarm(60) };
                    let good = spawn_child().is_ok_and(is_killed);
                    // SAFETY: ends the child without its parent's destructors.
                    unsafe { libc::_exit(i32::from(!good)) };
                }
                end.send(()).unwrap();
                let mut status = 0;
                // SAFETY: waits for the child.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(status, 0, "the child waited for a lock");
            });
            assert!(spawn_child().is_ok_and(is_killed));
        });
    }

    #[test]
    fn a_zygote_that_was_killed_is_replaced() {
        let mut first = match spawn_child() {
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
        let mut second = spawn_child().unwrap();
        assert_ne!(first.pid, second.pid);
        for born in [&mut first, &mut second] {
            assert_eq!(born.try_wait().unwrap(), None);
            born.kill();
            assert_eq!(born.wait().unwrap().signal(), Some(libc::SIGKILL));
        }
    }
}
