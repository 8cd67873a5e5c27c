//! The host's side of a run: its input, its signals and its terminal.
//!
//! Promises: a guest that waits for the host wakes up when the host has something for it. Input is
//! read only when the guest reads it, so that the rest stays for the next program of a script. A
//! terminal is a guest terminal: the host writes into its master, and shows its output.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use afresh_files::{Access, New, Refused, Tree, Walk};
use afresh_snapshot::{OutputSource, OutputStream};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, read, write};

use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::kernel::time::now;
use crate::sentry::tty::terminals::{FIRST_DEVICE, Terminal, TerminalEnd};
use crate::sentry::{FIRST, Kernel, Sentry};

/// The terminal number of a run.
const TERMINAL: u32 = 0;
/// Bytes that are read from the host's terminal at a time.
const TYPED_AT_ONCE: usize = 1024;
/// Bytes of input that one read of the guest moves.
const INPUT_AT_ONCE: usize = 128 << 10;
/// How often typed bytes are looked for while the guest runs.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Whether a descriptor can be read now, or has ended.
fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// The host's descriptor behind the guest's standard input.
#[derive(Debug)]
pub(crate) struct HostInput {
    fd: OwnedFd,
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
    /// A console with typed bytes from `input`, where the run has a terminal.
    pub(crate) fn new(
        control: Option<RunControl>,
        input: Option<OwnedFd>,
        failure: OutputFailure,
    ) -> Self {
        let host =
            |input| HostTerminal { input, typed: Vec::new(), looked: Instant::now(), ended: false };
        Self { control, terminal: input.map(host), failure }
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

impl Kernel {
    /// Makes a terminal whose master the host has, of `rows` and `columns`: the controlling
    /// terminal of the first process, and the object of those standard descriptors that `standard`
    /// names.
    pub(crate) fn attach_terminal(
        &mut self,
        standard: [bool; 3],
        [rows, columns]: [u16; 2],
    ) -> Result<(), Refused> {
        let path = format!("/dev/pts/{TERMINAL}");
        let place = self.tree.walk(path.as_bytes(), Walk::new(Tree::ROOT).name())?;
        let device = New::Device(FIRST_DEVICE + u64::from(TERMINAL));
        let node = self.tree.create_at(&place, device, 0o620, now())?;
        self.tree.hold(node)?;
        let mut terminal = Terminal::new(node);
        (terminal.locked, terminal.window) = (false, [rows, columns, 0, 0]);
        (terminal.session, terminal.group) = (Some(FIRST), FIRST);
        let access = Access { read: true, write: true, append: false };
        for number in (0..3).filter(|number| standard[*number]) {
            let open = self.tree.open(node, access)?;
            let end = TerminalEnd { id: Some(TERMINAL), master: false, hung: false, open };
            let found = Some((place.directory, place.name.clone()));
            let object = FileObject::Terminal(end);
            if let Ok(description) = self.table.get_mut(number as u64) {
                *description = Description { found, ..Description::new(object, libc::O_RDWR) };
                terminal.slaves += 1;
            }
        }
        self.terminals.add(TERMINAL, terminal);
        Ok(())
    }
}

impl Sentry {
    /// Moves pending host input to the guest, and terminal output to the host.
    pub(crate) fn attend(&mut self) {
        let Some(mut console) = self.console.take() else { return };
        for control in console.control.iter().flat_map(RunControl::take) {
            match control {
                Control::Signal(signal) => {
                    let info = SignalInfo::new(signal, 0, 0, 0);
                    self.change().with(FIRST, |state| state.send(None, info));
                }
                Control::Resize([rows, columns]) => self.resize([rows, columns, 0, 0]),
            }
        }
        if let Some(host) = &mut console.terminal {
            if host.looked.elapsed() >= LOOK_INTERVAL {
                self.type_in(host);
            }
            self.show();
        }
        self.console = Some(console);
    }

    fn resize(&mut self, window: [u16; 4]) {
        let Some(terminal) = self.state.terminals.get(TERMINAL) else { return };
        if terminal.window == window {
            return;
        }
        let group = terminal.group;
        let state = self.change();
        if let Some(terminal) = state.terminals.get_mut(TERMINAL) {
            terminal.window = window;
        }
        state.signal_group(group, libc::SIGWINCH);
    }

    fn type_in(&mut self, host: &mut HostTerminal) {
        let state = self.change();
        let Some(terminal) = state.terminals.get_mut(TERMINAL) else { return };
        let ended = host.ended;
        for (group, signal) in host.type_in(terminal) {
            state.signal_group(group, signal);
        }
        if host.ended && !ended {
            let leader = state.terminals.get(TERMINAL).and_then(|terminal| terminal.session);
            state.hang_up_terminal(TERMINAL);
            for signal in [libc::SIGHUP, libc::SIGCONT] {
                let info = SignalInfo::new(signal as u8, 0x80, 0, 0);
                if let Some(leader) = leader.filter(|leader| state.processes.lives(*leader)) {
                    state.with(leader, |state| state.send(None, info));
                }
            }
        }
    }

    /// Writes terminal output to the host.
    fn show(&mut self) {
        let Some(terminal) = self.state.terminals.get(TERMINAL) else { return };
        if terminal.shown.is_empty() {
            return;
        }
        let Some(terminal) = self.change().terminals.get_mut(TERMINAL) else { return };
        let bytes: Vec<u8> = terminal.shown.drain(..).collect();
        terminal.edges += 1;
        let from = OutputSource::from(OutputStream::Output);
        // A host that shows nothing any more has hung up, and its input says so.
        let _ = self.streams.put_out(from, &bytes, self.output_limit);
    }

    /// Whether the host can wake up a guest in which nothing can run: with input, or with a signal.
    pub(crate) fn may_be_woken(&self) -> bool {
        let Some(console) = &self.console else { return false };
        if self.streams.source.is_none() && self.streams.stops_at_end && self.state.awaits_input() {
            return false;
        }
        let terminal = console.terminal.as_ref().is_some_and(|host| !host.ended);
        console.control.is_some() || terminal || self.wants_input()
    }

    fn wants_input(&self) -> bool {
        self.streams.source.is_some() && self.state.awaits_input()
    }

    /// Waits until the host or a server has something for the guest, or `ends` is readable, for
    /// `length` at most.
    pub(crate) fn await_host(&mut self, ends: BorrowedFd<'_>, length: Duration) {
        let wants_input = self.wants_input();
        let Some(console) = &mut self.console else { return };
        let (mut terminal, mut takes) = (None, false);
        if let Some(host) = &mut console.terminal {
            let room = self.state.terminals.get(TERMINAL).is_some_and(Terminal::takes);
            takes = !host.ended && room;
            // It is looked at whenever the guest has waited.
            host.looked = host.looked.checked_sub(LOOK_INTERVAL).unwrap_or(host.looked);
            terminal = Some(&host.input);
        }
        let control = console.control.as_ref().map(|control| control.0.wake.as_fd());
        let terminal = terminal.filter(|_| takes).map(AsFd::as_fd);
        let input = self.streams.source.as_ref().filter(|_| wants_input);
        let fds = [Some(ends), control, terminal, input.map(|input| input.fd.as_fd())];
        let fds: Vec<_> = fds.into_iter().flatten().collect();
        self.lines.wait_with(&self.state, &fds, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_input_that_a_read_could_not_store_is_read_again() {
        let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut input = HostInput::new(reader.into());
        write(&writer, b"abc").unwrap();
        let bytes = input.take(8).unwrap().unwrap();
        assert!(bytes == b"abc" && !input.is_ready());
        input.put_back(bytes);
        assert!(input.is_ready());
        assert_eq!(input.take(2).unwrap().unwrap(), b"ab");
        input.put_back(b"b".to_vec());
        assert_eq!(input.take(8).unwrap().unwrap(), b"bc");
        assert_eq!(input.take(8).unwrap(), None);
    }
}
