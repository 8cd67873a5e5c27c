//! Input of a run, which comes from a descriptor of the host.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, read};

/// Bytes of input that one read of the guest moves.
const INPUT_AT_ONCE: usize = 128 << 10;

/// Whether a descriptor can be read now, or has ended.
pub(in crate::sentry) fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// The host's descriptor behind the guest's standard input.
#[derive(Debug)]
pub(crate) struct HostInput {
    pub(in crate::sentry) fd: OwnedFd,
    taken: u64,
    /// Bytes that the guest had no memory for.
    returned: Vec<u8>,
}

impl HostInput {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd, taken: 0, returned: Vec::new() }
    }

    /// Whether a read need not wait.
    pub(crate) fn is_ready(&self) -> bool {
        !self.returned.is_empty() || is_readable(self.fd.as_fd())
    }

    /// Returns bytes of the last [`HostInput::take`] that a read could not store, for the next one.
    pub(crate) fn put_back(&mut self, bytes: Vec<u8>) {
        let later = std::mem::replace(&mut self.returned, bytes);
        self.returned.extend(later);
    }

    /// A number that grows with each read byte and each readable byte.
    pub(crate) fn edges(&self) -> u64 {
        2 * self.taken + u64::from(self.is_ready())
    }

    /// At most `len` bytes; none at the end; `None` where a read would wait.
    pub(crate) fn take(&mut self, len: usize) -> Result<Option<Vec<u8>>, Errno> {
        if !self.is_ready() {
            return Ok(None);
        }
        if !self.returned.is_empty() {
            let len = len.min(self.returned.len());
            return Ok(Some(self.returned.drain(..len).collect()));
        }
        let mut bytes = vec![0; len.min(INPUT_AT_ONCE)];
        match read(&self.fd, &mut bytes) {
            Ok(len) => {
                bytes.truncate(len);
                self.taken += len as u64;
                Ok(Some(bytes))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}
