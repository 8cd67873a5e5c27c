//! A VMM that has connected, until its service begins or it is refused.

use std::os::unix::net::UnixStream;

use afresh_sys::socket::Peer;

use super::watchdog::{Watchdog, WatchdogEntry, refuse};
use super::{VmmError, VmmOptions};

/// A VMM that has connected: it waits for its pages, or will soon.
pub(super) struct Connection {
    pub(super) stream: UnixStream,
    /// Held from the beginning, so that no other descriptor gets the number.
    pub(super) process: Peer,
    pub(super) kept: Option<WatchdogEntry>,
}

impl Connection {
    /// A VMM that this process has accepted. From here on `watchdog` has it, too.
    pub(super) fn of(stream: UnixStream, watchdog: Option<&Watchdog>) -> Result<Self, VmmError> {
        let process = Peer::of(&stream)?;
        let kept = watchdog.map(|watchdog| watchdog.greet(&stream, &process));
        Ok(Self { stream, process, kept })
    }

    /// Takes the handshake, if one comes, and closes the memory of the VMM.
    pub(super) fn refuse(self) {
        refuse(&self.stream, self.process);
    }
}

/// A VMM whose pages may never come: it is ended where this is dropped, unless it was released.
pub(super) struct WaitingVmm {
    process: Option<Peer>,
    ends: bool,
}

impl WaitingVmm {
    pub(super) fn new(process: Peer, options: &VmmOptions<'_>) -> Self {
        Self { process: Some(process), ends: options.end_on_failure }
    }

    pub(super) fn process(&self) -> Option<&Peer> {
        self.process.as_ref()
    }

    /// Something else answers for it from now on, or it waits for nothing.
    pub(super) fn release(mut self) -> Option<Peer> {
        self.process.take()
    }
}

impl Drop for WaitingVmm {
    fn drop(&mut self) {
        if let Some(process) = self.process.take().filter(|_| self.ends) {
            process.end();
        }
    }
}
