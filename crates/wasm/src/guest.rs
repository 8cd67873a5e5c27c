//! Guests: a module or component, and its options.

pub(crate) mod extism;

use std::sync::Arc;
use std::time::Duration;

use afresh_memory::{HostAccess, Strategy};
use afresh_pool::Limits;
use afresh_rewrite::{Analysis, Roots, analyze, names};
use serde::{Deserialize, Serialize};
use wasmtime::{Linker, StoreContextMut, Val, component};

use crate::engine::call_path::CallPath;
use crate::engine::linear::MemoryPolicy;
#[cfg(feature = "call-hook")]
use crate::host::hook::Hook;
use crate::host::uniqueness::entropy;
use crate::host::watch::Watch;
use crate::host::{Host, Limiter, State, Wasi};
use crate::{Engine, LoadError};

/// The isolation between calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Reset where the module allows it, fresh otherwise.
    #[default]
    Auto,
    /// The same instance again, restored.
    Reset,
    /// A new store and instance each time, over warm memory.
    Fresh,
}

impl Mode {
    /// The name used in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Mode::Auto => "auto",
            Mode::Reset => "reset",
            Mode::Fresh => "fresh",
        }
    }
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        [Mode::Auto, Mode::Reset, Mode::Fresh]
            .into_iter()
            .find(|m| m.name() == name)
            .ok_or_else(|| format!("unknown mode `{name}`; known are auto, reset, fresh"))
    }
}

type Link = dyn Fn(&mut Linker<Host>) -> wasmtime::Result<()> + Send + Sync;
type LinkComponent = dyn Fn(&mut component::Linker<Host>) -> wasmtime::Result<()> + Send + Sync;

/// Host functions that the embedder adds to WASI, `afresh.generation` (modules) and
/// `afresh:host/clones` (components). The default has none.
///
/// Their state must be in [`Host::state`], which is new for every lease. State elsewhere survives
/// leases.
///
/// A guest with [`GuestOptions::asynchronous`] may have asynchronous ones; no other may.
///
/// A guest with host functions opens only once a lazily opened snapshot has arrived completely,
/// unless they [check memory](Imports::check_memory).
#[derive(Clone, Default)]
pub struct Imports {
    module: Option<Arc<Link>>,
    component: Option<Arc<LinkComponent>>,
    /// Whether those of a module, and those of a component, check memory.
    checks: [bool; 2],
    /// Whether those of a component were added last.
    last: usize,
}

/// Places in [`Imports::checks`].
const MODULE: usize = 0;
const COMPONENT: usize = 1;

impl Imports {
    /// `link` defines imports of a module, and may replace existing ones.
    pub fn new(
        link: impl Fn(&mut Linker<Host>) -> wasmtime::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self { module: Some(Arc::new(link)), ..Self::default() }
    }

    /// Promises that each function of the last `link` calls [`Host::check_memory`] after it has
    /// read memory or arguments of the guest, and before it acts on them. Then a lazily opened
    /// snapshot stays lazy: its guest runs while pages are missing. If one of them is lost, the
    /// function reads zeros, and the check fails.
    #[must_use]
    pub fn check_memory(mut self) -> Self {
        self.checks[self.last] = true;
        self
    }

    /// Whether a guest has to wait for all of its memory, because these functions may act on what
    /// they read there.
    pub(crate) fn need_memory(&self, component: bool) -> bool {
        match component {
            true => self.component.is_some() && !self.checks[COMPONENT],
            false => self.module.is_some() && !self.checks[MODULE],
        }
    }

    /// Adds `link`'s definitions for a component, which may also replace existing ones.
    #[must_use]
    pub fn component(
        mut self,
        link: impl Fn(&mut component::Linker<Host>) -> wasmtime::Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.component = Some(Arc::new(link));
        self.checks[COMPONENT] = false;
        self.last = COMPONENT;
        self
    }

    /// These, after the definitions of `first` for a module, which check memory.
    pub(crate) fn after(
        self,
        first: impl Fn(&mut Linker<Host>) -> wasmtime::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let checks = [!self.need_memory(false), self.checks[COMPONENT]];
        let Self { module, component, last, .. } = self;
        let both = Self::new(move |linker| {
            first(linker)?;
            module.as_ref().map_or(Ok(()), |module| module(linker))
        });
        Self { component, checks, last, ..both }
    }
}

/// Options of running a guest.
#[derive(Clone)]
pub struct GuestOptions {
    /// Reset, fresh or auto.
    pub mode: Mode,
    /// The reset strategy of its memories.
    pub strategy: Strategy,
    /// Whether system calls write its memories. wasmtime-wasi copies through its own buffers, so
    /// only the embedder's host functions matter.
    pub host_access: HostAccess,
    /// The WASI configuration.
    pub wasi: Wasi,
    /// The tree below the files of snapshots that do not contain it: a tree over layers that [have
    /// names](afresh_files::Layer::known_as).
    pub files_below: Option<afresh_files::Tree>,
    /// Time limit of one call; needs [`crate::EngineConfig::timeouts`]. A call is stopped at most
    /// two ticks of 5 ms after its limit, or later if the host's threads do not run, and never
    /// before it. A warm-up has no time limit and no fuel limit; a [watch](GuestOptions::watch)
    /// ends it.
    pub timeout: Option<Duration>,
    /// Maximum fuel of one call; needs [`crate::EngineConfig::fuel`].
    pub fuel: Option<u64>,
    /// Maximum bytes of its memories and tables together. An element of a table counts as 16 bytes.
    /// The heap of collected objects has a separate limit of the same size.
    pub memory_limit: usize,
    /// The exports that calls may name, so that state which only other exports can change need not
    /// be restored. Calls of other exports are refused, in either mode. The warm-up may call any.
    pub roots: Roots,
    /// Limits of the pool of instances.
    pub limits: Limits,
    /// Interval in resets of comparisons between memory and image.
    pub verify_every: Option<u32>,
    /// The embedder's host functions.
    pub imports: Imports,
    /// The embedder's state, made new for each lease; host functions find it with [`Host::state`].
    pub state: State,
    /// The embedder's limiter, in addition to `memory_limit`.
    pub limiter: Limiter,
    /// The embedder's call hook, notified of guest calls; with this crate's feature `call-hook`.
    #[cfg(feature = "call-hook")]
    pub hook: Hook,
    /// Called while a call, or the warm-up of a module, runs, and decides whether it may continue.
    pub watch: Watch,
    /// Whether WASI and host functions may wait without blocking the thread, for guests that are
    /// called in tasks, where blocking WASI would panic. Call such a guest with
    /// [`Lease::call_async`](crate::Lease::call_async) and similar methods, in a tokio task. Each
    /// call runs on a separate stack, and takes a fraction of a microsecond longer.
    pub asynchronous: bool,
    /// Whether a computing call of an asynchronous guest yields to other tasks of its thread after
    /// each tick of the epoch. It is for guests with a timeout, in tasks that must not starve each
    /// other.
    pub gives_way: bool,
    /// Loads a guest with missing imports. A call of one of them fails.
    pub stub_imports: bool,
}

impl std::fmt::Debug for GuestOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestOptions")
            .field("mode", &self.mode)
            .field("strategy", &self.strategy)
            .field("timeout", &self.timeout)
            .field("memory_limit", &self.memory_limit)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl Default for GuestOptions {
    fn default() -> Self {
        Self {
            mode: Mode::Auto,
            strategy: Strategy::Auto,
            host_access: HostAccess::Threads,
            wasi: Wasi::default(),
            files_below: None,
            timeout: None,
            fuel: None,
            memory_limit: usize::MAX,
            roots: Roots::AllExports,
            limits: Limits::default(),
            verify_every: None,
            imports: Imports::default(),
            state: State::default(),
            limiter: Limiter::default(),
            #[cfg(feature = "call-hook")]
            hook: Hook::default(),
            watch: Watch::default(),
            asynchronous: false,
            gives_way: false,
            stub_imports: false,
        }
    }
}

impl GuestOptions {
    /// How memories of a module or component are made.
    pub(crate) fn policy(&self, engine: &Engine, component: bool) -> MemoryPolicy {
        // WASI 0.3 reads streams of bytes out of guest memory as it writes them.
        let streams = component && self.asynchronous && engine.inner.config.has_p3();
        MemoryPolicy {
            waits: streams || self.imports.need_memory(component),
            strategy: self.strategy,
            host_access: self.host_access,
            verify_every: self.verify_every,
            memory64_capacity: engine.inner.config.memory64_capacity,
            zero_source: engine.inner.config.zero_memory.source(),
        }
    }

    /// A linker with everything a core module may import.
    pub(crate) fn linker(&self, engine: &Engine) -> Result<Linker<Host>, LoadError> {
        let mut linker = engine.provided(self.asynchronous)?.clone();
        if let Some(link) = &self.imports.module {
            linker.allow_shadowing(true);
            link(&mut linker).map_err(LoadError::Link)?;
        }
        Ok(linker)
    }

    /// A linker with everything a component may import.
    pub(crate) fn component_linker(
        &self,
        engine: &Engine,
    ) -> Result<component::Linker<Host>, LoadError> {
        let mut linker = component::Linker::new(engine.wasmtime());
        let result = (|| {
            match self.asynchronous {
                false => wasmtime_wasi::p2::add_to_linker_sync(&mut linker)?,
                true => wasmtime_wasi::p2::add_to_linker_async(&mut linker)?,
            }
            #[cfg(feature = "p3")]
            if self.asynchronous && engine.inner.config.has_p3() {
                use wasmtime_wasi::p3;
                p3::cli::add_to_linker(&mut linker)?;
                p3::clocks::add_to_linker(&mut linker)?;
                p3::random::add_to_linker(&mut linker)?;
                p3::sockets::add_to_linker(&mut linker)?;
                // Without directories: `Stores::has_no_files_for`.
                p3::filesystem::add_to_linker(&mut linker)?;
            }
            linker.allow_shadowing(true);
            crate::host::preview2::link_io(&mut linker, self.asynchronous)?;
            crate::host::preview2::link(&mut linker, self.asynchronous)?;
            linker.allow_shadowing(false);
            let mut clones = linker.instance(names::CLONES)?;
            clones.func_wrap("generation", |store: StoreContextMut<'_, Host>, ()| {
                Ok((store.data().generation(),))
            })?;
            clones.func_wrap("entropy", |_: StoreContextMut<'_, Host>, ()| {
                let (lo, hi) = entropy();
                Ok(((lo.cast_unsigned(), hi.cast_unsigned()),))
            })?;
            match &self.imports.component {
                Some(link) => {
                    linker.allow_shadowing(true);
                    link(&mut linker)
                }
                None => Ok(()),
            }
        })();
        result.map_err(LoadError::Link)?;
        Ok(linker)
    }
}

/// The calls of a warm-up. Every later call starts from the state after them.
#[derive(Clone, Debug, Default)]
pub struct WarmUp {
    pub(crate) calls: Vec<(String, Arguments)>,
}

/// Arguments of a warm-up call.
#[derive(Clone, Debug)]
pub(crate) enum Arguments {
    Values(Vec<Val>),
    /// To be read by the function's type.
    Texts(Vec<String>),
    Component(Vec<wasmtime::component::Val>),
    /// The input of a handler.
    Bytes(Vec<u8>),
}

impl WarmUp {
    /// No call: the warm state is that after instantiation (and `_initialize`, for a WASI reactor).
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a call of an exported function; calls run in order, once, in one instance.
    #[must_use]
    pub fn call(mut self, name: impl Into<String>, arguments: &[Val]) -> Self {
        self.calls.push((name.into(), Arguments::Values(arguments.to_vec())));
        self
    }

    /// Like [`WarmUp::call`], with arguments as text, read by the function's type as
    /// [`crate::parse_arguments`] does.
    #[must_use]
    pub fn call_text(mut self, name: impl Into<String>, arguments: &[String]) -> Self {
        self.calls.push((name.into(), Arguments::Texts(arguments.to_vec())));
        self
    }

    /// Like [`WarmUp::call`], for a handler that takes and returns bytes ([`crate::BytesEntry`]);
    /// in a component, for a function that takes one string. Its answer is dropped.
    #[must_use]
    pub fn call_bytes(mut self, name: impl Into<String>, input: impl Into<Vec<u8>>) -> Self {
        self.calls.push((name.into(), Arguments::Bytes(input.into())));
        self
    }

    /// Like [`WarmUp::call`], for a component's export; `name` is as in
    /// [`crate::ComponentLease::call`].
    #[must_use]
    pub fn call_component(
        mut self,
        name: impl Into<String>,
        arguments: &[wasmtime::component::Val],
    ) -> Self {
        self.calls.push((name.into(), Arguments::Component(arguments.to_vec())));
        self
    }
}

/// The bytes of a guest, and its options.
#[derive(Debug)]
pub struct Guest {
    pub(crate) engine: Engine,
    pub(crate) wasm: Arc<[u8]>,
    pub(crate) options: GuestOptions,
}

impl Guest {
    /// A guest from the binary of a core module or component, with default options.
    ///
    /// # Errors
    /// [`LoadError`] when the bytes are not Wasm.
    pub fn new(engine: &Engine, wasm: &[u8]) -> Result<Self, LoadError> {
        Self::with_options(engine, wasm, GuestOptions::default())
    }

    /// A guest with options.
    ///
    /// # Errors
    /// [`LoadError`] when the bytes are not Wasm.
    pub fn with_options(
        engine: &Engine,
        wasm: &[u8],
        options: GuestOptions,
    ) -> Result<Self, LoadError> {
        if !wasm.starts_with(b"\0asm") {
            return Err(LoadError::NotWasm { start: wasm.iter().take(8).copied().collect() });
        }
        Ok(Self { engine: engine.clone(), wasm: wasm.into(), options })
    }

    /// A guest of several core modules. Later modules import memories, tables, globals and
    /// functions that earlier ones export, by the names given here. The modules are instantiated in
    /// this order, and the instance has the exports of the last one. Reactors are initialised when
    /// they are instantiated. They are [linked](crate::link) into one module.
    ///
    /// # Errors
    /// [`LoadError::Modules`] when an import does not fit its export.
    pub fn linked(
        engine: &Engine,
        modules: &[(&str, &[u8])],
        options: GuestOptions,
    ) -> Result<Self, LoadError> {
        Self::with_options(engine, &afresh_rewrite::link(modules)?, options)
    }

    /// Whether it is a component. The layer field follows the version in the binary's header.
    #[must_use]
    pub fn is_component(&self) -> bool {
        self.wasm.get(6..8) == Some(&[1, 0])
    }

    /// Analyses the state that a core module can change, and whether reset mode accepts it.
    ///
    /// # Errors
    /// [`LoadError::Analyze`] for a component or an invalid module.
    pub fn analyze(&self) -> Result<Analysis, LoadError> {
        Ok(analyze(&self.wasm, &self.options.roots)?)
    }

    pub(crate) fn call_path(&self) -> CallPath {
        CallPath::of(self.options.asynchronous, self.engine.deep())
    }
}
