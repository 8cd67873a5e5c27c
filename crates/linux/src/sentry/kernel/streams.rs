//! Input and output of a call, the receiver of its output, and the end of a guest during a call.
//!
//! Promises: a call has at most the limit of output bytes, kept or passed on. Logged bytes are not
//! counted: the log bounds itself.

use afresh_snapshot::{OutputSource, OutputStream};

use crate::StopHandle;
use crate::file_view::FileView;
use crate::sentry::host_input::HostInput;
use crate::sentry::kernel::generation::Generation;
use crate::sentry::kernel::input_source::InputSource;
use crate::sentry::kernel::poll_events::{HUP, IN};
use crate::sentry::kernel::time::GuestClock;

/// Input and output of a call.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) input: Vec<u8>,
    /// Bytes of the input that were read.
    pub(crate) taken: usize,
    /// The host's descriptor that input comes from, in place of `input`.
    pub(crate) source: Option<HostInput>,
    /// Whether the guest stops where the host's input ends. Its reads wait for more then.
    pub(crate) stops_at_end: bool,
    /// Whether the input has ended, and no read has returned that yet.
    pub(crate) ended: bool,
    /// Whether the program runs to its end without a caller.
    pub(crate) uncalled: bool,
    /// The object of the first call.
    pub(crate) through: Option<InputSource>,
    /// Whether an answer is expected.
    pub(crate) expects: bool,
    pub(crate) output: Vec<u8>,
    /// The receiver of output while the guest runs; output is not kept then.
    pub(crate) hearer: Option<OutputSink>,
    /// The receiver of output that is not part of the answer.
    log: Option<LogSink>,
    /// Stops the call.
    pub(crate) stop: Option<StopHandle>,
    /// Shows the files while the guest runs.
    pub(crate) view: Option<FileView>,
    /// Bytes that were passed on.
    heard: usize,
    /// The last bytes of the standard error.
    pub(crate) messages: Vec<u8>,
    /// The generation of the running state.
    pub(crate) generation: Generation,
    /// The clocks of the running state.
    pub(crate) clock: GuestClock,
}

/// Hears output when the guest writes it; `false` ends the guest.
pub(crate) struct OutputSink(pub(crate) Box<OutputCallback>);

/// Receives output that is not part of the answer when the guest writes it.
pub(crate) struct LogSink(pub(crate) Box<Log>);

type Log = dyn FnMut(OutputStream, &[u8]) + Send;

impl std::fmt::Debug for LogSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LogSink")
    }
}

/// The receivers of output during a call.
#[derive(Debug, Default)]
pub(crate) struct OutputSinks {
    pub(crate) hearer: Option<OutputSink>,
    pub(crate) log: Option<LogSink>,
    /// Shows the files while the guest runs.
    pub(crate) view: Option<FileView>,
}

type OutputCallback = dyn FnMut(OutputSource, &[u8]) -> bool + Send;

impl std::fmt::Debug for OutputSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hearer")
    }
}

impl Streams {
    /// Takes standard output, or output for the host. The answer of a call through a port is what
    /// the program writes to the connection, so its standard output is not part of that: it is
    /// logged. A caller that hears output hears both.
    pub(crate) fn put_stdout(
        &mut self,
        from: OutputSource,
        bytes: &[u8],
        limit: usize,
    ) -> Result<(), End> {
        let through_port = self.through == Some(InputSource::Port);
        if through_port && from.stream == OutputStream::Output && !self.is_heard() {
            self.log(OutputStream::Output, bytes);
            return Ok(());
        }
        self.put_out(from, bytes, limit)
    }

    fn log(&mut self, stream: OutputStream, bytes: &[u8]) {
        if let Some(LogSink(log)) = &mut self.log {
            log(stream, bytes);
        }
    }

    /// Takes output, up to the limit of a call.
    pub(crate) fn put_out(
        &mut self,
        from: OutputSource,
        bytes: &[u8],
        limit: usize,
    ) -> Result<(), End> {
        let so_far = self.heard + self.output.len();
        if so_far.saturating_add(bytes.len()) > limit {
            return Err(End::Output);
        }
        let Some(OutputSink(hear)) = &mut self.hearer else {
            self.output.extend(bytes);
            return Ok(());
        };
        self.heard += bytes.len();
        if hear(from, bytes) { Ok(()) } else { Err(End::Unheard) }
    }

    /// Whether output is passed on while the guest runs.
    pub(crate) fn is_heard(&self) -> bool {
        self.hearer.is_some()
    }

    /// Whether the caller is polled while the guest runs.
    pub(crate) fn is_polled(&self) -> bool {
        self.hearer.is_some() || self.stop.is_some()
    }

    /// Whether the caller lets the call continue: a receiver of output is called with no bytes.
    pub(crate) fn proceeds(&mut self) -> bool {
        if self.stop.as_ref().is_some_and(StopHandle::is_stopped) {
            return false;
        }
        let from = OutputSource::from(OutputStream::Host);
        self.hearer.as_mut().is_none_or(|OutputSink(hear)| hear(from, &[]))
    }

    /// Passes a message on to the receiver of output, or to the log.
    pub(crate) fn hear_message(
        &mut self,
        from: OutputSource,
        bytes: &[u8],
        limit: usize,
    ) -> Result<(), End> {
        match self.hearer {
            Some(_) => self.put_out(from, bytes, limit),
            None => {
                self.log(OutputStream::Error, bytes);
                Ok(())
            }
        }
    }

    /// Sets the receivers for the next call; the default ends that.
    pub(crate) fn set_sinks(&mut self, sinks: OutputSinks) {
        (self.hearer, self.log, self.heard) = (sinks.hearer, sinks.log, 0);
        self.view = sinks.view;
    }

    /// Whether a part of an answer was kept or passed on.
    pub(crate) fn has_answered(&self) -> bool {
        self.heard > 0 || !self.output.is_empty()
    }

    /// The events of the input. A host pipe without a writer has hung up, unless the guest is to
    /// wait for more there.
    pub(crate) fn input_events(&self) -> u16 {
        let when = |holds: bool, events: u16| if holds { events } else { 0 };
        match &self.source {
            Some(source) if !self.stops_at_end => {
                let (is_readable, is_hung) = source.readiness();
                when(is_readable, IN) | when(is_hung, HUP)
            }
            _ => when(self.has_input(), IN),
        }
    }

    /// Bytes of the input that can be read without a wait.
    pub(crate) fn input_len(&self) -> u64 {
        match &self.source {
            Some(source) => source.len(),
            None => (self.input.len() - self.taken) as u64,
        }
    }

    /// Whether a read of the input need not wait.
    pub(crate) fn has_input(&self) -> bool {
        match &self.source {
            Some(source) => source.is_ready(),
            None => self.ended || self.taken < self.input.len(),
        }
    }
}

/// The end of a guest, in a call or before it was warm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// It exited with this status.
    Exit(i32),
    /// It sent itself this signal, or made a system call that ends in one.
    Signal(i32),
    /// It waits for an event that cannot happen.
    Deadlock,
    /// It wrote more than it may.
    Output,
    /// Its caller ended the call.
    Unheard,
    /// It stopped, and can continue.
    Stopped,
    /// It did not end within its time limit, and was ended.
    Late,
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Exit(status) => write!(f, "exited with status {status}"),
            End::Signal(number) => write!(f, "ended by signal {number}"),
            End::Deadlock => f.write_str("waits for an event that cannot happen"),
            End::Output => f.write_str("wrote more output than it may"),
            End::Unheard => {
                f.write_str("was ended by its host, which receives its output or stopped the call")
            }
            End::Stopped => f.write_str("stopped"),
            End::Late => f.write_str("did not end within its time limit"),
        }
    }
}
