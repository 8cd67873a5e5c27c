//! Calls that may end the process that makes them: tried in a child first.
//!
//! A seccomp profile can answer a call it forbids with an error, which is well, or with SIGSYS,
//! which ends the process. A probe for a facility must not end the process. A thread without a
//! filter, which is the common case, needs no trial. With a filter, a single child makes all the
//! calls, and only if it dies one child each: a child takes milliseconds of a large process.

/// The calls that profiles are known to kill for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trial {
    Userfaultfd,
    MemfdCreate,
}

/// Whether one of the calls may end this process.
pub(super) fn any_ends_the_process() -> bool {
    is_filtered() && ended(&[Trial::MemfdCreate, Trial::Userfaultfd]).is_some()
}

/// Whether a profile restricts this thread's system calls, as far as visible.
fn is_filtered() -> bool {
    let status = std::fs::read("/proc/thread-self/status").unwrap_or_default();
    !status.split(|byte| *byte == b'\n').any(|line| line == b"Seccomp:\t0")
}

/// Why making the call would end this process; `None` where it does not, whether it succeeds or
/// fails.
///
/// The child makes the call and ends. The program's own handlers or waiters do not see this child:
/// it sends no signal when it ends, and only `__WALL` waits for it.
pub(super) fn ends_the_process(call: Trial) -> Option<String> {
    let signal = ended(&[call])?;
    Some(format!(
        "calling it would end this process with signal {signal}: a seccomp profile forbids it"
    ))
}

/// The signal that ends a child which makes the calls; `None` where it lives.
fn ended(calls: &[Trial]) -> Option<i32> {
    // SAFETY: a new process with a copy of this one's memory. The child uses only its stack and
    // makes system calls only, so the state of other threads does not matter.
    let child = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
    match child {
        0 => attempt(calls),
        // No process to spare; the call is then tried without this.
        ..0 => return None,
        _ => {}
    }
    let mut status = 0;
    loop {
        // SAFETY: waits for the child just made.
        let ended =
            unsafe { libc::wait4(child as i32, &mut status, libc::__WALL, std::ptr::null_mut()) };
        if ended >= 0 {
            break;
        }
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return None;
        }
    }
    libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
}

/// In the child.
fn attempt(calls: &[Trial]) -> ! {
    // SAFETY: system calls whose arguments are numbers or live through the call; the descriptors
    // end with the process.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // A core file would be useless.
        libc::setrlimit(libc::RLIMIT_CORE, &none);
        for call in calls {
            match call {
                Trial::Userfaultfd => libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1),
                Trial::MemfdCreate => libc::syscall(
                    libc::SYS_memfd_create,
                    c"afresh-probe".as_ptr(),
                    libc::MFD_CLOEXEC,
                ),
            };
        }
        libc::syscall(libc::SYS_exit_group, 0);
        libc::_exit(0)
    }
}
