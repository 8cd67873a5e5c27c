//! Wasm guests. Modules and components have engines, warm-ups, frozen guests and errors in common.

mod component;
mod module;

use std::path::PathBuf;

use afresh_memory::Feature;
use afresh_wasm::{
    CallError as WasmError, CallOptions as WasmCallOptions, Engine, EngineConfig, Frozen,
    FrozenState, GuestOptions, LeaseLimits, LeaseOptions as WasmLeaseOptions, LoadError, WarmError,
};

use super::traits::{FrozenKind, thaw};
use super::{Backend, GuestFile, LeaseControl, OpenFile, StopCall, Thaw, failed};
use crate::guests::call::{CallInput, ErrorKind, Exit};
use crate::{CallError, CallOptions, Cause, Kind, LeaseError, LeaseOptions, OpenError, Options};

/// The kind of these guests in snapshots.
pub(super) const SNAPSHOT_KIND: &str = "wasm";
/// Opens these guests.
pub(super) const OPEN: Option<OpenFile> = Some(open);
/// Thaws these guests.
pub(super) const THAW: Option<Thaw> = Some(thaw::<FrozenState>);

pub(crate) use afresh_wasm::{
    ComponentLease, Lease as ModuleLease, Warm as WarmModule, WarmComponent,
};

/// Options of Wasm guests alone.
#[derive(Clone, Default)]
pub(crate) struct WasmOptions {
    engine: Option<Engine>,
    stack: Option<usize>,
    precompiled: Option<PathBuf>,
    portable: bool,
    interruptible: bool,
    files: Option<afresh_files::Tree>,
    guest: GuestOptions,
}

impl WasmOptions {
    /// Drops all output of guests.
    pub(crate) fn discard_output(&mut self) {
        self.guest.wasi.output = afresh_wasm::Output::Discard;
    }
}

impl Options {
    /// The engine to run in. Guests of one engine share its timeout thread and its configuration,
    /// which must allow these options. By default, guests of the process with the same options
    /// share an engine ([`afresh_wasm::Engine::shared`]).
    pub fn engine(mut self, engine: Engine) -> Self {
        self.guest.kinds.wasm.engine = Some(engine);
        self
    }

    /// Maximum bytes of native stack for a Wasm guest. The default is the size for which the guest
    /// was built, if its file has it, else 512 KiB. It has no effect on a given engine.
    pub fn stack(mut self, bytes: usize) -> Self {
        self.guest.kinds.wasm.stack = Some(bytes);
        self
    }

    /// Directory of compiled Wasm modules, which is only read: the [`Options::cache`] of a process
    /// with [`Options::portable`] and otherwise these options. The files are native code, so the
    /// directory must be part of the installation. It has no effect on a given engine.
    pub fn precompiled(mut self, dir: impl Into<PathBuf>) -> Self {
        self.guest.kinds.wasm.precompiled = Some(dir.into());
        self
    }

    /// Compiles Wasm for every x86-64 processor since 2013 (x86-64-v3), so that other hosts can use
    /// the cache as [`Options::precompiled`]. It has no effect on a given engine.
    pub fn portable(mut self) -> Self {
        self.guest.kinds.wasm.portable = true;
        self
    }

    /// Makes calls of a Wasm guest interruptible without [`Options::timeout`]: by a
    /// [`CallOptions::timeout`](crate::CallOptions::timeout), or by dropping a call of an
    /// [`AsyncLease`](crate::AsyncLease). The guest is compiled with a check in each loop and
    /// function. Guests of other kinds can always be interrupted. A given engine must have
    /// `EngineConfig::timeouts`.
    pub fn interruptible(mut self) -> Self {
        self.guest.kinds.wasm.interruptible = true;
        self
    }

    /// Options of Wasm guests only: mode, strategy, WASI, imports, fuel. The time limit, memory
    /// limit and pool limits of these options take precedence over its own.
    pub fn wasm(mut self, options: GuestOptions) -> Self {
        self.guest.kinds.wasm.guest = options;
        self
    }

    /// A file tree in memory, mounted as the guest's `/`. It is part of the state: each call starts
    /// from the tree after the warm-up, sessions checkpoint, roll back and fork it with the memory,
    /// and snapshots contain it with the files of its layers. A snapshot with files has its own
    /// tree, and takes only the budget from this one (default: 64 MiB in 65,536 files). Host
    /// directories that WASI gets instead ([`afresh_wasm::Wasi::dirs`]) are not part of any state.
    pub fn files(mut self, files: afresh_files::Tree) -> Self {
        self.guest.kinds.wasm.files = Some(files);
        self
    }

    /// The tree below the files of snapshots that do not hold it
    /// ([`afresh_files::Layer::known_as`]): a tree over the same layers. Snapshots with all their
    /// files, or without files, do not need it.
    pub fn files_below(mut self, files: afresh_files::Tree) -> Self {
        self.guest.kinds.wasm.guest.files_below = Some(files);
        self
    }

    /// The given engine, or a new one for a guest whose file may be available, or which had this
    /// native stack when it was frozen.
    fn make_engine(&self, wasm: Option<&[u8]>, had: Option<usize>) -> Result<Engine, LoadError> {
        let WasmOptions { engine, stack, guest, .. } = &self.guest.kinds.wasm;
        if let Some(engine) = engine {
            return Ok(engine.clone());
        }
        let usual = EngineConfig::default();
        let config = EngineConfig {
            timeouts: self.guest.timeout.or(guest.timeout).is_some()
                || guest.watch.is_some()
                || self.guest.kinds.wasm.interruptible,
            fuel: guest.fuel.is_some(),
            cache: self.cache.clone(),
            precompiled: self.guest.kinds.wasm.precompiled.clone(),
            portable: self.guest.kinds.wasm.portable,
            stack: stack.or(had).unwrap_or(usual.stack),
            ..usual
        };
        Engine::shared(match (stack, wasm) {
            (None, Some(wasm)) => config.stack_for(wasm),
            _ => config,
        })
    }

    /// The options of a Wasm guest.
    fn for_wasm(&self) -> GuestOptions {
        let mut options = self.guest.kinds.wasm.guest.clone();
        options.limits = self.guest.limits;
        if self.guest.kinds.wasm.interruptible {
            options.watch = options.watch.stoppable();
        }
        if let Some(files) = &self.guest.kinds.wasm.files {
            options.wasi.files = Some(files.clone());
        }
        if let Some(timeout) = self.guest.timeout {
            options.timeout = Some(timeout);
        }
        if let Some(bytes) = self.guest.memory {
            options.memory_limit = usize::try_from(bytes).unwrap_or(usize::MAX);
        }
        options
    }
}

/// Warms the module or component in a file.
fn open(kind: Kind, file: &GuestFile<'_>, options: &Options) -> Result<Backend, OpenError> {
    let load = |error| failed(file.name, error);
    let engine = options.make_engine(Some(file.bytes), None).map_err(load)?;
    let guest = afresh_wasm::Guest::with_options(&engine, file.bytes, options.for_wasm());
    let (guest, warm_up) = (guest.map_err(load)?, warm_up(options));
    let warm = match kind {
        Kind::Component => guest.warm_component_with(&warm_up).map(Backend::Component),
        _ => guest.warm(warm_up).map(Backend::Module),
    };
    warm.map_err(|error| failed(file.name, error))
}

/// The calls of the warm-up.
fn warm_up(options: &Options) -> afresh_wasm::WarmUp {
    let mut warm_up = afresh_wasm::WarmUp::new();
    for call in &options.guest.warm_up {
        match &call.given {
            CallInput::Text(texts) => warm_up = warm_up.call_text(&call.function, texts),
            CallInput::Bytes(input) => warm_up = warm_up.call_bytes(&call.function, input.clone()),
        }
    }
    warm_up
}

impl FrozenKind for FrozenState {
    const RECORDER: Feature = Feature::UffdSigbus;

    fn thaw(frozen: &Frozen, options: &Options) -> Result<Backend, Cause> {
        let (engine, wasm) = (options.make_engine(None, frozen.stack())?, options.for_wasm());
        Ok(if frozen.is_component() {
            Backend::Component(afresh_wasm::WarmComponent::thaw(&engine, &wasm, frozen)?)
        } else {
            Backend::Module(afresh_wasm::Warm::thaw(&engine, &wasm, frozen)?)
        })
    }

    fn timeless_bytes(frozen: &Frozen) -> Result<Vec<u8>, Cause> {
        Ok(Self::timeless_bytes(frozen)?)
    }

    /// A module is only read to be compiled, and that takes longer than fetching it.
    fn skipped_pages(&self) -> usize {
        self.module_pages().end()
    }
}

/// No instance is available.
fn unavailable(error: WarmError) -> LeaseError {
    match error {
        WarmError::Exhausted { limit } => LeaseError::Exhausted { limit },
        WarmError::TimedOut(waited) => LeaseError::Timeout { waited },
        WarmError::Call { .. } => LeaseError::Guest(error.into()),
        WarmError::Load(LoadError::Limit { .. } | LoadError::Wasi(_)) => {
            LeaseError::Option(error.into())
        }
        _ => LeaseError::Create(error.into()),
    }
}

/// The options of a call of a Wasm guest.
fn call_options(options: &CallOptions) -> WasmCallOptions {
    let mut wasm = WasmCallOptions::new();
    if let Some(timeout) = options.timeout {
        wasm = wasm.timeout(timeout);
    }
    if let Some(fuel) = options.fuel {
        wasm = wasm.fuel(fuel);
    }
    if let Some(limit) = options.cpu_time {
        wasm = wasm.cpu_time(limit);
    }
    match options.memory {
        Some(bytes) => wasm.memory(usize::try_from(bytes).unwrap_or(usize::MAX)),
        None => wasm,
    }
}

/// The options of a lease of a Wasm guest.
fn lease_options(options: &LeaseOptions) -> WasmLeaseOptions {
    let wasm = WasmLeaseOptions::new().calls(call_options(&options.calls));
    match options.exhausted {
        Some(exhausted) => wasm.exhausted(exhausted),
        None => wasm,
    }
}

/// The control of a lease: the same for modules and components, whose leases have no trait in
/// common.
macro_rules! impl_lease_control {
    ($($lease:ty),*) => {$(
        impl LeaseControl for $lease {
            type Limits = LeaseLimits;

            fn set_options(&mut self, options: &CallOptions) -> Result<LeaseLimits, Cause> {
                Ok(self.set_limits(&call_options(options))?)
            }

            fn restore_options(&mut self, limits: LeaseLimits) {
                self.restore_limits(limits);
            }

            fn is_spoiled(&self) -> bool {
                self.is_cut_short()
            }

            fn call_stopper(&mut self) -> StopCall {
                let handle = self.stop_handle();
                Box::new(move || handle.stop())
            }

            fn runs_in_task(&self) -> bool {
                self.is_asynchronous()
            }

            fn discard_instance(self) {
                self.discard();
            }
        }
    )*};
}
impl_lease_control!(afresh_wasm::Lease<'_>, afresh_wasm::ComponentLease<'_>);

/// The error of a Wasm guest for its caller.
fn call_error(function: &str, error: WasmError) -> CallError {
    let kind = match &error {
        WasmError::CpuTime(limit) => ErrorKind::CpuTime(*limit),
        WasmError::Timeout(_) => ErrorKind::Timeout,
        WasmError::Stopped => ErrorKind::Stopped,
        WasmError::NoSuchExport { .. }
        | WasmError::NotARoot { .. }
        | WasmError::Arguments { .. } => ErrorKind::Request,
        WasmError::Trap { .. }
        | WasmError::Exception(_)
        | WasmError::OutOfFuel(_)
        | WasmError::Exit(_)
        | WasmError::Interface(_) => ErrorKind::Guest,
        _ => ErrorKind::Host,
    };
    CallError::of(function, kind, error.into())
}

/// The exit of a guest, if that is the cause of an error.
pub(super) fn exit(cause: &Cause) -> Option<Exit<'_>> {
    match cause.downcast_ref()? {
        WasmError::Exit(code) => Some(Exit { code: *code, output: &[], messages: "" }),
        _ => None,
    }
}

/// The stack of a guest at its failure.
pub(super) fn backtrace(cause: &Cause) -> Option<String> {
    cause.downcast_ref::<WasmError>()?.backtrace()
}
