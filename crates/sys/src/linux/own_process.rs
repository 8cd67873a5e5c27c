//! Settings of this process that a service makes once, when it begins.

use crate::{Call, SysError, inject};

/// Keeps other processes of the same user from this process: they can open none of its descriptors
/// through `/proc`, trace it, or read and write its memory. It leaves no core dump. A process with
/// `CAP_SYS_PTRACE` still can. The process has access to its own files in `/proc`.
///
/// # Errors
/// Any error of `prctl`.
pub fn deny_access() -> Result<(), SysError> {
    inject::gate(Call::Access)?;
    // SAFETY: the call has no pointer among its arguments.
    match unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(SysError::last(Call::Access)),
    }
}

fn descriptor_limits() -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call only writes the structure. It fails for no valid resource.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit
}

/// Descriptors that this process can have open.
#[must_use]
pub fn descriptor_limit() -> usize {
    usize::try_from(descriptor_limits().rlim_cur).unwrap_or(usize::MAX)
}

/// Raises the number of descriptors that this process can have open to `wanted`, or to its hard
/// limit if that is lower. Returns the new number.
pub fn raise_descriptor_limit(wanted: usize) -> usize {
    let mut limit = descriptor_limits();
    let raised = limit.rlim_max.min(wanted as libc::rlim_t);
    if limit.rlim_cur < raised {
        limit.rlim_cur = raised;
        // SAFETY: the call only reads the structure. After an error the limit is as before.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }
    descriptor_limit()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::{Memfd, SealedMemfd, child_passes, run_isolated};

    const PREFIX: &str = "linux::own_process::tests::";

    #[test]
    fn other_processes_of_the_user_cannot_open_the_descriptors() {
        let name = format!("{PREFIX}other_processes_of_the_user_cannot_open_the_descriptors");
        run_isolated(&name, || {
            // The rights of root are independent of the setting. All threads change their user.
            // SAFETY: plain calls of the only thread with tests.
            let changed = unsafe {
                libc::geteuid() != 0
                    || libc::setresuid(12345, 12345, 12345) == 0
                        && libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) == 0
            };
            assert!(changed);
            let file = Memfd::new(c"own").unwrap();
            file.write_at(b"content", 0).unwrap();
            let path = format!("/proc/{}/fd/{}", std::process::id(), file_number(&file));
            let opens = || child_passes(|| File::options().write(true).open(&path).is_ok());
            assert!(opens(), "without the setting");
            deny_access().unwrap();
            assert!(!opens());
            // Its own threads can, which seals and passes depend on.
            let sealed = SealedMemfd::new(file).unwrap();
            std::thread::spawn(move || sealed.reopen().unwrap()).join().unwrap();
        });
    }

    fn file_number(file: &Memfd) -> i32 {
        std::os::fd::AsFd::as_fd(file).as_raw_fd()
    }

    #[test]
    fn the_number_of_descriptors_is_raised_to_the_hard_limit_at_most() {
        run_isolated(
            &format!("{PREFIX}the_number_of_descriptors_is_raised_to_the_hard_limit_at_most"),
            || {
                let limit = libc::rlimit { rlim_cur: 64, rlim_max: 200 };
                // SAFETY: the call only reads the structure.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
                assert_eq!(descriptor_limit(), 64);
                assert_eq!(raise_descriptor_limit(32), 64);
                assert_eq!(raise_descriptor_limit(100), 100);
                assert_eq!(raise_descriptor_limit(1000), 200);
            },
        );
    }
}
