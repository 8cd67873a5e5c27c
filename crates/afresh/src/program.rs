//! Linux programs behind the front door.

use std::convert::Infallible;
use std::path::Path;

use afresh_linux::{End, Exchanged, InboundConnection, Instance, Program, Warm};
use afresh_memory::PAGE_SIZE;
use afresh_pool::Recycled;

use crate::call::CallInput;
use crate::guest::Backend;
use crate::pooled::{Leased, Reset, ResetPool};
use crate::{CallError, Channel, Lease, LeaseError, OpenError, Options, Writer};

/// Instances that all start from one state.
pub(crate) type Programs = ResetPool<Instance, Warm>;

impl Reset for Instance {
    type Error = Infallible;

    /// Carried out with the next call, in the same round trip; a process that cannot be reset is replaced then. The
    /// report is therefore that of the previous reset.
    fn reset(&mut self) -> Result<Recycled, Infallible> {
        let copied = usize::try_from(self.stats().copied).unwrap_or(usize::MAX);
        self.reset();
        Ok(Recycled { pages: copied / PAGE_SIZE, ..Recycled::default() })
    }

    fn kept_bytes(&self) -> usize {
        self.write_set_bytes()
    }
}

/// A pool with its first instance.
pub(crate) fn programs(warm: Warm, options: &Options) -> Result<Backend, LeaseError> {
    let mut first = warm.instance();
    first.prepare().map_err(|error| LeaseError::Instance(error.into()))?;
    Ok(Backend::Program(Box::new(Programs::new(warm, first, options.limits)?)))
}

/// An instance in the warm state.
pub(crate) fn lease(programs: &Programs) -> Result<Leased<'_, Instance>, LeaseError> {
    programs.lease(|warm| Ok::<_, Infallible>(warm.instance()))
}

/// Text as input: words separated by spaces, and an end of line.
pub(crate) fn line(texts: &[String]) -> Vec<u8> {
    let mut line = texts.join(" ").into_bytes();
    line.push(b'\n');
    line
}

/// Warms the program at `path`: the host's, or a file of the guest with these bytes.
pub(crate) fn ready(
    name: &str,
    path: &Path,
    bytes: Option<&[u8]>,
    options: &Options,
) -> Result<Backend, OpenError> {
    let path = std::path::absolute(path)
        .map_err(|source| OpenError::Read { path: path.to_owned(), source })?;
    let program = Program::new(&path);
    let program = match bytes {
        Some(bytes) => program.file(&path, bytes),
        None => program,
    };
    warmed(name, program, options)
}

/// Warms a program, as the options shape it.
pub(crate) fn warmed(
    name: &str,
    program: Program,
    options: &Options,
) -> Result<Backend, OpenError> {
    let failed = |source| OpenError::Guest { reference: name.to_owned(), source };
    let mut program = options.shaped(program);
    for call in &options.warm_up {
        program = program.request(match &call.given {
            CallInput::Bytes(input) => input.clone(),
            CallInput::Text(texts) => line(texts),
        });
    }
    let warm = program.warm().map_err(|e| failed(e.into()))?;
    programs(warm, options).map_err(|e| failed(e.into()))
}

/// Makes a call. A program that ends itself with success, because its input has ended, has answered.
pub(crate) fn call(
    instance: &mut Instance,
    function: &str,
    input: &[u8],
) -> Result<Vec<u8>, CallError> {
    answer(function, instance.call(input))
}

fn answer(
    function: &str,
    called: Result<Vec<u8>, afresh_linux::CallError>,
) -> Result<Vec<u8>, CallError> {
    match called {
        Err(afresh_linux::CallError::Ended { end: End::Exit(0), output, .. }) => Ok(output),
        other => other.map_err(|error| CallError::of_linux(function, error)),
    }
}

/// As [`call`], with a log of the output that is not part of the answer.
pub(crate) fn call_logged(
    instance: &mut Instance,
    function: &str,
    input: &[u8],
    mut log: impl FnMut(Channel, &[u8]) + Send + 'static,
) -> Result<Vec<u8>, CallError> {
    let log = move |from, piece: &[u8]| log(channel(from), piece);
    answer(function, instance.call_logged(input, log))
}

/// As [`call`], with an answer that is received while it is written.
pub(crate) fn call_heard(
    instance: &mut Instance,
    function: &str,
    input: &[u8],
    hear: impl FnMut(Writer, &[u8]) -> bool + Send + 'static,
) -> Result<(), CallError> {
    match instance.call_heard(input, heard(hear)) {
        Err(afresh_linux::CallError::Ended { end: End::Exit(0), .. }) => Ok(()),
        other => other.map_err(|error| CallError::of_linux(function, error)),
    }
}

/// Runs the program without a call.
pub(crate) fn proceed(
    instance: &mut Instance,
    hear: impl FnMut(Writer, &[u8]) -> bool + Send + 'static,
) -> Result<(), CallError> {
    instance.proceed(heard(hear)).map_err(|error| CallError::of_linux("", error))
}

fn heard(
    mut hear: impl FnMut(Writer, &[u8]) -> bool + Send + 'static,
) -> impl FnMut(afresh_linux::Writer, &[u8]) -> bool + Send + 'static {
    move |from, piece| hear(Writer { channel: channel(from.channel), leader: from.leader }, piece)
}

fn channel(from: afresh_linux::Channel) -> Channel {
    use afresh_linux::Channel as From;
    match from {
        From::Messages => Channel::Messages,
        From::Host => Channel::Host,
        _ => Channel::Output,
    }
}

/// Host connections to listeners within a Linux program. The program sees their data when it runs, in a call or by
/// [`Lease::proceed`]. They are part of its state: in a fork, and after a rollback, some may no longer belong to the
/// host.
impl Lease<'_> {
    pub(crate) fn program(&mut self) -> Option<&mut Instance> {
        match &mut self.instance {
            crate::lease::Instance::Program(program) => Some(program),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => None,
        }
    }

    /// Shows a Linux program's files to another thread while calls of this lease run ([`Lease::call_heard`],
    /// [`Lease::proceed`]). Other guests show nothing.
    pub fn show_files(&mut self, view: &afresh_linux::FileView) {
        if let Some(program) = self.program() {
            program.show_files(view.clone());
        }
    }

    /// Connects to the listener on the program's loopback `port`; `None` without a listener, or for another guest.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn dial(&mut self, port: u16) -> Result<Option<InboundConnection>, CallError> {
        let Some(program) = self.program() else { return Ok(None) };
        program.dial(port).map_err(|error| CallError::of_linux("", error))
    }

    /// Passes on the part of `bytes` that the connection has room for (64 KiB), and takes at most `room` bytes of
    /// output.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn exchange(
        &mut self,
        dialed: InboundConnection,
        bytes: &[u8],
        room: usize,
    ) -> Result<Exchanged, CallError> {
        let Some(program) = self.program() else { return Ok(Exchanged::default()) };
        program.exchange(dialed, bytes, room).map_err(|error| CallError::of_linux("", error))
    }

    /// Writes no more to a connection; with `both` it is closed.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn hang_up(&mut self, dialed: InboundConnection, both: bool) -> Result<(), CallError> {
        let Some(program) = self.program() else { return Ok(()) };
        program.hang_up(dialed, both).map_err(|error| CallError::of_linux("", error))
    }

    /// Closes every connection except `known`: those of earlier continuations of this state.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn hang_up_strangers(&mut self, known: &[InboundConnection]) -> Result<(), CallError> {
        let Some(program) = self.program() else { return Ok(()) };
        program.hang_up_strangers(known).map_err(|error| CallError::of_linux("", error))
    }
}

impl Options {
    /// Host paths that a snapshot of a program may read.
    pub(crate) fn grants(&self) -> Program {
        self.shaped(Program::new("/"))
    }

    /// The program, as these options shape it.
    pub(crate) fn shaped(&self, mut program: Program) -> Program {
        if let Some(shape) = &self.linux {
            program = shape(program);
        }
        if let Some(timeout) = self.timeout {
            program = program.time_limit(timeout);
        }
        match self.memory {
            Some(bytes) => program.memory_limit(bytes),
            None => program,
        }
    }
}
