//! Micro-VMs.

use std::sync::Arc;
use std::time::Duration;

use afresh_files::FileDifference;
use afresh_memory::Feature;
use afresh_pager::SnapshotMemory;
use afresh_pool::{PoolStats, ResetCost};
use afresh_snapshot::{Branch, Frozen};
use afresh_vm::{
    CallError as VmError, Difference, GuestError, MachineState, Sandbox, SandboxBuilder, Snapshot,
};

use super::reset_pool::{GuestLease, Reset, ResetPool};
use super::session_backend::{self, SessionBackend, SessionGuest};
use super::traits::{FrozenKind, thaw};
use super::{
    Backend, FrozenGuest, GuestFile, Instance, LiveInstance, OpenFile, StopCall, Thaw, WarmGuest,
    failed,
};
use crate::guests::call::{Entry, ErrorKind};
use crate::guests::session_files::SessionFiles;
use crate::{
    Answer, CallError, CallOptions, Cause, Guest, InstanceDifference, Kind, Lease, LeaseError,
    LeaseOptions, OpenError, Options, SaveError, SessionError, VerifyError,
};

/// The kind of these guests in snapshots.
pub(super) const SNAPSHOT_KIND: &str = "vm";
/// Opens these guests.
pub(super) const OPEN: Option<OpenFile> = Some(open);
/// Thaws these guests.
pub(super) const THAW: Option<Thaw> = Some(thaw::<MachineState>);
/// Memory of a micro-VM if the options set none.
const DEFAULT_MEMORY: u64 = 64 << 20;

/// Sandboxes that all start from one state.
pub(crate) type Machines = ResetPool<Sandbox, Snapshot>;
/// A sandbox on lease.
pub(crate) type MachineLease<'a> = GuestLease<'a, Sandbox>;
/// Options of micro-VMs alone.
pub(crate) type MachineOptions =
    Option<Arc<dyn Fn(SandboxBuilder) -> SandboxBuilder + Send + Sync>>;

impl Reset for Sandbox {
    type Error = VmError;

    fn reset(&mut self) -> Result<ResetCost, Self::Error> {
        self.reset().map(ResetCost::from)
    }

    fn kept_bytes(&self) -> usize {
        self.write_set_bytes()
    }

    type Limits = Option<Duration>;

    fn limit(&mut self, options: &CallOptions) -> Result<Self::Limits, Cause> {
        if options.fuel.is_some() {
            return Err("a micro-VM counts no fuel; set a timeout".into());
        }
        if options.cpu_time.is_some() {
            return Err("a micro-VM has no limit of CPU time; set a timeout".into());
        }
        if options.memory.is_some() {
            return Err(
                "a micro-VM has the memory it was opened with; set `Options::memory`".into()
            );
        }
        let before = self.timeout();
        if options.timeout.is_some() {
            self.set_timeout(options.timeout)?;
        }
        Ok(before)
    }

    fn restore_limits(&mut self, limits: Self::Limits) {
        // It fails only where the first limit is set, and those were set before.
        let _ = self.set_timeout(limits);
    }

    fn is_spoiled(&self) -> bool {
        self.needs_reset()
    }

    fn stopper(&mut self) -> StopCall {
        let handle = self.stop_handle();
        Box::new(move || handle.stop_until_reset())
    }
}

/// Starts the micro-VM of a program.
fn open(_: Kind, file: &GuestFile<'_>, options: &Options) -> Result<Backend, OpenError> {
    if !options.guest.warm_up.is_empty() {
        return Err(OpenError::Option {
            reference: file.name.to_owned(),
            why: "a micro-VM warms itself up when it is initialised; a warm-up is for Wasm modules",
        });
    }
    let builder = options.builder().memory(options.guest.memory.unwrap_or(DEFAULT_MEMORY));
    let sandbox = builder.build(file.bytes).map_err(|error| failed(file.name, error))?;
    pool(sandbox, options).map_err(|error| failed(file.name, error))
}

/// A pool with its first sandbox.
fn pool(first: Sandbox, options: &Options) -> Result<Backend, LeaseError> {
    let machines = Machines::new(first.pristine(), first, options.guest.limits)?;
    Ok(Backend::Machine(Box::new(machines)))
}

/// The error of a micro-VM for its caller.
fn call_error(function: &str, error: VmError) -> CallError {
    let kind = match &error {
        VmError::Guest(GuestError::Timeout { .. }) => ErrorKind::Timeout,
        VmError::Guest(GuestError::Stopped { .. }) => ErrorKind::Stopped,
        VmError::InputTooLarge { .. } => ErrorKind::Request,
        VmError::Guest(_) => ErrorKind::Guest,
        _ => ErrorKind::Host,
    };
    CallError::of(function, kind, error.into())
}

impl WarmGuest for Machines {
    fn kind(&self) -> Kind {
        Kind::Machine
    }

    fn lease_instance(&self) -> Result<Instance<'_>, LeaseError> {
        Ok(Instance::Machine(self.lease(Snapshot::fork)?))
    }

    fn instance_with(&self, options: &LeaseOptions) -> Result<Instance<'_>, LeaseError> {
        Ok(Instance::Machine(self.lease_with(options, Snapshot::fork)?))
    }

    fn owned_instance(&self, options: &LeaseOptions) -> Result<Instance<'static>, LeaseError> {
        Ok(Instance::Machine(self.lease_owned(options, Snapshot::fork)?))
    }

    async fn async_instance(&self, options: LeaseOptions) -> Result<Instance<'static>, LeaseError> {
        Ok(Instance::Machine(self.lease_async(options, Snapshot::fork).await?))
    }

    fn count_instances(&self) -> PoolStats {
        self.stats()
    }

    fn describe_resets(&self) -> String {
        self.pristine.reset_method().to_string()
    }

    fn begin_session(&self) -> Result<Box<dyn SessionBackend>, SessionError> {
        Ok(session_backend::begin::<Sandbox>(self.pristine.clone(), self.pristine.state(), None))
    }

    fn freeze_warm(&self) -> Result<Box<dyn FrozenGuest>, Cause> {
        Ok(Box::new(self.pristine.freeze()?))
    }
}

impl LiveInstance for GuestLease<'_, Sandbox> {
    fn answer_bytes(
        &mut self,
        _: &Guest,
        callee: Entry<'_>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        self.call(input).map_err(|error| call_error(callee.name(), error))
    }

    fn answer_text(
        &mut self,
        _: &Guest,
        name: &str,
        texts: &[String],
    ) -> Result<Answer, CallError> {
        let answer = self.call(texts.join(" ").as_bytes());
        answer.map(Answer::Bytes).map_err(|error| call_error(name, error))
    }

    fn count_differences(&mut self) -> Result<InstanceDifference, VerifyError> {
        use afresh_vm::VerifyError as Found;
        match self.verify() {
            Ok(()) => Ok(InstanceDifference::default()),
            Err(Found::Differs(Difference::Memory { .. })) => {
                Ok(InstanceDifference { bytes: 1, items: 0 })
            }
            Err(Found::Differs(_)) => Ok(InstanceDifference { bytes: 0, items: 1 }),
            Err(error) => Err(VerifyError::Compare(error.into())),
        }
    }

    fn freeze_present(&mut self) -> Result<Box<dyn FrozenGuest>, SaveError> {
        let snapshot = self.snapshot().map_err(|error| SaveError::Freeze(error.into()))?;
        Ok(Box::new(snapshot.freeze().map_err(|error| SaveError::Freeze(error.into()))?))
    }
}

impl SessionGuest for Sandbox {
    fn lend(&mut self) -> Instance<'_> {
        Instance::Machine(GuestLease::Own(self))
    }

    fn freeze_state(
        warm: &Backend,
        state: &Frozen<Self::State>,
    ) -> Result<Box<dyn FrozenGuest>, Cause> {
        Ok(Box::new(machines(warm)?.pristine.sibling(state)?.freeze()?))
    }

    fn thaw_state(
        warm: &Backend,
        memory: SnapshotMemory,
        state: &[u8],
        _: &Options,
    ) -> Result<Frozen<Self::State>, Cause> {
        let frozen = afresh_vm::Frozen::from_parts(memory, state)?;
        Ok(machines(warm)?.pristine.adopt(&frozen)?)
    }

    fn diff_files(_: &Self::State, _: &Self::State) -> Result<FileDifference, SessionError> {
        Ok(FileDifference::default())
    }

    fn files(_: &mut Branch<Self>) -> Result<SessionFiles<'_>, SessionError> {
        Err(SessionError::NoFiles("a micro-VM has no file tree; a Wasm module can have one"))
    }
}

/// The micro-VMs behind a session.
fn machines(warm: &Backend) -> Result<&Machines, Cause> {
    match warm {
        Backend::Machine(machines) => Ok(machines),
        _ => Err("the session is of another guest".into()),
    }
}

impl FrozenKind for MachineState {
    const RECORDER: Feature = Feature::UffdKernel;

    fn thaw(frozen: &afresh_vm::Frozen, options: &Options) -> Result<Backend, Cause> {
        Ok(pool(options.builder().thaw(frozen)?, options)?)
    }
}

impl Options {
    /// Options of micro-VMs only: `build` adds host functions, regions or a log to the builder, for
    /// programs and snapshots.
    pub fn vm(
        mut self,
        build: impl Fn(SandboxBuilder) -> SandboxBuilder + Send + Sync + 'static,
    ) -> Self {
        self.guest.kinds.vm = Some(Arc::new(build));
        self
    }

    /// The builder of a micro-VM.
    fn builder(&self) -> SandboxBuilder {
        let mut builder = Sandbox::builder();
        if let Some(build) = &self.guest.kinds.vm {
            builder = build(builder);
        }
        match self.guest.timeout {
            Some(timeout) => builder.timeout(timeout),
            None => builder,
        }
    }
}

impl Guest {
    /// The state in which calls of a micro-VM start; `None` for another kind of guest.
    #[must_use]
    pub fn as_machine(&self) -> Option<&Snapshot> {
        match &self.inner().backend {
            Backend::Machine(machines) => Some(&machines.pristine),
            _ => None,
        }
    }
}

impl Lease<'_> {
    /// The sandbox of a micro-VM; `None` for another kind of guest.
    #[must_use]
    pub fn as_machine(&mut self) -> Option<&mut Sandbox> {
        match &mut self.instance {
            Instance::Machine(machine) => Some(machine),
            _ => None,
        }
    }
}
