//! Taking over a process that boots: its descriptors are fetched as soon as it has made them, or it is said what the host lacks.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::listener::Listener;
use super::process::PATIENCE;
use super::track::Track;
use super::{PlatformError, stub};

/// What a process has made for us while it booted.
pub(super) struct Attached {
    pub(super) pidfd: OwnedFd,
    pub(super) listener: Listener,
    pub(super) track: Option<Track>,
}

impl Attached {
    pub(super) fn fetch(child: &Child, tracked: bool) -> Result<Self, PlatformError> {
        let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())
            .map_err(|e| PlatformError::missing("pidfd_open", e, "it needs Linux 5.3 or newer"))?;
        let deadline = Instant::now() + PATIENCE;
        // The process opens the userfaultfd, if any, and then the listener.
        let (uffd, listener) = if tracked { (3, 4) } else { (-1, 3) };
        let listener = loop {
            match pidfd_getfd(&pidfd, listener, PidfdGetfdFlags::empty()) {
                // Before it has closed them, the process has descriptors that it inherited.
                Ok(descriptor) if is_listener(&descriptor) => break Listener::new(descriptor)?,
                Ok(_) | Err(Errno::BADF) => {
                    let other = pidfd_getfd(&pidfd, 3, PidfdGetfdFlags::empty());
                    if tracked && other.is_ok_and(|descriptor| is_listener(&descriptor)) {
                        return Err(PlatformError::missing(
                            "userfaultfd in the guest's process",
                            io::Error::from_raw_os_error(libc::EPERM),
                            "the kernel must have it, and the seccomp profile allow it",
                        ));
                    }
                }
                Err(Errno::SRCH) => {
                    return Err(PlatformError::missing(
                        "seccomp user notification in the guest's process",
                        io::Error::from_raw_os_error(libc::EPERM),
                        "Linux 6.6 or newer is needed, and a seccomp profile that allows it",
                    ));
                }
                Err(error) => {
                    return Err(PlatformError::missing(
                        "pidfd_getfd",
                        error,
                        "this process must be allowed its children's descriptors: see Yama's ptrace_scope and the seccomp profile",
                    ));
                }
            }
            if Instant::now() >= deadline {
                return Err(PlatformError::Late);
            }
            std::thread::sleep(Duration::from_micros(50));
        };
        let track = if tracked {
            let uffd = pidfd_getfd(&pidfd, uffd, PidfdGetfdFlags::empty())
                .map_err(|e| PlatformError::kernel("fetching the userfaultfd", e))?;
            Some(Track::new(uffd)?)
        } else {
            None
        };
        Ok(Self { pidfd, listener, track })
    }
}

/// Whether a descriptor is that of a filter's listener.
fn is_listener(descriptor: &OwnedFd) -> bool {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
    name.is_ok_and(|name| name.as_os_str() == "anon_inode:seccomp notify")
}

/// The stub loads the bases by instruction.
pub(super) fn require_bases() -> Result<(), PlatformError> {
    let (_, capabilities) = rustix::param::linux_hwcap();
    if capabilities & 2 == 0 {
        return Err(PlatformError::missing(
            "FSGSBASE",
            io::Error::from_raw_os_error(libc::ENOTSUP),
            "a processor of 2012 or later and Linux 5.9 or newer are needed",
        ));
    }
    let frame = rustix::param::linux_minsigstksz();
    if frame + 1024 > stub::SIGNAL_STACK_LEN {
        return Err(PlatformError::missing(
            "a signal frame of this processor",
            io::Error::from_raw_os_error(libc::E2BIG),
            "its state is larger than the stub's stack",
        ));
    }
    Ok(())
}
