//! Attaching to a booting process: takes its descriptors, or reports the missing feature of the
//! host.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::forker::SpawnedProcess;
use super::listener::Listener;
use super::stub::STUB_TIMEOUT;
use super::write_tracker::WriteTracker;
use super::{PlatformError, arch, stub};

/// Number of attempts to find the process without a pause.
const MAX_SPINS: u32 = 100;

/// Descriptors that a process has made while it booted.
pub(super) struct BootDescriptors {
    pub(super) listener: Listener,
    pub(super) track: Option<WriteTracker>,
}

impl BootDescriptors {
    /// Those of `born`. Fails once that has ended.
    pub(super) fn fetch(born: &mut SpawnedProcess, tracked: bool) -> Result<Self, PlatformError> {
        let deadline = Instant::now() + STUB_TIMEOUT;
        // The process opens the userfaultfd, if any, and then the listener.
        let (uffd, listener) = if tracked { (0, 1) } else { (-1, 0) };
        let mut looks = 0;
        let listener = loop {
            match pidfd_getfd(&born.pidfd, listener, PidfdGetfdFlags::empty()) {
                // Before it has closed them, the process has the zygote's descriptors.
                Ok(descriptor) if is_listener(&descriptor) => break Listener::new(descriptor)?,
                Ok(_) | Err(Errno::BADF) => {
                    let other = pidfd_getfd(&born.pidfd, 0, PidfdGetfdFlags::empty());
                    if tracked && other.is_ok_and(|descriptor| is_listener(&descriptor)) {
                        return Err(PlatformError::missing(
                            "userfaultfd in the guest's process",
                            io::Error::from_raw_os_error(libc::EPERM),
                            "the kernel must have it, and the seccomp profile allow it",
                        ));
                    }
                }
                Err(Errno::SRCH) => return Err(ended(born)),
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
            // It is on this processor, and soon ready.
            looks += 1;
            if looks < MAX_SPINS {
                std::thread::yield_now();
                continue;
            }
            // Older kernels report no descriptor of a process that has ended.
            if born.has_ended() {
                return Err(ended(born));
            }
            std::thread::sleep(Duration::from_micros(50));
        };
        let track = if tracked {
            let uffd = pidfd_getfd(&born.pidfd, uffd, PidfdGetfdFlags::empty())
                .map_err(|e| PlatformError::kernel("fetching the userfaultfd", e))?;
            Some(WriteTracker::new(uffd)?)
        } else {
            None
        };
        Ok(Self { listener, track })
    }
}

/// Why a process that boots has ended: by a signal from outside, or because it lacks what the
/// filter needs.
fn ended(born: &mut SpawnedProcess) -> PlatformError {
    match born.wait() {
        Ok(status) if status.signal() == Some(libc::SIGKILL) => PlatformError::Ended(status),
        _ => PlatformError::missing(
            "seccomp user notification in the guest's process",
            io::Error::from_raw_os_error(libc::EPERM),
            "Linux 6.6 or newer is needed, and a seccomp profile that allows it",
        ),
    }
}

/// Whether a descriptor is the listener of a filter.
fn is_listener(descriptor: &OwnedFd) -> bool {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
    name.is_ok_and(|name| name.as_os_str() == "anon_inode:seccomp notify")
}

/// Requires a processor that guests can run on.
pub(super) fn require_processor() -> Result<(), PlatformError> {
    arch::require()?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::control::Control;
    use crate::platform::{boot, zygote};

    #[test]
    fn a_process_that_is_killed_while_it_boots_is_reported_as_that() {
        let mut control = Control::new().unwrap();
        boot::write_child(&mut control, None, &[]);
        let mut born = match zygote::start(&control, &[]) {
            Ok(born) => born,
            Err(error @ PlatformError::Missing { .. }) => return println!("SKIPPED: {error}"),
            Err(error) => panic!("{error}"),
        };
        born.kill();
        while !born.has_ended() {
            std::thread::yield_now();
        }
        let error = BootDescriptors::fetch(&mut born, false).err().unwrap();
        assert!(matches!(error, PlatformError::Ended(_)), "{error}");
    }
}
