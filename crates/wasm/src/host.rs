//! Host state: state of a call outside the guest memory. Each call gets new host state.
//!
//! The WASI context is built when a call first uses WASI, so that other calls do not pay for it,
//! and dropped with the lease. The table of component resources is separate: streams and resources
//! of embedders need only the table.

pub(crate) mod clock;
pub(crate) mod descriptors;
pub(crate) mod files;
pub(crate) mod hand_over;
#[cfg(feature = "call-hook")]
pub(crate) mod hook;
pub(crate) mod losses;
pub(crate) mod memories;
pub(crate) mod opened;
pub(crate) mod preview1;
pub(crate) mod preview2;
pub(crate) mod uniqueness;
pub(crate) mod wait;
pub(crate) mod watch;

mod limiter;
mod output;

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use wasmtime::component::ResourceTable;
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::p2::pipe::{MemoryInputPipe, MemoryOutputPipe};
use wasmtime_wasi::{WasiCtx, WasiCtxBuilder, WasiCtxView, WasiView};

use afresh_files::Tree;

use crate::LoadError;
use crate::engine::call_path::CallPath;
use crate::host::clock::Clock;
use crate::host::files::{Files, LiveFiles};
use crate::host::memories::{HostMemories, usable};
use crate::host::watch::{CpuDeadline, StopHandle, Watch};

pub use limiter::Limiter;
pub(crate) use limiter::{beyond_limit, table_bytes};
use output::HandlerStream;
pub use output::{Output, OutputHandler, StandardStream};

/// WASI of every call. The default has arguments and environment, and neither files nor network.
#[derive(Clone, Debug, Default)]
pub struct Wasi {
    /// Command-line arguments, the program's name first.
    pub args: Vec<String>,
    /// Environment variables.
    pub env: Vec<(String, String)>,
    /// A file tree in memory, mounted as `/`. It is guest state: every call starts from its warm
    /// state, sessions roll it back, and snapshots hold it. A guest with a tree has no `dirs`; a
    /// host directory can be a layer of the tree.
    pub files: Option<Tree>,
    /// Host directories and their paths in the guest, read-only when `false`. The guest reaches
    /// nothing above them. A directory that cannot be opened fails the warm-up, or the first call
    /// that needs it. Resets and rollbacks do not undo writes of calls.
    pub dirs: Vec<(std::path::PathBuf, String, bool)>,
    /// Standard output and error.
    pub output: Output,
    /// Standard input; the same bytes for every call.
    pub stdin: Vec<u8>,
    /// Passes the standard input of this process to the guest if `stdin` is empty. Each byte is
    /// read by one call only.
    pub inherit_stdin: bool,
}

impl Wasi {
    /// The standard streams and all directories, or the directory that cannot be opened.
    pub(crate) fn open_directories(&self) -> Result<Files, String> {
        if self.files.is_some() && !self.dirs.is_empty() {
            return Err("a guest with a file tree has no host directories beside it: make them layers of the tree, \
                        or leave the tree out"
                .to_owned());
        }
        Files::of_directories(&self.dirs)
    }

    /// Refuses directories for one lease that change the meaning of a descriptor from the warm-up:
    /// each directory of `guest` has to be there, at its position and under its name.
    pub(crate) fn fits(&self, guest: &Self) -> Result<(), LoadError> {
        if self.files.is_some() && guest.files.is_none() {
            return Err(LoadError::Wasi(
                "a lease can have a file tree of its own where its guest has one, if an empty one"
                    .to_owned(),
            ));
        }
        if (self.files.is_some() || guest.files.is_some()) && !self.dirs.is_empty() {
            return Err(LoadError::Wasi(
                "the guest has a file tree, so a lease has no host directories: make them layers of the tree"
                    .to_owned(),
            ));
        }
        for (at, (_, name, _)) in guest.dirs.iter().enumerate() {
            match self.dirs.get(at) {
                Some((_, own, _)) if own == name => {}
                other => {
                    let instead =
                        other.map_or("nothing".to_owned(), |(_, own, _)| format!("{own:?}"));
                    return Err(LoadError::Wasi(format!(
                        "{instead} where the guest's options have the directory {name:?}: give a lease the \
                         same names in the same order, and others after them"
                    )));
                }
            }
        }
        Ok(())
    }
}

enum Context {
    None,
    P1(Box<WasiP1Ctx>),
    P2(Box<WasiCtx>),
}

type StateFactory = dyn Fn() -> Box<dyn Any + Send> + Send + Sync;

/// State of the embedder. A function makes it for each lease on the first [`Host::state`], and it
/// is dropped with the lease. The default makes no state.
#[derive(Clone, Default)]
pub struct State(Option<Arc<StateFactory>>);

impl State {
    /// State returned by `make`.
    pub fn new<T: Send + 'static>(make: impl Fn() -> T + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(move || Box::new(make()) as Box<dyn Any + Send>)))
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("State").field(&self.0.is_some()).finish()
    }
}

/// Configuration of a [`Host`].
pub(crate) struct HostParts {
    /// The files that calls of a warm guest start from; those of `wasi` before.
    pub(crate) files: Arc<OnceLock<Files>>,
    pub(crate) wasi: Arc<Wasi>,
    pub(crate) clock: Clock,
    pub(crate) state: State,
    pub(crate) limiter: Limiter,
    pub(crate) watch: Watch,
    /// Ticks of the epoch so far, where the engine advances it.
    pub(crate) ticks: Arc<AtomicU64>,
    pub(crate) memory_limit: usize,
    /// Maximum instances in the store; `None` for the limit of wasmtime.
    pub(crate) instances: Option<usize>,
    /// How code in the store is entered.
    pub(crate) way: CallPath,
}

/// Host state of one lease; the `T` of its `Store<T>`.
pub struct Host {
    parts: HostParts,
    /// WASI for the calls of this lease, in place of the WASI of the guest.
    own: Option<Arc<Wasi>>,
    /// The destination of output of this lease, if it differs from that of the WASI options.
    output: Option<Output>,
    /// The error of a failed WASI context.
    failure: Option<String>,
    context: Context,
    /// The component resources, once there are any.
    table: Option<ResourceTable>,
    /// An empty table, for calls after a loss of memory.
    void: ResourceTable,
    /// Those that the guest runs on, which stay with the store.
    memories: HostMemories,
    /// Whether the instance over them is being made.
    instantiating: bool,
    /// Bytes of all tables in the store, which never shrink.
    table_bytes: usize,
    /// The files that this store starts from, of a session or of a lease with its own files.
    start: Option<Files>,
    /// Its files, once used.
    live: Option<LiveFiles>,
    stdout: Option<MemoryOutputPipe>,
    stderr: Option<MemoryOutputPipe>,
    generation: u64,
    /// Calls of the allocator that are under way, each on its own stack.
    handing_over: u32,
    /// Ticks left to a call that yields after each; `None` for other calls.
    turns: Option<u64>,
    data: Option<Box<dyn Any + Send>>,
    state: Option<Box<dyn Any + Send>>,
    /// Set by the lease's [`StopHandle`].
    stop: Option<StopHandle>,
    /// Alive while the store has its first epoch callback.
    callback: Option<Weak<()>>,
    /// Whether the guest, and not the engine, is entered next in its store.
    #[cfg(feature = "call-hook")]
    guests: bool,
    /// Deadline of the current call, where a watch checks it.
    until: Option<Instant>,
    /// The time limit of the current call, and the tick at which it expires.
    time_limit: Option<(Duration, u64)>,
    pub(crate) cpu_deadline: CpuDeadline,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host")
            .field("generation", &self.generation)
            .field("memory_limit", &self.parts.memory_limit)
            .finish_non_exhaustive()
    }
}

impl Host {
    pub(crate) fn new(parts: HostParts) -> Self {
        Self {
            parts,
            own: None,
            output: None,
            failure: None,
            context: Context::None,
            table: None,
            void: ResourceTable::default(),
            memories: HostMemories::default(),
            instantiating: false,
            table_bytes: 0,
            start: None,
            live: None,
            stdout: None,
            stderr: None,
            generation: 0,
            handing_over: 0,
            turns: None,
            data: None,
            state: None,
            stop: None,
            callback: None,
            #[cfg(feature = "call-hook")]
            guests: false,
            until: None,
            time_limit: None,
            cpu_deadline: CpuDeadline::default(),
        }
    }

    /// Drops all state of the last call.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.handing_over = 0;
        if !matches!(self.context, Context::None) {
            self.context = Context::None;
            self.stdout = None;
            self.stderr = None;
        }
        if self.failure.is_some() {
            self.failure = None;
        }
        if self.table.is_some() {
            self.table = None;
        }
        if self.live.is_some() {
            self.live = None;
        }
        if self.start.is_some() {
            self.start = None;
        }
        if self.data.is_some() {
            self.data = None;
        }
        if self.own.is_some() {
            self.own = None;
        }
        if self.output.is_some() {
            self.output = None;
        }
        if self.state.is_some() {
            self.state = None;
        }
        if self.stop.is_some() {
            self.stop = None;
        }
    }

    /// Whether it holds no state of a call.
    pub(crate) fn is_clear(&self) -> bool {
        matches!(self.context, Context::None)
            && self.table.is_none()
            && self.live.is_none()
            && self.start.is_none()
            && self.stdout.is_none()
            && self.stderr.is_none()
            && self.data.is_none()
            && self.own.is_none()
            && self.output.is_none()
            && self.state.is_none()
            && self.stop.is_none()
    }

    pub(crate) fn set_turns(&mut self, turns: Option<u64>) {
        self.turns = turns;
    }

    /// Whether a call that has run for another tick may continue.
    pub(crate) fn take_turn(&mut self) -> Option<u64> {
        self.turns = self.turns.map(|turns| turns.saturating_sub(1));
        self.turns
    }

    /// Records whether the next code in the store belongs to the guest, for call hooks.
    #[inline]
    #[cfg_attr(not(feature = "call-hook"), expect(unused_variables, clippy::unused_self))]
    pub(crate) fn set_guests(&mut self, guests: bool) {
        #[cfg(feature = "call-hook")]
        {
            self.guests = guests;
        }
    }

    #[cfg(feature = "call-hook")]
    pub(crate) fn is_guests(&self) -> bool {
        self.guests
    }

    pub(crate) fn set_callback(&mut self, callback: Weak<()>) {
        self.callback = Some(callback);
    }

    /// Whether a host function replaced the epoch callback of the store by calling
    /// `epoch_deadline_trap`. Only a new [`wasmtime::Store`] can set another.
    pub(crate) fn lost_callback(&self) -> bool {
        self.callback.as_ref().is_some_and(|callback| callback.strong_count() == 0)
    }

    pub(crate) fn set_until(&mut self, until: Option<Instant>) {
        self.until = until;
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.until
    }

    /// Sets the time limit of the next call, for a limit that expires after some ticks of the
    /// engine.
    #[inline]
    pub(crate) fn set_time_limit(&mut self, limit: Option<(Duration, u64)>) {
        self.time_limit = limit.map(|(limit, ticks)| {
            (limit, self.parts.ticks.load(Ordering::Relaxed).saturating_add(ticks))
        });
    }

    /// Whether the time limit of the call has expired. An epoch that the embedder advances is not
    /// counted here; then no wait takes longer than the limit.
    fn is_expired(&self, wait_started: Instant) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
            || self.time_limit.is_some_and(|(limit, last)| {
                self.parts.ticks.load(Ordering::Relaxed) >= last || wait_started.elapsed() >= limit
            })
    }

    /// Fails once the call has reached a limit, as compiled code does at its next loop. For host
    /// functions that have waited since `wait_started`.
    pub(crate) fn check_limits(&mut self, wait_started: Instant) -> wasmtime::Result<()> {
        if self.is_expired(wait_started) {
            return Err(wasmtime::Trap::Interrupt.into());
        }
        self.watch().check(self)
    }

    /// A handle that stops the calls of this lease.
    pub(crate) fn stop_handle(&mut self) -> StopHandle {
        self.stop.get_or_insert_default().clone()
    }

    pub(crate) fn set_stop(&mut self, stop: StopHandle) {
        self.stop = Some(stop);
    }

    /// Whether the calls of this lease were stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.as_ref().is_some_and(|StopHandle(stopped)| stopped.load(Ordering::Relaxed))
    }

    pub(crate) fn call_path(&self) -> CallPath {
        self.parts.way
    }

    pub(crate) fn watch(&self) -> Watch {
        self.parts.watch.clone()
    }

    pub(crate) fn set_generation(&mut self, generation: u64) {
        self.generation = generation;
    }

    /// Number of this clone, unique among the leases of a process. Guests read it by importing
    /// `afresh.generation`.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// State of the embedder for this call, as set by [`Host::set_data`].
    pub fn data<T: 'static>(&mut self) -> Option<&mut T> {
        self.data.as_mut()?.downcast_mut()
    }

    /// Sets state of the embedder, which is dropped with the lease.
    pub fn set_data(&mut self, data: impl Any + Send) {
        self.data = Some(Box::new(data));
    }

    /// State of the embedder for this lease, made on first use.
    ///
    /// # Panics
    /// When [`crate::GuestOptions::state`] makes none, or one of another type.
    pub fn state<T: 'static>(&mut self) -> &mut T {
        let make = &self.parts.state.0;
        let state = self.state.get_or_insert_with(|| match make {
            Some(make) => make(),
            None => panic!("`GuestOptions::state` makes no state for host functions"),
        });
        match state.downcast_mut() {
            Some(state) => state,
            None => panic!(
                "`GuestOptions::state` makes another type than {}",
                std::any::type_name::<T>()
            ),
        }
    }

    /// State of the embedder as [`Host::state`] returns it, and the WASI table of component
    /// resources: for host functions that make their resources from those of WASI, or the reverse.
    ///
    /// # Panics
    /// As [`Host::state`].
    pub fn state_and_table<T: 'static>(&mut self) -> (&mut T, &mut ResourceTable) {
        // Both are made on first use.
        self.state::<T>();
        let lost = self.has_lost();
        let state = self.state.as_mut().and_then(|state| state.downcast_mut());
        let Some(state) = state else { unreachable!("just made") };
        (state, usable(lost, &mut self.void, &mut self.table))
    }

    /// Captured standard output of the call so far.
    #[must_use]
    pub fn stdout(&self) -> Vec<u8> {
        self.stdout.as_ref().map(|p| p.contents().to_vec()).unwrap_or_default()
    }

    /// Captured standard error of the call so far.
    #[must_use]
    pub fn stderr(&self) -> Vec<u8> {
        self.stderr.as_ref().map(|p| p.contents().to_vec()).unwrap_or_default()
    }

    /// The error of a call whose WASI context failed, even if the guest ignored it.
    #[inline]
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// The files of the guest: those of the warm state until the call changes them, or the host
    /// directories of its options.
    pub(crate) fn live(&mut self) -> LiveFiles {
        if let Some(live) = &self.live {
            return live.clone();
        }
        let live = match self.start() {
            Some(files) => LiveFiles::of_tree(files),
            None => {
                let wasi = self.own.as_ref().unwrap_or(&self.parts.wasi);
                let files = wasi.open_directories().unwrap_or_else(|error| {
                    // None at all: descriptors are numbered by order, and one that is missing would
                    // give its number to the next.
                    self.failure = Some(error);
                    Files::none()
                });
                LiveFiles::on_host(files)
            }
        };
        self.live.insert(live).clone()
    }

    /// Files of a guest without a tree, once used.
    pub(crate) fn live_on_host(&self) -> Option<&LiveFiles> {
        self.live.as_ref().filter(|live| live.granted_descriptors().is_some())
    }

    /// The files that this store starts from.
    fn start(&self) -> Option<Files> {
        if let Some(start) = &self.start {
            return Some(start.clone());
        }
        if let Some(own) = self.own.as_ref().and_then(|own| own.files.as_ref()) {
            return Some(Files::new(own.clone()));
        }
        match self.parts.files.get() {
            Some(warm) => Some(warm.clone()),
            None => self.parts.wasi.files.clone().map(Files::new),
        }
    }

    /// The current file tree and its open files; `None` in a guest without a tree.
    #[must_use]
    pub fn files(&self) -> Option<Files> {
        match &self.live {
            Some(live) if live.granted_descriptors().is_some() => None,
            Some(live) => Some(live.lock().clone()),
            None => self.start(),
        }
    }

    /// Replaces the files.
    pub(crate) fn set_files(&mut self, files: Option<Files>) {
        (self.start, self.live) = (files, None);
    }

    /// Changes the file tree from outside, for later operations of the guest. Returns the result of
    /// `change`, or `None` in a guest without a tree.
    pub fn change_files<T>(&mut self, change: impl FnOnce(&mut Tree) -> T) -> Option<T> {
        let live = self.live();
        match live.granted_descriptors() {
            Some(_) => None,
            None => Some(change(&mut live.lock().tree)),
        }
    }

    /// Replaces the WASI configuration of its guest.
    pub(crate) fn set_wasi(&mut self, wasi: Arc<Wasi>) {
        self.own = Some(wasi);
    }

    /// Replaces the destination of its standard output and error.
    pub(crate) fn set_output(&mut self, output: Output) {
        self.output = Some(output);
    }

    /// Whether its standard output and error are those of this process.
    pub(crate) fn inherits_output(&self) -> bool {
        let wasi = self.own.as_ref().unwrap_or(&self.parts.wasi);
        matches!(self.output.as_ref().unwrap_or(&wasi.output), Output::Inherit)
    }

    fn builder(&mut self) -> WasiCtxBuilder {
        let wasi = self.own.as_ref().unwrap_or(&self.parts.wasi).clone();
        let mut builder = WasiCtxBuilder::new();
        builder.args(&wasi.args).envs(&wasi.env).monotonic_clock(self.parts.clock.clone());
        if !wasi.stdin.is_empty() {
            builder.stdin(MemoryInputPipe::new(wasi.stdin.clone()));
        } else if wasi.inherit_stdin {
            builder.inherit_stdin();
        }
        match self.output.as_ref().unwrap_or(&wasi.output) {
            Output::Discard => {}
            Output::Inherit => {
                builder.inherit_stdout().inherit_stderr();
            }
            Output::Capture(most) => {
                let (out, err) = (MemoryOutputPipe::new(*most), MemoryOutputPipe::new(*most));
                builder.stdout(out.clone()).stderr(err.clone());
                (self.stdout, self.stderr) = (Some(out), Some(err));
            }
            Output::Handler(handler) => {
                let stream = |stream| HandlerStream { stream, handler: handler.clone() };
                builder
                    .stdout(stream(StandardStream::Output))
                    .stderr(stream(StandardStream::Error));
            }
        }
        builder
    }

    /// The preview 1 context, built on first use.
    pub(crate) fn p1(&mut self) -> &mut WasiP1Ctx {
        if !matches!(self.context, Context::P1(_)) {
            self.context = Context::P1(Box::new(self.builder().build_p1()));
        }
        match &mut self.context {
            Context::P1(context) => context,
            _ => unreachable!("just built"),
        }
    }
}

impl WasiView for Host {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        if !matches!(self.context, Context::P2(_)) {
            self.context = Context::P2(Box::new(self.builder().build()));
        }
        let lost = self.has_lost();
        let table = usable(lost, &mut self.void, &mut self.table);
        match &mut self.context {
            Context::P2(ctx) => WasiCtxView { ctx, table },
            _ => unreachable!("just built"),
        }
    }
}
