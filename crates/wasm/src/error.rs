//! Errors, one type per operation.

use afresh_memory::{ImageError, SlotError};
use afresh_pool::PoolError;
use afresh_rewrite::{AnalyzeError, LinkError, PrepareComponentError, PrepareError};

/// Loading a guest failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Not Wasm at all.
    #[error(
        "this is neither a Wasm module nor a component: it starts with {start:02x?}, not with the Wasm magic number"
    )]
    NotWasm {
        /// The first bytes.
        start: Vec<u8>,
    },
    /// Modules could not be linked.
    #[error(transparent)]
    Modules(#[from] LinkError),
    /// The module could not be analysed.
    #[error(transparent)]
    Analyze(#[from] AnalyzeError),
    /// The module could not be prepared.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The component could not be prepared.
    #[error(transparent)]
    Component(#[from] PrepareComponentError),
    /// wasmtime refused the guest.
    #[error("the guest does not compile: {0:#}")]
    Compile(wasmtime::Error),
    /// The process has no mappings left for the guest's code.
    #[error(
        "no room for another guest's code: the process has {mappings} of the {most} mappings that the kernel \
         allows it; raise vm.max_map_count, or keep fewer guests"
    )]
    Mappings {
        /// Mappings that the process has.
        mappings: usize,
        /// `vm.max_map_count`.
        most: usize,
    },
    /// The engine could not be configured.
    #[error("the Wasm engine could not be set up: {0:#}")]
    Engine(wasmtime::Error),
    /// Other users can write to the cache of compiled guests, or own it.
    #[error(
        "the cache {} is of user {owner}, with mode {mode:o}: other users can replace its native code; \
         give a directory that this user alone can write to, or use `chmod go-w`",
        directory.display()
    )]
    SharedCache {
        /// The cache.
        directory: std::path::PathBuf,
        /// Its owner.
        owner: u32,
        /// Its permissions.
        mode: u32,
    },
    /// The engine belongs to the parent of this process.
    #[error(
        "the engine was made before a fork, and compiles with threads that only its parent has: make one in the child"
    )]
    Forked,
    /// The engine, or the guest, was not configured to enforce a requested limit.
    #[error("no {limit} is kept: set `{setting}` when making the engine or the guest")]
    Limit {
        /// Which limit.
        limit: &'static str,
        /// The setting that makes the engine keep it.
        setting: &'static str,
    },
    /// The embedder's engine is not configured for memories that are reset.
    #[error(
        "this wasmtime engine is not set up for warm guests, by {}: give its `Config` to `EngineConfig::apply` \
         before it is made",
        missing.join(", ")
    )]
    Settings {
        /// The settings of `wasmtime::Config` that are otherwise.
        missing: Vec<String>,
    },
    /// The guest imports something that is not provided.
    #[error(
        "the guest's imports cannot be satisfied: {0:#}; provide them with `GuestOptions::imports`, or \
         let calls of them fail with `GuestOptions::stub_imports`"
    )]
    Link(wasmtime::Error),
    /// WASI lacks something that its configuration promises.
    #[error("WASI cannot give the guest {0}")]
    Wasi(String),
    /// The module imports things that are not provided.
    #[error(
        "the guest imports what nobody provides: {}; provide it with `GuestOptions::imports`, let \
         calls of it fail with `GuestOptions::stub_imports`, or take it from another module with `Guest::linked`",
        afresh_rewrite::name_list(missing)
    )]
    Imports {
        /// All of them, with their types.
        missing: Vec<String>,
    },
}

impl LoadError {
    /// Translates wasmtime's error for a guest that it could not compile or map.
    pub(crate) fn compile(error: wasmtime::Error) -> Self {
        /// Mappings that one compiled guest may take at once.
        const MAX_GUEST_MAPPINGS: usize = 16;
        let most = afresh_sys::host::max_mappings();
        match afresh_sys::host::mappings() {
            Some(mappings) if mappings + MAX_GUEST_MAPPINGS >= most => {
                LoadError::Mappings { mappings, most }
            }
            _ => LoadError::Compile(error),
        }
    }
}

/// Warming a guest, or making an instance of a warm one, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WarmError {
    /// The guest cannot run in the requested mode.
    #[error("the guest cannot run in {mode} mode: {reason}")]
    Refused {
        /// The mode.
        mode: &'static str,
        /// Every reason found.
        reason: String,
    },
    /// Loading failed.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A call of the warm-up failed.
    #[error("the warm-up call {name:?} failed: {error}")]
    Call {
        /// The export that was called.
        name: String,
        /// What happened.
        error: CallError,
    },
    /// The instance could not be created.
    #[error("the guest could not be instantiated: {0:#}")]
    Instantiate(wasmtime::Error),
    /// The warm-up left WASI descriptors in another state than each call finds.
    #[error(
        "the warm-up {0}, and no call can start from that state; undo it at the end of the warm-up"
    )]
    Descriptors(String),
    /// The warm state cannot be kept.
    #[error("the warm state cannot be kept: {0}")]
    State(String),
    /// Memory for the guest could not be allocated.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The warm image could not be built.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// All instances are in use, and the lease does not wait.
    #[error(
        "all {limit} instances of the guest are in use: raise the limit, wait, or allow instances on demand"
    )]
    Exhausted {
        /// The limit.
        limit: usize,
    },
    /// The host has no thread for code of the guest that prepares an instance.
    #[error("the host has no thread for the guest's own initialisation: {0}")]
    Thread(#[source] std::io::Error),
    /// No instance came back within the time that the lease waits.
    #[error("no instance of the guest came back within {0:?}")]
    TimedOut(std::time::Duration),
}

impl From<PoolError<WarmError>> for WarmError {
    fn from(error: PoolError<WarmError>) -> Self {
        match error {
            PoolError::Create(error) => error,
            PoolError::TimedOut(waited) => WarmError::TimedOut(waited),
            PoolError::Exhausted { limit } => WarmError::Exhausted { limit },
            other => WarmError::State(other.to_string()),
        }
    }
}

/// Freezing or saving a warm guest failed.
pub type FreezeError = afresh_pager::FreezeError<WarmError>;

/// Thawing a frozen guest failed.
pub type ThawError = afresh_pager::ThawError<WarmError>;

impl From<WarmError> for FreezeError {
    fn from(error: WarmError) -> Self {
        Self::Guest(error)
    }
}

impl From<WarmError> for ThawError {
    fn from(error: WarmError) -> Self {
        Self::Guest(error)
    }
}

/// A call into a guest failed. The instance is restored when its lease is dropped, as after any
/// call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// No such function.
    #[error("the guest exports no function {name:?}; it exports {available}")]
    NoSuchExport {
        /// The requested name.
        name: String,
        /// The exported functions.
        available: String,
    },
    /// The guest exports it, but it is not among the declared calls.
    #[error(
        "{name:?} is not among the exports that calls may name ({roots}), so its changes would \
         stay: add it to `GuestOptions::roots`"
    )]
    NotARoot {
        /// The requested name.
        name: String,
        /// The names that calls may use.
        roots: String,
    },
    /// The arguments do not fit the function's type.
    #[error("wrong arguments for {name:?}, whose type is {expected}: {reason}")]
    Arguments {
        /// The function.
        name: String,
        /// Its type.
        expected: String,
        /// The part that does not fit.
        reason: String,
    },
    /// The guest trapped.
    #[error("the guest trapped: {message}")]
    Trap {
        /// Which trap.
        trap: wasmtime::Trap,
        /// The trap, and its cause as far as wasmtime knows it.
        message: String,
        /// The guest's stack, a frame a line.
        backtrace: Option<String>,
    },
    /// The guest threw an exception that nothing in it catches. The exception itself is dropped.
    #[error("the guest threw an exception and did not catch it: {0}")]
    Exception(String),
    /// The call exceeded its time limit.
    #[error("the call was stopped after its timeout of {0:?}")]
    Timeout(std::time::Duration),
    /// The call used its CPU time limit.
    #[error("the call used its CPU time limit of {0:?}: raise it, or set none")]
    CpuTime(std::time::Duration),
    /// The call was ended by the embedder's [`crate::Watch`].
    #[error("the call was stopped by its host")]
    Stopped,
    /// The call used up its fuel.
    #[error("the call used up its {0} units of fuel")]
    OutOfFuel(u64),
    /// The guest ended itself with a non-zero code.
    #[error("the guest exited with code {0}")]
    Exit(i32),
    /// A function of an Extism plug-in reported a failure.
    #[error("the plug-in failed: {message}")]
    Failed {
        /// What it returned.
        status: i32,
        /// What it said.
        message: String,
    },
    /// WASI could not provide its configuration to the guest. Effects of the call are undefined.
    #[error("WASI could not give the guest {0}")]
    Wasi(String),
    /// A host function failed.
    #[error("a host function failed: {}", without_backtrace(.0).0)]
    Host(wasmtime::Error),
    /// The guest's memory comes from a snapshot, and a page of it could not be fetched.
    #[error("the guest's memory is incomplete: {0}")]
    Memory(String),
    /// A plain call of a guest whose calls may wait.
    #[error(
        "this guest's host functions are asynchronous (`GuestOptions::asynchronous`): call it with \
         `call_async`, `invoke_async` or `call_bytes_async`"
    )]
    Asynchronous,
    /// An asynchronous call of a guest whose host functions would block the thread.
    #[error(
        "this guest's host functions are synchronous: set `GuestOptions::asynchronous` before it is warmed, \
         or use `call`, `invoke` or `call_bytes`"
    )]
    Synchronous,
    /// An earlier call did not come to its end: its future was dropped, a host function panicked,
    /// or, in a component, it trapped.
    #[error(
        "an earlier call of this lease was dropped, panicked or trapped before it was over, and what it left is not \
         used again: take another lease"
    )]
    CutOff,
    /// The guest violates the byte-handling interface.
    #[error("the guest does not keep the byte interface: {0}")]
    Interface(String),
}

impl CallError {
    /// The guest's stack at the failure, one frame a line, if it is known. Messages omit it, so
    /// that they have one line.
    #[must_use]
    pub fn backtrace(&self) -> Option<String> {
        match self {
            Self::Trap { backtrace, .. } => backtrace.clone(),
            Self::Host(error) => without_backtrace(error).1,
            _ => None,
        }
    }
}

/// Splits wasmtime's error into its message and the backtrace that wasmtime puts among the causes.
pub(crate) fn without_backtrace(error: &wasmtime::Error) -> (String, Option<String>) {
    let backtrace = error.downcast_ref::<wasmtime::WasmBacktrace>().map(ToString::to_string);
    let causes: Vec<String> = error
        .chain()
        .map(ToString::to_string)
        .filter(|cause| Some(cause) != backtrace.as_ref())
        .collect();
    (causes.join(": "), backtrace)
}

/// Names, for an error.
pub(crate) fn join_names(mut names: Vec<String>) -> String {
    names.sort_unstable();
    if names.is_empty() {
        "no function at all".to_owned()
    } else {
        afresh_rewrite::name_list(&names)
    }
}

/// The error with which a function of a plug-in ended.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct PluginFailure {
    pub(crate) status: i32,
    pub(crate) message: String,
}
