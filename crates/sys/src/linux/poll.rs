//! Waiting for descriptors.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use crate::{Call, SysError, inject};

/// Waits until one of `fds` can be read, or has nothing more to come, or `timeout` is over. Says which; none where
/// time ran out or a signal came.
///
/// # Errors
/// What `poll` says.
pub fn readable<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Duration,
) -> Result<[bool; N], SysError> {
    inject::gate(Call::Poll)?;
    let mut waiting =
        fds.map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    let most = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: as many initialised entries as it says, which the call writes to and keeps nothing of.
    let ready = unsafe { libc::poll(waiting.as_mut_ptr(), N as libc::nfds_t, most) };
    if ready < 0 {
        let error = SysError::last(Call::Poll);
        return if error.errno == libc::EINTR { Ok([false; N]) } else { Err(error) };
    }
    Ok(waiting.map(|entry| entry.revents != 0))
}
