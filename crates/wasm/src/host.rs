//! Host state: what a call owns besides the guest's own memory. Made new for every call.
//!
//! The WASI context is built when a call first uses WASI, so that calls which do not use it pay nothing,
//! and is dropped when the call's lease is. The table of a component's resources is apart from it: streams, and what
//! embedders make of them, need nothing else.

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
use crate::call_path::CallPath;
use crate::clock::Clock;
use crate::files::{Files, Live};
use crate::leasing::LeaseOptions;
use crate::watch::Watch;

pub use limiter::Limiter;
pub(crate) use limiter::table_bytes;
use output::HandlerStream;
pub use output::{Output, OutputHandler, StandardStream};

/// What WASI gives to every call. Nothing but arguments and environment by default: no files, no
/// network.
#[derive(Clone, Debug, Default)]
pub struct Wasi {
    /// Command-line arguments, the program's name first.
    pub args: Vec<String>,
    /// Environment variables.
    pub env: Vec<(String, String)>,
    /// A file tree in memory, which the guest finds as `/`. It is part of the guest's state: every call starts from
    /// what the warm-up left of it, sessions roll it back, and snapshots hold it. A guest with a tree has no
    /// `dirs`; a host directory can be a layer of the tree.
    pub files: Option<Tree>,
    /// Host directories and the paths at which the guest sees them, read-only when `false`. The guest reaches nothing
    /// above them. One that cannot be opened is an error: of the warm-up, or of the call that is the first to miss it.
    /// Writes of calls stay there: no reset, no rollback and no snapshot undoes them.
    pub dirs: Vec<(std::path::PathBuf, String, bool)>,
    /// Standard output and error.
    pub output: Output,
    /// Standard input; the same bytes for every call.
    pub stdin: Vec<u8>,
    /// Gives the guest this process's own standard input, where `stdin` is empty. What one call reads no
    /// other can.
    pub inherit_stdin: bool,
}

impl Wasi {
    /// The standard streams and the directories, all of them; or which one cannot be opened.
    pub(crate) fn open_directories(&self) -> Result<Files, String> {
        if self.files.is_some() && !self.dirs.is_empty() {
            return Err("a guest with a file tree has no host directories beside it: make them layers of the tree, \
                        or leave the tree out"
                .to_owned());
        }
        Files::of_directories(&self.dirs)
    }

    /// Refuses directories for one lease with which a descriptor that the guest knows from its warm-up would
    /// name another thing: each that `guest` gives has to be there, at its place and under its name.
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

type Make = dyn Fn() -> Box<dyn Any + Send> + Send + Sync;

/// The embedder's own state, made new for each lease by a function of the embedder's, when it is first asked
/// for with [`Host::state`], and dropped with the lease. The default is none.
#[derive(Clone, Default)]
pub struct State(Option<Arc<Make>>);

impl State {
    /// State that `make` makes.
    pub fn new<T: Send + 'static>(make: impl Fn() -> T + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(move || Box::new(make()) as Box<dyn Any + Send>)))
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("State").field(&self.0.is_some()).finish()
    }
}

/// What a [`Host`] is made of.
pub(crate) struct HostParts {
    /// The files that calls start from, once the guest is warm; before, those of `wasi`.
    pub(crate) files: Arc<OnceLock<Files>>,
    pub(crate) wasi: Arc<Wasi>,
    pub(crate) clock: Clock,
    pub(crate) state: State,
    pub(crate) limiter: Limiter,
    pub(crate) watch: Watch,
    /// Ticks of the engine's epoch so far, where it advances that itself.
    pub(crate) ticks: Arc<AtomicU64>,
    pub(crate) memory_limit: usize,
    /// Most instances in the store, if not as many as wasmtime allows.
    pub(crate) instances: Option<usize>,
    /// How code in the store is entered.
    pub(crate) way: CallPath,
}

/// The state of one call that lives outside the guest; the `T` of its `Store<T>`.
pub struct Host {
    parts: HostParts,
    /// What it gives to the calls of this lease instead.
    own: Option<Arc<Wasi>>,
    /// The destination of this lease's output, if it is not that of WASI's options.
    output: Option<Output>,
    /// Why WASI could not give this call what it was to give.
    failure: Option<String>,
    context: Context,
    /// The resources of a component, once it has any.
    table: Option<ResourceTable>,
    /// The files that this store starts from, where it is a session's or a lease has its own.
    start: Option<Files>,
    /// Its files, once they were asked for.
    live: Option<Live>,
    stdout: Option<MemoryOutputPipe>,
    stderr: Option<MemoryOutputPipe>,
    generation: u64,
    /// Ticks that the call may still run, of one that gives way after each.
    turns: u64,
    data: Option<Box<dyn Any + Send>>,
    state: Option<Box<dyn Any + Send>>,
    /// Alive while the store has the epoch callback that it was made with.
    callback: Option<Weak<()>>,
    /// Whether what is entered in its store is the guest's own, and not the engine's.
    #[cfg(feature = "call-hook")]
    guests: bool,
    /// When the call that is under way has to be over, where a watch looks after that.
    until: Option<Instant>,
    /// The time limit of the call under way, and the tick of the engine at which it expires.
    time_limit: Option<(Duration, u64)>,
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
            start: None,
            live: None,
            stdout: None,
            stderr: None,
            generation: 0,
            turns: 0,
            data: None,
            state: None,
            callback: None,
            #[cfg(feature = "call-hook")]
            guests: false,
            until: None,
            time_limit: None,
        }
    }

    /// Forgets everything that belonged to the last call.
    #[inline]
    pub(crate) fn clear(&mut self) {
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
    }

    /// Whether nothing of a call is here.
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
    }

    pub(crate) fn set_turns(&mut self, turns: u64) {
        self.turns = turns;
    }

    /// Whether a call that has run for another tick may go on.
    pub(crate) fn take_turn(&mut self) -> bool {
        self.turns = self.turns.saturating_sub(1);
        self.turns > 0
    }

    /// Says whose the code is that runs next in its store, which is for call hooks to know.
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

    /// Whether the store's epoch callback is gone: a host function called `epoch_deadline_trap`, which drops it. Nothing
    /// but the whole [`wasmtime::Store`] can set another.
    pub(crate) fn lost_callback(&self) -> bool {
        self.callback.as_ref().is_some_and(|callback| callback.strong_count() == 0)
    }

    pub(crate) fn set_until(&mut self, until: Option<Instant>) {
        self.until = until;
    }

    pub(crate) fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Maximum bytes of each guest memory.
    pub(crate) fn memory_limit(&self) -> usize {
        self.parts.memory_limit
    }

    /// Sets the time limit of the next call, if it has one that expires after some ticks of the engine's epoch.
    #[inline]
    pub(crate) fn set_time_limit(&mut self, limit: Option<(Duration, u64)>) {
        self.time_limit = limit.map(|(limit, ticks)| {
            (limit, self.parts.ticks.load(Ordering::Relaxed).saturating_add(ticks))
        });
    }

    /// Whether the time limit of the call has expired. An epoch that the embedder advances is not counted here;
    /// then no wait takes longer than the limit.
    fn is_expired(&self, wait_started: Instant) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
            || self.time_limit.is_some_and(|(limit, last)| {
                self.parts.ticks.load(Ordering::Relaxed) >= last || wait_started.elapsed() >= limit
            })
    }

    /// Fails once the call has reached a limit, as compiled code does at its next loop. For host functions that
    /// have waited since `wait_started`.
    pub(crate) fn check_limits(&mut self, wait_started: Instant) -> wasmtime::Result<()> {
        if self.is_expired(wait_started) {
            return Err(wasmtime::Trap::Interrupt.into());
        }
        self.watch().check(self)
    }

    pub(crate) fn way(&self) -> CallPath {
        self.parts.way
    }

    pub(crate) fn watch(&self) -> Watch {
        self.parts.watch.clone()
    }

    pub(crate) fn set_generation(&mut self, generation: u64) {
        self.generation = generation;
    }

    /// Number of this clone: no two leases of a process have the same. Guests read it by importing
    /// `afresh.generation`.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The embedder's own state for this call, as set by [`Host::set_data`].
    pub fn data<T: 'static>(&mut self) -> Option<&mut T> {
        self.data.as_mut()?.downcast_mut()
    }

    /// Sets the embedder's own state; it is dropped with the lease.
    pub fn set_data(&mut self, data: impl Any + Send) {
        self.data = Some(Box::new(data));
    }

    /// The embedder's own state of this lease, made when it is first asked for.
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

    /// The embedder's own state as [`Host::state`] gives it, and the table that WASI keeps a component's resources
    /// in: for host functions whose resources are made of WASI's, or the other way round.
    ///
    /// # Panics
    /// As [`Host::state`].
    pub fn state_and_table<T: 'static>(&mut self) -> (&mut T, &mut ResourceTable) {
        // Both are made when they are first asked for.
        self.state::<T>();
        let state = self.state.as_mut().and_then(|state| state.downcast_mut());
        let Some(state) = state else { unreachable!("just made") };
        (state, self.table.get_or_insert_default())
    }

    /// The table of a component's resources.
    pub(crate) fn table(&mut self) -> &mut ResourceTable {
        self.table.get_or_insert_default()
    }

    /// What the call wrote to standard output so far, when captured.
    #[must_use]
    pub fn stdout(&self) -> Vec<u8> {
        self.stdout.as_ref().map(|p| p.contents().to_vec()).unwrap_or_default()
    }

    /// What the call wrote to standard error so far, when captured.
    #[must_use]
    pub fn stderr(&self) -> Vec<u8> {
        self.stderr.as_ref().map(|p| p.contents().to_vec()).unwrap_or_default()
    }

    /// What ends a call whose WASI is not what it should be, whatever the guest made of it.
    #[inline]
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// The guest's files: those of the warm state until the call changes them, or the host directories of its options.
    pub(crate) fn live(&mut self) -> Live {
        if let Some(live) = &self.live {
            return live.clone();
        }
        let live = match self.start() {
            Some(files) => Live::of_tree(files),
            None => {
                let wasi = self.own.as_ref().unwrap_or(&self.parts.wasi);
                let files = wasi.open_directories().unwrap_or_else(|error| {
                    // None at all: descriptors are numbered by order, and one that is missing would give its number
                    // to the next.
                    self.failure = Some(error);
                    Files::none()
                });
                Live::on_host(files)
            }
        };
        self.live.insert(live).clone()
    }

    /// Files of a guest without a tree, once the call has used them.
    pub(crate) fn live_on_host(&self) -> Option<&Live> {
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

    /// The file tree and what is open in it, as they are now; `None` in a guest without a tree.
    #[must_use]
    pub fn files(&self) -> Option<Files> {
        match &self.live {
            Some(live) if live.granted_descriptors().is_some() => None,
            Some(live) => Some(live.lock().clone()),
            None => self.start(),
        }
    }

    /// Puts files in place of those that are there.
    pub(crate) fn set_files(&mut self, files: Option<Files>) {
        (self.start, self.live) = (files, None);
    }

    /// Changes the file tree from outside, for what the guest does next.
    ///
    /// # Errors
    /// As `change` returns; [`None`] in a guest without a tree.
    pub fn change_files<T>(&mut self, change: impl FnOnce(&mut Tree) -> T) -> Option<T> {
        let live = self.live();
        match live.granted_descriptors() {
            Some(_) => None,
            None => Some(change(&mut live.lock().tree)),
        }
    }

    /// Gives the calls of one lease the context and the output of its options.
    pub(crate) fn set_options(&mut self, options: &LeaseOptions) {
        if let Some(wasi) = &options.wasi {
            self.own = Some(wasi.clone());
        }
        if let Some(output) = &options.output {
            self.output = Some(output.clone());
        }
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
        let table = self.table.get_or_insert_default();
        match &mut self.context {
            Context::P2(ctx) => WasiCtxView { ctx, table },
            _ => unreachable!("just built"),
        }
    }
}
