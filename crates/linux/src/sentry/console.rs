//! The host's side of a run: its input, its signals and its terminal.
//!
//! Promises: a guest that waits for the host wakes up when the host has something for it. Input is
//! read only when the guest reads it, so that the rest stays for the next program of a script. A
//! terminal is a guest terminal: the host writes into its master, and shows its output.

mod attend;
mod failed_lookups;
mod published_port;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use afresh_files::Node;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};

pub use failed_lookups::FailedLookups;
use failed_lookups::LookupWatch;
pub(crate) use published_port::{PublishedPort, PublishedPorts};

use crate::sentry::host_input::is_readable;
use crate::sentry::kernel::signals::bit;
use crate::sentry::tty::terminals::Terminal;

/// Bytes that are read from the host's terminal at a time.
const TYPED_AT_ONCE: usize = 1024;

/// Sends signals and the terminal size to a run. Usable from any thread; clones control the same
/// run.
#[derive(Clone, Debug)]
pub struct RunControl(Arc<Controls>);

#[derive(Debug)]
struct Controls {
    queue: Mutex<Vec<Control>>,
    /// Whether the queue may hold something, to be read without the lock.
    filled: AtomicBool,
    stopped: AtomicBool,
    wake: OwnedFd,
}

#[derive(Clone, Copy, Debug)]
enum Control {
    Signal(u8),
    Resize([u16; 2]),
}

/// Maximum controls that wait for a run.
const CONTROLS: usize = 256;

impl RunControl {
    /// The control of one run.
    ///
    /// # Errors
    /// When the host has no more descriptors.
    pub fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (filled, stopped) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self(Arc::new(Controls { queue: Mutex::default(), filled, stopped, wake })))
    }

    /// Sends the program's first process a signal (1 to 64), as `kill` does.
    pub fn signal(&self, signal: i32) {
        if let Some(signal) = u8::try_from(signal).ok().filter(|signal| (1..=64).contains(signal)) {
            self.push(Control::Signal(signal));
        }
    }

    /// Sets the size of the program's terminal. A new size sends SIGWINCH to the foreground
    /// processes.
    pub fn resize(&self, rows: u16, columns: u16) {
        self.push(Control::Resize([rows, columns]));
    }

    /// Stops the run within a tenth of a second. A state is kept only of a program that waits then.
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::Release);
        // Never read after that, so that no wait begins.
        let _ = write(&self.0.wake, &1u64.to_ne_bytes());
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.0.stopped.load(Ordering::Acquire)
    }

    fn push(&self, control: Control) {
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.len() < CONTROLS {
            queue.push(control);
        }
        self.0.filled.store(true, Ordering::Release);
        // The counter is full at worst, and readable then.
        let _ = write(&self.0.wake, &1u64.to_ne_bytes());
    }

    /// Signals in the queue, as a set.
    fn pending_signals(&self) -> u64 {
        if !self.0.filled.load(Ordering::Acquire) {
            return 0;
        }
        let queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.iter().fold(0, |set, control| match control {
            Control::Signal(signal) => set | bit(*signal),
            Control::Resize(_) => set,
        })
    }

    fn take(&self) -> Vec<Control> {
        if !self.0.filled.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        // A push writes to `wake` under the lock. Without the lock here, an unread write would keep
        // the run awake.
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_stopped() {
            let _ = read(&self.0.wake, &mut [0; 8]);
        }
        std::mem::take(&mut *queue)
    }
}

/// The host's side of a run.
#[derive(Debug)]
pub(crate) struct Console {
    control: Option<RunControl>,
    terminal: Option<HostTerminal>,
    pub(in crate::sentry) failure: OutputFailure,
    pub(in crate::sentry) lookups: LookupWatch,
    pub(crate) published: PublishedPorts,
}

/// The error of the last write to the host's output that failed, for the program's own write.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputFailure(Arc<AtomicI32>);

impl OutputFailure {
    /// Notes an error, and returns whether there was none.
    pub(crate) fn note(&self, written: io::Result<()>) -> bool {
        let errno = written.as_ref().err().map(|error| error.raw_os_error().unwrap_or(libc::EIO));
        self.0.store(errno.unwrap_or_default(), Ordering::Relaxed);
        written.is_ok()
    }

    /// The error, unless the reader of the output has left.
    pub(in crate::sentry) fn errno(&self) -> Option<Errno> {
        let errno = self.0.load(Ordering::Relaxed);
        (errno != 0 && errno != libc::EPIPE).then(|| Errno::from_raw_os_error(errno))
    }
}

/// The host's descriptor that types into the guest's terminal.
#[derive(Debug)]
struct HostTerminal {
    input: OwnedFd,
    /// Typed bytes that the terminal had no room for.
    typed: Vec<u8>,
    looked: Instant,
    /// Whether the host's end has hung up.
    ended: bool,
}

impl Console {
    /// A console with typed bytes from `input`, where the run has a terminal. The program starts in
    /// the directory `start`.
    pub(crate) fn new(
        control: Option<RunControl>,
        input: Option<OwnedFd>,
        failure: OutputFailure,
        start: Node,
    ) -> Self {
        let host =
            |input| HostTerminal { input, typed: Vec::new(), looked: Instant::now(), ended: false };
        let lookups = LookupWatch::new(start);
        let published = PublishedPorts::new(Vec::new());
        Self { control, terminal: input.map(host), failure, lookups, published }
    }

    /// Signals of the host that the guest has not got yet, as a set.
    pub(in crate::sentry) fn pending_signals(&self) -> u64 {
        self.control.as_ref().map_or(0, RunControl::pending_signals)
    }
}

impl HostTerminal {
    /// Writes pending host input into the terminal. Returns the signals of typed bytes, with their
    /// groups.
    fn type_in(&mut self, terminal: &mut Terminal) -> Vec<(u32, i32)> {
        self.looked = Instant::now();
        if !self.ended && self.typed.is_empty() && is_readable(self.input.as_fd()) {
            let mut bytes = [0; TYPED_AT_ONCE];
            match read(&self.input, &mut bytes) {
                Ok(0) => self.ended = true,
                Ok(len) => self.typed.extend(&bytes[..len]),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => self.ended = true,
            }
        }
        let (mut signals, mut done) = (Vec::new(), 0);
        while done < self.typed.len() && terminal.takes() {
            if let Some(signal) = terminal.type_in(self.typed[done]) {
                signals.push((terminal.group, signal));
            }
            done += 1;
        }
        self.typed.drain(..done);
        signals
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sentry::host_input::HostInput;

    #[test]
    fn host_input_that_a_read_did_not_take_is_read_again() {
        let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut input = HostInput::new(reader.into());
        write(&writer, b"abc").unwrap();
        assert_eq!((input.len(), input.readiness()), (3, (true, false)));
        assert_eq!(input.peek(8).unwrap().unwrap(), b"abc");
        assert_eq!((input.is_ready(), input.len()), (true, 3));
        write(&writer, b"d").unwrap();
        assert_eq!(input.len(), 4);
        assert_eq!(input.peek(2).unwrap().unwrap(), b"ab");
        input.skip(1);
        assert_eq!(input.peek(8).unwrap().unwrap(), b"bcd");
        input.skip(2);
        assert_eq!(input.peek(8).unwrap().unwrap(), b"d");
        input.skip(1);
        assert_eq!(input.peek(8).unwrap(), None);
        assert_eq!(input.readiness(), (false, false));
        drop(writer);
        assert_eq!(input.peek(8).unwrap(), Some(&[][..]));
        assert!(input.readiness().1);
    }
}
