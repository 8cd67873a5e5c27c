//! Waiting for descriptors.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use crate::{Call, SysError, inject};

/// Waits until one of `fds` can be read, or has nothing more to come, or `timeout` is over. Returns
/// the readable ones; none at the timeout or after a signal.
///
/// # Errors
/// Any error of `poll`.
pub fn readable<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Duration,
) -> Result<[bool; N], SysError> {
    inject::gate(Call::Poll)?;
    let mut waiting =
        fds.map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    let most = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: the count matches the initialised entries, which the call writes to and does not
    // keep.
    let ready = unsafe { libc::poll(waiting.as_mut_ptr(), N as libc::nfds_t, most) };
    if ready < 0 {
        let error = SysError::last(Call::Poll);
        return if error.errno == libc::EINTR { Ok([false; N]) } else { Err(error) };
    }
    Ok(waiting.map(|entry| entry.revents != 0))
}

/// Waits until `fd` takes more bytes, or has failed, or `timeout` or a signal ends the wait.
///
/// # Errors
/// Any other error of `poll`.
pub fn writable(fd: BorrowedFd<'_>, timeout: Duration) -> Result<(), SysError> {
    inject::gate(Call::Poll)?;
    let mut waiting = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    let most = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one initialised entry, which the call writes to and does not keep.
    if unsafe { libc::poll(&raw mut waiting, 1, most) } < 0 {
        let error = SysError::last(Call::Poll);
        return if error.errno == libc::EINTR { Ok(()) } else { Err(error) };
    }
    Ok(())
}
