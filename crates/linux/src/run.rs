//! Runs of a program from its start to its end, without a warm state.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use afresh_files::Tree;
use afresh_snapshot::{OutputSource, OutputStream};

use crate::error::WarmError;
use crate::frozen_state::IdleWait;
use crate::guest::{Guest, StopReason, after};
use crate::platform::{PlatformError, StubCommands, Trap};
use crate::program::{Program, next};
use crate::sentry::{
    Console, End, FailedLookups, HostInput, InputSource, OutputFailure, OutputSink, OutputSinks,
    PublishedPort, PublishedPorts, RunControl, Wait, WaitReason,
};
use crate::warm::Warm;

/// A run of a program from its start to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Run {
    /// How it ended.
    pub end: End,
    /// Its standard output.
    pub output: Vec<u8>,
    /// The last bytes of its standard error.
    pub messages: String,
}

/// The result of a program that ran with host streams.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EndedRun {
    /// How it ended.
    pub end: End,
    /// Its files before its first instruction.
    pub files_before: Tree,
    /// Its files at its end.
    pub files: Tree,
    /// Counts of system calls that returned `ENOSYS`, by number.
    pub unserved: BTreeMap<i64, u64>,
    /// Files of its start directory, and hosts, that it looked for and did not find.
    pub failed_lookups: FailedLookups,
    /// The state in which it stopped or exited. A call of an exited one exits again. Only with
    /// [`HostStreams::keep_state`], and not after a signal.
    pub state: Option<Warm>,
}

/// The host's streams, signals and terminal for a run. By default the input is empty, and output is
/// dropped.
#[derive(Default)]
pub struct HostStreams {
    input: Option<OwnedFd>,
    output: Option<Box<dyn Write + Send>>,
    messages: Option<Box<dyn Write + Send>>,
    terminal: Option<([bool; 3], [u16; 2])>,
    control: Option<RunControl>,
    limit: Option<Duration>,
    keeps: bool,
    published: Vec<PublishedPort>,
}

impl std::fmt::Debug for HostStreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("HostStreams");
        fields.field("input", &self.input).field("terminal", &self.terminal);
        fields.field("control", &self.control).field("limit", &self.limit);
        fields.field("keeps", &self.keeps).field("published", &self.published);
        fields.finish_non_exhaustive()
    }
}

impl HostStreams {
    /// Reads the program's standard input from `fd`, only when the program reads. The end of `fd`
    /// is the end of the input.
    #[must_use]
    pub fn input(mut self, fd: OwnedFd) -> Self {
        self.input = Some(fd);
        self
    }

    /// Receives the program's standard output in the pieces that it writes. After an error its
    /// writes fail with `EPIPE`.
    #[must_use]
    pub fn output(mut self, output: impl Write + Send + 'static) -> Self {
        self.output = Some(Box::new(output));
        self
    }

    /// Receives the program's standard error, as [`HostStreams::output`].
    #[must_use]
    pub fn messages(mut self, messages: impl Write + Send + 'static) -> Self {
        self.messages = Some(Box::new(messages));
        self
    }

    /// Gives the program a controlling terminal of `rows` and `columns`. The standard descriptors
    /// that `standard` selects (input, output, error) are that terminal. [`HostStreams::input`] is
    /// its keyboard, and [`HostStreams::output`] its screen. The host's own terminal must be raw.
    #[must_use]
    pub fn terminal(mut self, standard: [bool; 3], rows: u16, columns: u16) -> Self {
        self.terminal = Some((standard, [rows, columns]));
        self
    }

    /// Receives signals, and changes of the terminal size. A program without another event waits
    /// for them.
    #[must_use]
    pub fn control(mut self, control: RunControl) -> Self {
        self.control = Some(control);
        self
    }

    /// Time limit of the run, after which it ends with [`End::Late`]. The default is no limit.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Keeps the state of the program ([`EndedRun::state`]): if it has read all of its input and
    /// waits for more, which is then not the end of its input; at its exit; or if it waits when the
    /// time limit or [`RunControl::stop`] stops it.
    #[must_use]
    pub fn keep_state(mut self) -> Self {
        self.keeps = true;
        self
    }

    /// Passes connections to `address` of the host on to a loopback port of the program. Returns
    /// the address, with the chosen port for port 0. Connections are reset while the program does
    /// not listen on its port.
    ///
    /// # Errors
    /// If another program uses the address, or this process may not bind it.
    pub fn publish(&mut self, address: SocketAddr, port: u16) -> std::io::Result<SocketAddr> {
        let (published, address) = PublishedPort::bind(address, port)?;
        self.published.push(published);
        Ok(address)
    }

    /// The function that passes output on.
    fn sink(
        output: Option<Box<dyn Write + Send>>,
        messages: Option<Box<dyn Write + Send>>,
        control: Option<RunControl>,
        failure: OutputFailure,
    ) -> OutputSink {
        let (mut output, mut messages) = (output, messages);
        OutputSink(Box::new(move |from: OutputSource, piece: &[u8]| {
            let to = match from.stream {
                OutputStream::Output => &mut output,
                OutputStream::Error => &mut messages,
                _ => return !control.as_ref().is_some_and(RunControl::is_stopped),
            };
            let Some(to) = to else { return true };
            failure.note(to.write_all(piece).and_then(|()| to.flush()))
        }))
    }
}

impl Program {
    /// Runs the program once, from its start to its end, with the host's streams, like a command of
    /// a shell.
    ///
    /// The program's limits of output and time do not apply, because they are for calls.
    ///
    /// # Errors
    /// When the host cannot run guests, or the program cannot be loaded. No end of the program is
    /// an error.
    pub fn run_to_end(&self, streams: HostStreams) -> Result<EndedRun, WarmError> {
        let HostStreams { input, output, messages, terminal, control, limit, keeps, published } =
            streams;
        let attach = |state: &mut crate::sentry::Kernel| match terminal {
            Some((standard, size)) => state
                .attach_terminal(standard, size)
                .map_err(|error| WarmError::File { path: Path::new("/dev/pts").to_owned(), error }),
            None => Ok(()),
        };
        let mut guest = self.start(keeps, attach)?;
        let files_before = guest.sentry.state.tree.clone();
        let typed = terminal.is_some_and(|(standard, _)| standard[0]);
        let (typed, input) = if typed { (input, None) } else { (None, input) };
        let nothing = || File::open("/dev/null").map(OwnedFd::from);
        let source = input.map_or_else(nothing, Ok).map_err(WarmError::Input)?;
        guest.sentry.output_limit = usize::MAX;
        guest.sentry.streams.uncalled = true;
        guest.sentry.streams.source = Some(HostInput::new(source));
        guest.sentry.streams.stops_at_end = keeps;
        let failure = OutputFailure::default();
        let hearer = Some(HostStreams::sink(output, messages, control.clone(), failure.clone()));
        guest.sentry.streams.set_sinks(OutputSinks { hearer, log: None, view: None });
        let start = guest.sentry.state.current().directory;
        let mut console = Console::new(control, typed, failure, start);
        console.published = PublishedPorts::new(published);
        guest.sentry.console = Some(console);
        let deadline = after(limit.unwrap_or(Duration::MAX));
        let stop = guest.run(deadline)?;
        // Pending output of a terminal.
        guest.sentry.attend();
        let (end, wait) = match stop {
            StopReason::End(end, place) => {
                let exits = keeps && matches!(end, End::Exit(_));
                (end, exits.then(|| guest.hold_exit(place)).transpose()?)
            }
            StopReason::Idle(wait) if keeps => (End::Stopped, Some(wait)),
            StopReason::Idle(_) => (End::Deadlock, None),
            StopReason::Late | StopReason::CpuTime | StopReason::Unheard if keeps => {
                (End::Stopped, Some(guest.hold_wait()?))
            }
            StopReason::Late | StopReason::CpuTime => (End::Late, None),
            StopReason::Unheard => (End::Unheard, None),
        };
        let unserved = std::mem::take(&mut guest.sentry.unserved);
        let console = guest.sentry.console.as_ref();
        let failed_lookups = console.map(Console::take_failed_lookups).unwrap_or_default();
        let kept = wait.map(|wait| guest.freeze(wait, false)).transpose()?;
        let state = kept.map(|kept| Warm::new(kept, self.limits(), unserved.clone()));
        let files = guest.sentry.state.tree.clone();
        Ok(EndedRun { end, files_before, files, unserved, failed_lookups, state })
    }

    /// Runs the program once, from its start to its end, with `input`.
    ///
    /// # Errors
    /// As [`Program::warm`]. No end of the program is an error.
    pub fn run(&self, input: &[u8]) -> Result<Run, WarmError> {
        let mut guest = self.start(false, |_| Ok(()))?;
        let deadline = after(self.start);
        guest.sentry.streams.input = input.to_vec();
        guest.sentry.streams.uncalled = true;
        let mut halt = None;
        loop {
            match next(&mut guest, &mut halt, deadline)? {
                // There is no caller: the input ends, and servers get no call.
                StopReason::Idle(IdleWait::Parked(InputSource::Port)) => {
                    halt = Some(StopReason::End(End::Deadlock, Trap::Stub));
                }
                StopReason::Idle(wait) => {
                    halt = guest.resume(&wait, Some(b""), StubCommands::default(), deadline)?
                }
                StopReason::Late | StopReason::CpuTime | StopReason::Unheard => {
                    return Err(WarmError::Late { messages: guest.messages() });
                }
                StopReason::End(end, _) => {
                    let messages = guest.messages();
                    let output = std::mem::take(&mut guest.sentry.streams.output);
                    return Ok(Run { end, output, messages });
                }
            }
        }
    }
}

impl Guest {
    /// Holds the first process at the call that ends it, which it makes again when it continues.
    fn hold_exit(&mut self, place: Trap) -> Result<IdleWait, PlatformError> {
        if let Trap::Kernel(id) = place {
            self.body.process.detach(id)?;
        }
        self.sentry.resumed = None;
        let wait = Wait { woken: true, ..Wait::new(WaitReason::Nothing, None) };
        self.sentry.change().current_mut().threads.current_mut().wait = Some(wait);
        Ok(IdleWait::Parked(InputSource::Input))
    }

    /// The wait of a guest that was stopped.
    fn hold_wait(&mut self) -> Result<IdleWait, WarmError> {
        if !self.sentry.state.rests() {
            return Err(WarmError::NotIdle { what: "computed" });
        }
        self.settle()?;
        let state = &self.sentry.state;
        let ear =
            state.ear(None).ok_or(WarmError::NotIdle { what: "waited for something else" })?;
        Ok(if state.all_wait() { IdleWait::Parked(ear) } else { IdleWait::Resting(ear) })
    }
}
