//! Input of a run, which comes from a descriptor of the host.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionread, read};

/// Bytes of input that one read of the guest moves.
const INPUT_AT_ONCE: usize = 128 << 10;

/// The events of a descriptor to be read.
fn events(fd: BorrowedFd<'_>) -> PollFlags {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let ready = poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0);
    if ready { fds[0].revents() } else { PollFlags::empty() }
}

/// Whether a descriptor can be read now, or has ended.
pub(in crate::sentry) fn is_readable(fd: BorrowedFd<'_>) -> bool {
    !events(fd).is_empty()
}

/// The host's descriptor behind the guest's standard input.
#[derive(Debug)]
pub(crate) struct HostInput {
    pub(in crate::sentry) fd: OwnedFd,
    taken: u64,
    /// Bytes that were read from it, and not yet by the guest.
    ahead: VecDeque<u8>,
}

impl HostInput {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd, taken: 0, ahead: VecDeque::new() }
    }

    /// Whether a read need not wait.
    pub(crate) fn is_ready(&self) -> bool {
        !self.ahead.is_empty() || is_readable(self.fd.as_fd())
    }

    /// Whether bytes can be read, and whether its writers have left.
    pub(in crate::sentry) fn readiness(&self) -> (bool, bool) {
        let events = events(self.fd.as_fd());
        let hung = events.contains(PollFlags::HUP);
        (!self.ahead.is_empty() || !(events - PollFlags::HUP).is_empty(), hung)
    }

    /// Bytes that can be read without a wait.
    pub(in crate::sentry) fn len(&self) -> u64 {
        // A descriptor that does not know has as good as none.
        ioctl_fionread(&self.fd).unwrap_or_default() + self.ahead.len() as u64
    }

    /// A number that grows with each read byte and each readable byte.
    pub(crate) fn edges(&self) -> u64 {
        2 * self.taken + u64::from(self.is_ready())
    }

    /// At most `len` bytes, which stay there; none at the end; `None` where a read would wait.
    pub(crate) fn peek(&mut self, len: usize) -> Result<Option<&[u8]>, Errno> {
        let room = len.min(INPUT_AT_ONCE).saturating_sub(self.ahead.len());
        // Behind bytes that are left, an end is not read: a terminal has it once.
        let has_more = || ioctl_fionread(&self.fd).is_ok_and(|len| len > 0);
        if self.ahead.is_empty() || room > 0 && has_more() {
            if !self.is_ready() {
                return Ok(None);
            }
            let mut bytes = vec![0; room];
            match read(&self.fd, &mut bytes) {
                Ok(read) => {
                    self.taken += read as u64;
                    self.ahead.extend(&bytes[..read]);
                }
                Err(_) if !self.ahead.is_empty() => {}
                Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
        let ahead = self.ahead.make_contiguous();
        Ok(Some(&ahead[..ahead.len().min(len)]))
    }

    /// So many bytes of the last [`HostInput::peek`] were read.
    pub(crate) fn skip(&mut self, len: usize) {
        self.ahead.drain(..len);
    }
}
