//! Unmodified Linux programs.

pub(super) mod oci_image;
mod spare_programs;

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use afresh_files::{FileDifference, Refused, Tree};
use afresh_linux::{
    CallError as LinuxError, End, ExchangeResult, Frozen, InboundConnection, Instance,
    PackedProgram, PlatformError, Program, Warm,
};
use afresh_memory::{Feature, PAGE_SIZE};
use afresh_pager::SnapshotMemory;
use afresh_pool::{Budget, PoolStats, ResetCost, SharedCache};
use afresh_snapshot::{Branch, GuestReserve};

use spare_programs::SparePrograms;

use super::reset_pool::{GuestLease, Reset, ResetPool};
use super::session_backend::{self, SessionBackend, SessionGuest, unmoved};
use super::traits::{FrozenKind, thaw};
use super::{
    Backend, FrozenGuest, GuestFile, Instance as Lent, LiveInstance, OpenFile, StopCall, Thaw,
    WarmGuest, failed,
};
use crate::guests::call::{CallInput, Entry, ErrorKind, Exit};
use crate::guests::session_files::{FileOwner, SessionFiles};
use crate::{
    Answer, CallError, CallOptions, Cause, Guest, InstanceDifference, Kind, Lease, LeaseError,
    LeaseOptions, OpenError, Options, OutputSource, OutputStream, SaveError, SessionError,
    VerifyError,
};

/// The kind of these guests in snapshots.
pub(super) const SNAPSHOT_KIND: &str = "linux";
/// Opens these guests.
pub(super) const OPEN: Option<OpenFile> = Some(open);
/// Thaws these guests.
pub(super) const THAW: Option<Thaw> = Some(thaw::<PackedProgram>);

/// Instances that all start from one state.
pub(crate) type Programs = ResetPool<Instance, WarmProgram>;
/// An instance on lease.
pub(crate) type ProgramLease<'a> = GuestLease<'a, Instance>;

/// A warm program, and processes for its sessions.
pub(crate) struct WarmProgram {
    warm: Warm,
    spares: Arc<SparePrograms>,
}

/// Options of Linux programs alone.
pub(crate) type ProgramOptions = Option<Arc<dyn Fn(Program) -> Program + Send + Sync>>;

/// Limits of the calls of a Linux program.
#[derive(Clone, Copy)]
pub(crate) struct ProgramLimits {
    time: Duration,
    /// `None` for that of its state, which each reset restores.
    memory: Option<u64>,
    cpu_time: Option<Duration>,
}

impl Reset for Instance {
    type Error = Infallible;

    /// Carried out with the next call, in the same round trip; a process that cannot be reset is
    /// replaced then. The report is therefore that of the previous reset.
    fn reset(&mut self) -> Result<ResetCost, Infallible> {
        let copied = usize::try_from(self.stats().copied).unwrap_or(usize::MAX);
        self.reset();
        Ok(ResetCost { pages: copied / PAGE_SIZE, ..ResetCost::default() })
    }

    fn kept_bytes(&self) -> usize {
        self.write_set_bytes()
    }

    type Limits = ProgramLimits;

    fn limit(&mut self, options: &CallOptions) -> Result<ProgramLimits, Cause> {
        if options.fuel.is_some() {
            return Err("a Linux program counts no fuel; set a timeout".into());
        }
        let cpu_time = self.cpu_time_limit();
        let mut before = ProgramLimits { time: self.time_limit(), memory: None, cpu_time };
        if let Some(bytes) = options.memory {
            before.memory = Some(self.memory_limit());
            self.limit_memory(bytes)?;
        }
        self.set_time_limit(options.timeout.unwrap_or(before.time));
        self.set_cpu_time_limit(options.cpu_time.or(before.cpu_time));
        Ok(before)
    }

    fn restore_limits(&mut self, limits: ProgramLimits) {
        self.set_time_limit(limits.time);
        self.set_cpu_time_limit(limits.cpu_time);
        if let Some(bytes) = limits.memory {
            // It fails only where a reset, which restores the limit, comes before the next call.
            let _ = self.limit_memory(bytes);
        }
    }

    fn is_spoiled(&self) -> bool {
        self.needs_reset()
    }

    fn stopper(&mut self) -> StopCall {
        let handle = self.stop_handle();
        Box::new(move || handle.stop())
    }
}

/// The cache of host files that all programs share.
struct HostFiles;

impl SharedCache for HostFiles {
    fn name(&self) -> &'static str {
        "host files"
    }

    fn bytes(&self) -> usize {
        usize::try_from(afresh_linux::cached_file_bytes()).unwrap_or(usize::MAX)
    }

    fn release(&self) -> usize {
        usize::try_from(afresh_linux::release_cached_files()).unwrap_or(usize::MAX)
    }
}

/// A new instance of a program.
fn instance(program: &WarmProgram) -> Result<Instance, Infallible> {
    Ok(program.warm.instance())
}

/// Text as input: words separated by spaces, and an end of line.
fn line(texts: &[String]) -> Vec<u8> {
    let mut line = texts.join(" ").into_bytes();
    line.push(b'\n');
    line
}

/// Warms the program in a file: the host's, or a file of the guest with these bytes.
fn open(_: Kind, file: &GuestFile<'_>, options: &Options) -> Result<Backend, OpenError> {
    let program = match file.path {
        Some(path) => {
            let read = |source| OpenError::Read { path: path.to_owned(), source };
            Program::new(std::path::absolute(path).map_err(read)?)
        }
        None => {
            let name = Path::new(file.name).file_name().unwrap_or("program".as_ref());
            let path = Path::new("/").join(name);
            Program::new(&path).file(&path, file.bytes)
        }
    };
    warm(file.name, program, options)
}

/// Warms a program, as the options shape it.
pub(super) fn warm(name: &str, program: Program, options: &Options) -> Result<Backend, OpenError> {
    let mut program = options.shape(program);
    for call in &options.guest.warm_up {
        program = program.request(match &call.given {
            CallInput::Bytes(input) => input.clone(),
            CallInput::Text(texts) => line(texts),
        });
    }
    let warm = program.warm().map_err(|error| failed(name, error))?;
    pool(warm, options).map_err(|error| failed(name, error))
}

/// A pool with its first instance.
fn pool(warm: Warm, options: &Options) -> Result<Backend, LeaseError> {
    Budget::process().relieve_cache(&HostFiles);
    let mut first = warm.instance();
    first.prepare().map_err(|error| LeaseError::Create(error.into()))?;
    let spares = Arc::new(SparePrograms::new(warm.clone()));
    let program = WarmProgram { warm, spares };
    Ok(Backend::Program(Box::new(Programs::new(program, first, options.guest.limits)?)))
}

impl Guest {
    /// A guest that continues in a state of a Linux program: that of
    /// [`EndedRun::state`](afresh_linux::EndedRun).
    ///
    /// # Errors
    /// [`OpenError`] when the host cannot run it.
    pub fn from_program(warm: Warm, options: &Options) -> Result<Self, OpenError> {
        let backend = pool(warm, options).map_err(|error| failed("the program", error))?;
        Ok(Self::assemble(backend, options))
    }
}

/// The error of a Linux program for its caller.
fn call_error(function: &str, error: LinuxError) -> CallError {
    let kind = match &error {
        LinuxError::CpuTime { limit, .. } => ErrorKind::CpuTime(*limit),
        LinuxError::Late { .. } => ErrorKind::Timeout,
        LinuxError::Ended { end: End::Unheard, .. } => ErrorKind::Stopped,
        // It had not begun.
        LinuxError::NeedsReset => ErrorKind::Request,
        LinuxError::Platform {
            source: PlatformError::Ended(_) | PlatformError::Forged(_), ..
        } => ErrorKind::Guest,
        LinuxError::Platform { .. } => ErrorKind::Host,
        _ => ErrorKind::Guest,
    };
    CallError::of(function, kind, error.into())
}

/// The exit of a guest, if that is the cause of an error.
pub(super) fn exit(cause: &Cause) -> Option<Exit<'_>> {
    match cause.downcast_ref()? {
        LinuxError::Ended { end: End::Exit(code), output, messages } => {
            Some(Exit { code: *code, output, messages })
        }
        _ => None,
    }
}

impl WarmGuest for Programs {
    fn kind(&self) -> Kind {
        Kind::Program
    }

    fn lease_instance(&self) -> Result<Lent<'_>, LeaseError> {
        Ok(Lent::Program(self.lease(instance)?))
    }

    fn instance_with(&self, options: &LeaseOptions) -> Result<Lent<'_>, LeaseError> {
        Ok(Lent::Program(self.lease_with(options, instance)?))
    }

    fn owned_instance(&self, options: &LeaseOptions) -> Result<Lent<'static>, LeaseError> {
        Ok(Lent::Program(self.lease_owned(options, instance)?))
    }

    async fn async_instance(&self, options: LeaseOptions) -> Result<Lent<'static>, LeaseError> {
        Ok(Lent::Program(self.lease_async(options, instance).await?))
    }

    fn count_instances(&self) -> PoolStats {
        self.stats()
    }

    fn describe_resets(&self) -> String {
        self.pristine.warm.resets_by().to_string()
    }

    fn is_listening(&self) -> bool {
        self.pristine.warm.listens()
    }

    fn begin_session(&self) -> Result<Box<dyn SessionBackend>, SessionError> {
        let WarmProgram { warm, spares } = &self.pristine;
        let reserve = Arc::clone(spares) as Arc<dyn GuestReserve<Instance>>;
        Ok(session_backend::begin::<Instance>(warm.home(), warm.state(), Some(reserve)))
    }

    fn freeze_warm(&self) -> Result<Box<dyn FrozenGuest>, Cause> {
        Ok(Box::new(self.pristine.warm.freeze()?))
    }

    fn reseeds_clones(&self) -> Option<bool> {
        Some(self.pristine.warm.watches_generation())
    }
}

/// A program that ends itself with success, because its input has ended, has answered.
impl LiveInstance for GuestLease<'_, Instance> {
    fn answer_bytes(
        &mut self,
        _: &Guest,
        callee: Entry<'_>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        answer(callee.name(), self.call(input))
    }

    fn answer_text(
        &mut self,
        _: &Guest,
        name: &str,
        texts: &[String],
    ) -> Result<Answer, CallError> {
        answer(name, self.call(&line(texts))).map(Answer::Bytes)
    }

    fn answer_streaming(
        &mut self,
        _: &Guest,
        callee: Entry<'_>,
        input: &[u8],
        hear: impl FnMut(OutputSource, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        match self.call_streaming(input, hear) {
            Err(LinuxError::Ended { end: End::Exit(0), .. }) => Ok(()),
            other => other.map_err(|error| call_error(callee.name(), error)),
        }
    }

    fn answer_logged(
        &mut self,
        _: &Guest,
        callee: Entry<'_>,
        input: &[u8],
        log: impl FnMut(OutputStream, &[u8]) + Send + 'static,
    ) -> Result<Vec<u8>, CallError> {
        answer(callee.name(), self.call_logged(input, log))
    }

    fn find_generation(&mut self) -> Option<u64> {
        Some(self.generation())
    }

    /// The program is reset first: the comparison is with the initial state of the next call.
    fn count_differences(&mut self) -> Result<InstanceDifference, VerifyError> {
        use afresh_linux::VerifyError as Found;
        match self.verify() {
            Ok(_) => Ok(InstanceDifference::default()),
            Err(Found::Memory(_)) => Ok(InstanceDifference { bytes: 1, items: 0 }),
            Err(Found::Platform(error)) => Err(VerifyError::Compare(error.into())),
            Err(_) => Ok(InstanceDifference { bytes: 0, items: 1 }),
        }
    }

    fn freeze_present(&mut self) -> Result<Box<dyn FrozenGuest>, SaveError> {
        Ok(Box::new(self.freeze().map_err(|error| SaveError::Freeze(error.into()))?))
    }

    fn count_memory(&self) -> Option<u64> {
        Some(self.mapped_memory())
    }

    fn next_event(&self) -> Option<Duration> {
        self.due()
    }
}

fn answer(function: &str, called: Result<Vec<u8>, LinuxError>) -> Result<Vec<u8>, CallError> {
    match called {
        Err(LinuxError::Ended { end: End::Exit(0), output, .. }) => Ok(output),
        other => other.map_err(|error| call_error(function, error)),
    }
}

impl SessionGuest for Instance {
    fn lend(&mut self) -> Lent<'_> {
        Lent::Program(GuestLease::Own(self))
    }

    fn freeze_state(
        _: &Backend,
        state: &afresh_snapshot::Frozen<Self::State>,
    ) -> Result<Box<dyn FrozenGuest>, Cause> {
        Ok(Box::new(Warm::freeze_state(state)?))
    }

    fn thaw_state(
        _: &Backend,
        memory: SnapshotMemory,
        state: &[u8],
        options: &Options,
    ) -> Result<afresh_snapshot::Frozen<Self::State>, Cause> {
        let frozen = Frozen::from_parts(memory, state)?;
        Ok(Warm::thaw_state(&frozen, &options.grants())?)
    }

    fn diff_files(one: &Self::State, two: &Self::State) -> Result<FileDifference, SessionError> {
        one.files().diff(two.files()).map_err(|error| SessionError::State(error.into()))
    }

    fn files(branch: &mut Branch<Self>) -> Result<SessionFiles<'_>, SessionError> {
        Ok(SessionFiles::new(branch))
    }

    fn next_event(branch: &Branch<Self>) -> Option<Duration> {
        match branch.guest() {
            Some(guest) => guest.due(),
            None => branch.base().state.due(),
        }
    }

    fn present_files(branch: &Branch<Self>) -> Option<Tree> {
        Some(branch.present_tree())
    }

    fn state_files(state: &Self::State) -> Option<&Tree> {
        Some(state.files())
    }

    fn written_memory(&self) -> u64 {
        Instance::written_memory(self)
    }
}

impl FileOwner for Branch<Instance> {
    fn present_tree(&self) -> Tree {
        match self.guest() {
            Some(program) => program.files().clone(),
            None => self.base().state.files().clone(),
        }
    }

    fn change_tree(
        &mut self,
        change: &mut dyn FnMut(&mut Tree) -> Result<(), Refused>,
    ) -> Result<Result<(), Refused>, SessionError> {
        let program = self.guest_mut().map_err(unmoved)?;
        program.change_files(change).map_err(|error| SessionError::State(error.into()))
    }

    fn is_generated(&self, path: &str) -> bool {
        let mut parts = Vec::new();
        for part in path.split('/') {
            match part {
                "" | "." => {}
                ".." => drop(parts.pop()),
                part => parts.push(part),
            }
        }
        matches!(parts.first(), Some(&("proc" | "sys")))
    }
}

impl FrozenKind for PackedProgram {
    const RECORDER: Feature = Feature::UffdSigbus;

    fn thaw(frozen: &Frozen, options: &Options) -> Result<Backend, Cause> {
        Ok(pool(Warm::thaw(frozen, &options.grants())?, options)?)
    }
}

impl Guest {
    /// The warm Linux program; `None` for another kind of guest.
    #[must_use]
    pub fn as_program(&self) -> Option<&Warm> {
        match &self.inner().backend {
            Backend::Program(programs) => Some(&programs.pristine.warm),
            _ => None,
        }
    }
}

/// Host connections to listeners within a Linux program. The program sees their data when it runs,
/// in a call or by [`Lease::proceed`]. They are part of its state: in a fork, and after a rollback,
/// some may no longer belong to the host.
impl Lease<'_> {
    /// The instance of a Linux program; `None` for another kind of guest.
    #[must_use]
    pub fn as_program(&mut self) -> Option<&mut Instance> {
        match &mut self.instance {
            Lent::Program(program) => Some(program),
            _ => None,
        }
    }

    /// Lets a Linux program run without a call, with its background work, for a
    /// [slice](Program::slice) of time or until all of it waits. `hear` as for
    /// [`Lease::call_streaming`]. For other guests it has no effect.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn proceed(
        &mut self,
        hear: impl FnMut(OutputSource, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        let Some(program) = self.as_program() else { return Ok(()) };
        let done = program.proceed(hear).map_err(|error| call_error("", error));
        self.noted(done)
    }

    /// Shows a Linux program's files to another thread while calls of this lease run
    /// ([`Lease::call_streaming`], [`Lease::proceed`]). For other guests it has no effect.
    pub fn show_files(&mut self, view: &afresh_linux::FileView) {
        if let Some(program) = self.as_program() {
            program.show_files(view.clone());
        }
    }

    /// Connects to the listener on the program's loopback `port`; `None` without a listener, or for
    /// another guest.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn dial(&mut self, port: u16) -> Result<Option<InboundConnection>, CallError> {
        let Some(program) = self.as_program() else { return Ok(None) };
        let done = program.dial(port).map_err(|error| call_error("", error));
        self.noted(done)
    }

    /// Passes on the part of `bytes` that the connection has room for (64 KiB), and takes at most
    /// `room` bytes of output.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn exchange(
        &mut self,
        dialed: InboundConnection,
        bytes: &[u8],
        room: usize,
    ) -> Result<ExchangeResult, CallError> {
        let Some(program) = self.as_program() else { return Ok(ExchangeResult::default()) };
        let done = program.exchange(dialed, bytes, room).map_err(|error| call_error("", error));
        self.noted(done)
    }

    /// Closes a connection for writing, or with `both` for reading as well.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn hang_up(&mut self, dialed: InboundConnection, both: bool) -> Result<(), CallError> {
        let Some(program) = self.as_program() else { return Ok(()) };
        let done = program.hang_up(dialed, both).map_err(|error| call_error("", error));
        self.noted(done)
    }

    /// Closes every connection except `known`: those of earlier continuations of this state.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn close_other_connections(
        &mut self,
        known: &[InboundConnection],
    ) -> Result<(), CallError> {
        let Some(program) = self.as_program() else { return Ok(()) };
        let done = program.close_other_connections(known).map_err(|error| call_error("", error));
        self.noted(done)
    }
}

impl Options {
    /// Options of Linux programs only: `shape` adds arguments, environment, files and granted
    /// directories. For a snapshot, it grants directories.
    pub fn linux(mut self, shape: impl Fn(Program) -> Program + Send + Sync + 'static) -> Self {
        self.guest.kinds.linux = Some(Arc::new(shape));
        self
    }

    /// Host paths that a snapshot of a program may read.
    pub(super) fn grants(&self) -> Program {
        self.shape(Program::new("/"))
    }

    /// The program, as these options shape it.
    fn shape(&self, mut program: Program) -> Program {
        if let Some(shape) = &self.guest.kinds.linux {
            program = shape(program);
        }
        if let Some(timeout) = self.guest.timeout {
            program = program.time_limit(timeout);
        }
        match self.guest.memory {
            Some(bytes) => program.memory_limit(bytes),
            None => program,
        }
    }
}
