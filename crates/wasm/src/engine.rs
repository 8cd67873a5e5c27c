//! The wasmtime engine that all guests share, set up so that their memories are slots.

pub(crate) mod address_space;
pub(crate) mod cache;
pub(crate) mod call_path;
pub(crate) mod exclusive;
pub(crate) mod guest_code;
pub(crate) mod linear;
pub(crate) mod loaded;
mod provided_imports;
pub(crate) mod stacks;

use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use afresh_frames::{ProcessZeroPool, ThrottledSource};
use afresh_memory::ZeroPageSource;
use afresh_rewrite::linear_stack;
use afresh_sys::{InheritedCell, PORTABLE, PerProcess, fork, host};

use crate::LoadError;
use crate::engine::address_space::Space;
use crate::engine::cache::Cache;
use crate::engine::linear::{SlotMemories, record_memories};
use crate::engine::loaded::LoadedModules;
use crate::engine::provided_imports::ProvidedImports;
use crate::engine::stacks::Stacks;

/// Source of pages for memories that grow by multiples of 2 MiB. Prepared pages take no faults.
#[derive(Clone, Debug, Default)]
pub enum ZeroMemory {
    /// From the kernel, by a fault for each page.
    Kernel,
    /// From the zero pool of the process: a background thread keeps up to 32 MiB ready. Both exist
    /// once a memory has grown so far. See [`afresh_frames::ProcessZeroPool`].
    #[default]
    Process,
    /// From a zero source of the embedder, for example an `Arc<afresh_frames::ZeroPool>` of another
    /// size.
    Source(Arc<dyn ZeroPageSource>),
}

impl ZeroMemory {
    /// The zero source for the memories of one guest.
    pub(crate) fn source(&self) -> Option<Arc<dyn ZeroPageSource>> {
        let source: Arc<dyn ZeroPageSource> = match self {
            ZeroMemory::Kernel => return None,
            ZeroMemory::Process => Arc::new(ProcessZeroPool),
            ZeroMemory::Source(source) => source.clone(),
        };
        Some(Arc::new(ThrottledSource::new(source)))
    }
}

/// Advances the epoch, which timeouts are counted in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EpochSource {
    /// A thread of the engine, every 5 ms, once a guest has a timeout.
    #[default]
    Engine,
    /// The embedder, by calling `wasmtime::Engine::increment_epoch` at this interval. Timeouts are
    /// as late as these calls.
    Embedder(Duration),
}

/// Configuration of an engine. Options that are off cost nothing in compiled code.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Allows timeouts: compiled code checks an epoch counter in loops and at function entry.
    pub timeouts: bool,
    /// Allows fuel: compiled code counts instructions, at a noticeable price.
    pub fuel: bool,
    /// Address space kept for a memory whose addresses are 64 bits and whose maximum is not
    /// declared.
    pub memory64_capacity: usize,
    /// Directory that keeps compiled guests between runs; `None` compiles each time.
    pub cache: Option<std::path::PathBuf>,
    /// Directory of compiled guests: the cache of an engine that is [`portable`](Self::portable)
    /// and otherwise has this configuration. It is only read, if the cache lacks a guest. Its
    /// native code is trusted like the program, so it must be part of the installation. Only
    /// engines of [`Engine::new`] and [`Engine::shared`] use it.
    pub precompiled: Option<std::path::PathBuf>,
    /// Compiles for every x86-64 processor since 2013 (x86-64-v3) or every arm64 processor, instead
    /// of for this one. The cache can then be the `precompiled` directory of other hosts.
    pub portable: bool,
    /// Source of pages for growing memories.
    pub zero_memory: ZeroMemory,
    /// Advances the epoch.
    pub epochs: EpochSource,
    /// Maximum bytes of native stack of a guest. Above the default, 512 KiB, each call runs on a
    /// separate stack, because threads may have no more. That takes a fraction of a microsecond.
    pub stack: usize,
    /// Accepts components of WASI 0.3, as [asynchronous](crate::GuestOptions::asynchronous) guests.
    /// It needs the feature `p3` of this crate, and adds wasmtime's bookkeeping of tasks to every
    /// component of the engine.
    #[cfg(feature = "p3")]
    pub p3: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            timeouts: true,
            fuel: false,
            memory64_capacity: 64 << 30,
            cache: None,
            precompiled: None,
            portable: false,
            zero_memory: ZeroMemory::default(),
            epochs: EpochSource::default(),
            stack: STACK,
            #[cfg(feature = "p3")]
            p3: false,
        }
    }
}

/// Available bytes of memory below which the host is short of it.
const MIN_HEADROOM: u64 = 1 << 30;

/// Granularity of timeouts, where the engine's own thread advances the epoch.
const TICK: Duration = Duration::from_millis(5);

/// Default bytes of native stack of a guest, which every thread has.
const STACK: usize = 512 << 10;

/// Maximum bytes of native stack that the file or snapshot of a guest may request.
pub(crate) const MOST_STACK: u64 = 64 << 20;

/// Bytes of stack for host functions, in addition to those of the guest, on the stack of a call.
const HOST_STACK: usize = 1536 << 10;

impl EngineConfig {
    /// Adds the settings that this engine needs to a configuration of wasmtime, so that an engine
    /// made with it can be given to [`Engine::over`]. Other settings stay as they are.
    pub fn apply(&self, wasm: &mut wasmtime::Config) {
        let space = Space::of_process();
        wasm.memory_reservation(space.reservation)
            .memory_guard_size(space.guard)
            .memory_reservation_for_growth(0)
            .memory_may_move(false)
            .gc_heap_reservation(space.reservation)
            .gc_heap_guard_size(space.heap_guard())
            .gc_heap_reservation_for_growth(0)
            .gc_heap_may_move(false)
            // Initial content comes from the slots' images; wasmtime's own copy-on-write does not
            // know of them.
            .memory_init_cow(false)
            .epoch_interruption(self.timeouts)
            .consume_fuel(self.fuel)
            .with_host_memory(Arc::new(SlotMemories));
        if PORTABLE {
            // The guards of slots are accessible there, and stacks have none: code compares each
            // address with the size, and wasmtime brings its own stacks.
            wasm.signals_based_traps(false);
        } else {
            wasm.with_host_stack(Arc::new(Stacks));
        }
        if self.stack != STACK {
            wasm.async_stack_size(self.stack.saturating_add(HOST_STACK)).max_wasm_stack(self.stack);
        }
        #[cfg(feature = "p3")]
        match self.p3 {
            true => wasm.wasm_component_model_async(true),
            false => wasm.concurrency_support(false),
        };
        // Compilation is spread over threads that the first engine started, and that no child has.
        static FIRST: InheritedCell<u32> = InheritedCell::new();
        let generation = fork::generation();
        if *FIRST.get_or_make(|| generation) != generation {
            wasm.parallel_compilation(false);
        }
    }

    /// Raises the stack to the size for which `guest`, a module or component, was built: that of
    /// its stack in memory, up to 64 MiB. It has no effect if that size is unknown or smaller.
    #[must_use]
    pub fn stack_for(mut self, guest: &[u8]) -> Self {
        const DEFAULT_STACK: u64 = 1 << 20;
        if let Some(asked) = linear_stack(guest).filter(|asked| *asked > DEFAULT_STACK) {
            self.stack = self.stack.max(asked.min(MOST_STACK) as usize);
        }
        self
    }

    /// Whether engines of both are the same, however they are used.
    fn is_same(&self, other: &Self) -> bool {
        let Self { timeouts, fuel, memory64_capacity, zero_memory, epochs, stack, .. } = self;
        let zero = match (zero_memory, &other.zero_memory) {
            (ZeroMemory::Kernel, ZeroMemory::Kernel)
            | (ZeroMemory::Process, ZeroMemory::Process) => true,
            (ZeroMemory::Source(one), ZeroMemory::Source(two)) => Arc::ptr_eq(one, two),
            _ => false,
        };
        let plain = (*timeouts, *fuel, *memory64_capacity, *epochs, *stack);
        let others =
            (other.timeouts, other.fuel, other.memory64_capacity, other.epochs, other.stack);
        let code = (&self.cache, &self.precompiled, self.portable, self.has_p3());
        let other_code = (&other.cache, &other.precompiled, other.portable, other.has_p3());
        zero && plain == others && code == other_code
    }

    fn check_cache(&self) -> Result<(), LoadError> {
        self.cache.as_deref().map_or(Ok(()), cache::check_directory)
    }

    /// Whether the engine accepts components of WASI 0.3.
    pub(crate) fn has_p3(&self) -> bool {
        #[cfg(feature = "p3")]
        return self.p3;
        #[cfg(not(feature = "p3"))]
        false
    }

    /// Settings that an engine of the embedder lacks.
    fn missing(&self, wasm: &wasmtime::Engine) -> Vec<String> {
        let space = Space::of_process();
        let settings = [
            ("memory_reservation", wasm.get_memory_reservation() == space.reservation),
            ("memory_guard_size", wasm.get_memory_guard_size() == space.guard),
            ("memory_reservation_for_growth", wasm.get_memory_reservation_for_growth() == 0),
            ("memory_may_move", !wasm.get_memory_may_move()),
            ("gc_heap_reservation", wasm.get_gc_heap_reservation() == space.reservation),
            ("gc_heap_guard_size", wasm.get_gc_heap_guard_size() == space.heap_guard()),
            ("gc_heap_reservation_for_growth", wasm.get_gc_heap_reservation_for_growth() == 0),
            ("gc_heap_may_move", !wasm.get_gc_heap_may_move()),
            ("memory_init_cow", !wasm.get_memory_init_cow()),
            ("epoch_interruption", wasm.get_epoch_interruption() == self.timeouts),
            ("consume_fuel", wasm.get_consume_fuel() == self.fuel),
            ("max_wasm_stack", wasm.get_max_wasm_stack() == self.stack),
            ("signals_based_traps", !(PORTABLE && wasm.get_signals_based_traps())),
        ];
        let lacking = settings.into_iter().filter(|(_, there)| !there);
        let mut missing: Vec<String> = lacking.map(|(name, _)| name.to_owned()).collect();
        if wasm.get_pooling_config().is_some() {
            missing.push(
                "allocation_strategy (on demand: the pool would bring its own memory)".to_owned(),
            );
        }
        if missing.is_empty() && !takes_slots(wasm) {
            missing.push("with_host_memory".to_owned());
        }
        missing
    }
}

/// Sets a processor that most hosts exceed. The target is named in full, because it is part of the
/// keys in a cache, and code for glibc and for musl is the same.
fn compile_for_all(wasm: &mut wasmtime::Config) -> wasmtime::Result<()> {
    let system = match std::env::consts::OS {
        "macos" => "apple-darwin",
        "windows" => "pc-windows-gnu",
        _ => "unknown-linux-gnu",
    };
    wasm.target(&format!("{}-{system}", std::env::consts::ARCH))?;
    if cfg!(target_arch = "x86_64") {
        // SAFETY: the flag names instructions that code may use. wasmtime compares them with this
        // processor before it runs the code.
        unsafe { wasm.cranelift_flag_enable("haswell") };
    }
    Ok(())
}

/// Whether memories of this engine's guests are slots.
fn takes_slots(wasm: &wasmtime::Engine) -> bool {
    // A module with one memory.
    const MODULE: [u8; 13] = [0, b'a', b's', b'm', 1, 0, 0, 0, 5, 3, 1, 0, 1];
    let made = wasmtime::Module::new(wasm, MODULE).and_then(|module| {
        let mut store = wasmtime::Store::new(wasm, ());
        record_memories(|| wasmtime::Instance::new(&mut store, &module, &[]))
    });
    made.is_ok_and(|(_, made)| made.len() == 1)
}

pub(crate) struct Inner {
    pub(crate) wasmtime: wasmtime::Engine,
    pub(crate) config: EngineConfig,
    /// Whether its cache belongs to the installed program.
    has_installed_cache: bool,
    /// The process whose thread advances the epoch, by its generation; 0 for none.
    ticking: AtomicU32,
    /// Times that the epoch was advanced here.
    ticks: Arc<AtomicU64>,
    /// Of the process it was made in.
    generation: u32,
    /// Code and memories that its guests share.
    pub(crate) loaded: LoadedModules,
    /// The imports that afresh provides for modules.
    provided: ProvidedImports,
}

/// A compiled module.
pub(crate) struct CompiledModule {
    pub(crate) module: Arc<wasmtime::Module>,
    /// Key in the cache, where there is a cache.
    pub(crate) key: Option<blake3::Hash>,
}

/// Engines that guests of this process share, as long as one uses them.
static SHARED: PerProcess<Mutex<Vec<Weak<Inner>>>> = PerProcess::new(Mutex::default);

/// Compiles and runs guests; cheap to clone.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("config", &self.inner.config).finish()
    }
}

/// Bytes of address space that each Wasm memory reserves: 4 GiB, or less if the address space of
/// the process is limited (`ulimit -v`). It is determined once for a process.
#[must_use]
pub fn memory_reservation() -> u64 {
    Space::of_process().reservation
}

impl Engine {
    /// Makes an engine.
    ///
    /// # Errors
    /// [`LoadError::Engine`] when wasmtime does not support this machine or configuration, and
    /// [`LoadError::SharedCache`] when other users can write to the cache.
    pub fn new(config: EngineConfig) -> Result<Self, LoadError> {
        config.check_cache()?;
        Self::with_cache(config, false)
    }

    /// As [`Engine::new`], with a cache that is not checked.
    fn with_cache(config: EngineConfig, has_installed_cache: bool) -> Result<Self, LoadError> {
        let mut wasm = wasmtime::Config::new();
        wasm.wasm_multi_memory(true)
            .wasm_memory64(true)
            .wasm_tail_call(true)
            .wasm_function_references(true)
            .wasm_gc(true)
            .wasm_exceptions(true)
            .wasm_extended_const(true);
        config.apply(&mut wasm);
        if config.portable {
            compile_for_all(&mut wasm).map_err(LoadError::Engine)?;
        }
        let wasmtime = wasmtime::Engine::new(&wasm).map_err(LoadError::Engine)?;
        Ok(Self::with(wasmtime, config, has_installed_cache))
    }

    /// The engine of this configuration that the process shares, which is made at first use. Its
    /// guests share compiled code and one thread for timeouts.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn shared(config: EngineConfig) -> Result<Self, LoadError> {
        let Ok(mut engines) = SHARED.get().lock() else { return Self::new(config) };
        engines.retain(|engine| engine.strong_count() > 0);
        let same = |inner: &Arc<Inner>| inner.config.is_same(&config);
        if let Some(inner) = engines.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(Self { inner });
        }
        let engine = Self::new(config)?;
        engines.push(Arc::downgrade(&engine.inner));
        Ok(engine)
    }

    /// Makes an engine over the embedder's `wasmtime::Engine`, whose configuration was passed to
    /// [`EngineConfig::apply`]. The embedder may run other guests with it.
    ///
    /// # Errors
    /// [`LoadError::Settings`] names what the engine lacks, and [`LoadError::SharedCache`] is that
    /// of [`Engine::new`].
    pub fn over(wasmtime: wasmtime::Engine, config: EngineConfig) -> Result<Self, LoadError> {
        config.check_cache()?;
        let missing = config.missing(&wasmtime);
        if missing.is_empty() {
            Ok(Self::with(wasmtime, config, false))
        } else {
            Err(LoadError::Settings { missing })
        }
    }

    fn with(wasmtime: wasmtime::Engine, config: EngineConfig, has_installed_cache: bool) -> Self {
        let (ticking, generation) = (AtomicU32::new(0), fork::generation());
        let ticks = Arc::default();
        let inner = Inner {
            wasmtime,
            config,
            has_installed_cache,
            ticking,
            ticks,
            generation,
            loaded: LoadedModules::default(),
            provided: ProvidedImports::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Whether guests may use more stack than every thread has.
    pub(crate) fn deep(&self) -> bool {
        self.inner.config.stack > STACK
    }

    /// The clock of timeouts.
    pub(crate) fn tick(&self) -> Duration {
        match self.inner.config.epochs {
            EpochSource::Engine => TICK,
            EpochSource::Embedder(tick) => tick.max(Duration::from_nanos(1)),
        }
    }

    /// Counts how often the engine has advanced its epoch; stays 0 where the embedder does.
    pub(crate) fn ticks(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.inner.ticks)
    }

    /// The wasmtime engine underneath.
    #[must_use]
    pub fn wasmtime(&self) -> &wasmtime::Engine {
        &self.inner.wasmtime
    }

    /// Runs the compiler. It leaves tens of MiB in the allocator's lists, which where memory is
    /// short the guest's own warm-up would lack.
    pub(crate) fn compile_anew<T>(
        &self,
        compile: impl FnOnce(&wasmtime::Engine) -> wasmtime::Result<T>,
    ) -> Result<T, LoadError> {
        self.check_process()?;
        let compiled = compile(self.wasmtime()).map_err(LoadError::compile)?;
        if host::memory_headroom().is_some_and(|free| free < MIN_HEADROOM) {
            host::trim_heap();
        }
        Ok(compiled)
    }

    /// Compiles a core module, or takes it from the cache.
    pub(crate) fn compile(&self, wasm: &[u8]) -> Result<CompiledModule, LoadError> {
        let compile = || self.compile_anew(|engine| wasmtime::Module::new(engine, wasm));
        if self.cache().is_none() {
            return Ok(CompiledModule { module: Arc::new(compile()?), key: None });
        }
        let key = self.cache_key(&[wasm]);
        if let Some(module) = self.kept_module(&key) {
            return Ok(CompiledModule { module, key: Some(key) });
        }
        let module = Arc::new(compile()?);
        self.keep_module(&key, &module);
        Ok(CompiledModule { module, key: Some(key) })
    }

    /// Keeps a compiled module under this key, for other processes and for other guests of this
    /// engine.
    pub(crate) fn keep_module(&self, key: &blake3::Hash, module: &Arc<wasmtime::Module>) {
        if let Some(cache) = self.cache() {
            cache.keep_module(key, module);
            self.inner.loaded.enter(key, module);
        }
    }

    /// The module under this key, from a guest that uses it or from the cache.
    pub(crate) fn kept_module(&self, key: &blake3::Hash) -> Option<Arc<wasmtime::Module>> {
        self.module_in(&self.cache()?, key)
    }

    /// As [`Engine::kept_module`], from another cache. wasmtime refuses code that this processor
    /// cannot run.
    pub(crate) fn module_in(
        &self,
        cache: &Cache<'_>,
        key: &blake3::Hash,
    ) -> Option<Arc<wasmtime::Module>> {
        if let Some(module) = self.inner.loaded.find(key) {
            return Some(module);
        }
        let module = Arc::new(cache.module(self.wasmtime(), key)?);
        self.inner.loaded.enter(key, &module);
        Some(module)
    }

    /// Fails in a forked child of the process that made the engine: the child lacks the threads
    /// that compile, and would wait for them without end.
    pub(crate) fn check_process(&self) -> Result<(), LoadError> {
        if self.inner.generation == fork::generation() {
            return Ok(());
        }
        Err(LoadError::Forked)
    }

    /// The engine whose cache holds the guests that were compiled in advance, if configured. It is
    /// made for each search, which takes less than a millisecond and happens before a guest would
    /// be compiled.
    pub(crate) fn of_precompiled(&self) -> Option<Engine> {
        let config = &self.inner.config;
        let cache = Some(config.precompiled.clone()?);
        let of = EngineConfig { cache, precompiled: None, portable: true, ..config.clone() };
        Engine::with_cache(of, true).ok()
    }

    /// The cache of compiled guests, if configured.
    pub(crate) fn cache(&self) -> Option<Cache<'_>> {
        self.inner.config.cache.as_deref().map(|directory| match self.inner.has_installed_cache {
            true => Cache::installed(directory),
            false => Cache::new(directory),
        })
    }

    /// The name in the cache of an object made from `parts` by an engine like this one.
    pub(crate) fn cache_key(&self, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(part).update(&(part.len() as u64).to_le_bytes());
        }
        let config = &self.inner.config;
        hasher.update(&[u8::from(config.timeouts), u8::from(config.fuel)]);
        // Other settings of an embedder that change compiled code.
        let mut settings = std::hash::DefaultHasher::new();
        self.wasmtime().precompile_compatibility_hash().hash(&mut settings);
        hasher.update(&settings.finish().to_le_bytes());
        hasher.update(&Space::of_process().reservation.to_le_bytes()).finalize()
    }

    /// Makes sure that limits are kept.
    ///
    /// # Errors
    /// [`LoadError::Limit`] for a limit that code compiled by this engine would not notice, and as
    /// [`Engine::keep_ticking`].
    pub(crate) fn keep_limits(
        &self,
        timeout: Option<Duration>,
        fuel: Option<u64>,
        watched: bool,
    ) -> Result<(), LoadError> {
        let config = &self.inner.config;
        if fuel.is_some() && !config.fuel {
            return Err(LoadError::Limit { limit: "fuel", setting: "EngineConfig::fuel" });
        }
        if timeout.is_some() || watched {
            if !config.timeouts {
                return Err(LoadError::Limit {
                    limit: if watched { "watch" } else { "timeout" },
                    setting: "EngineConfig::timeouts",
                });
            }
            self.keep_ticking()?;
        }
        Ok(())
    }

    /// Ensures that a thread of this process advances the epoch, which timeouts are counted in: a
    /// forked child lacks the thread of its parent. The thread ends with the engine.
    ///
    /// # Errors
    /// [`LoadError::Engine`] when the thread cannot be started: timeouts would never come.
    pub(crate) fn keep_ticking(&self) -> Result<(), LoadError> {
        if self.inner.config.epochs != EpochSource::Engine {
            return Ok(());
        }
        let generation = fork::generation();
        if self.inner.ticking.load(Ordering::Acquire) == generation
            || self.inner.ticking.swap(generation, Ordering::AcqRel) == generation
        {
            return Ok(());
        }
        let weak = Arc::downgrade(&self.inner);
        let thread = std::thread::Builder::new().name("afresh-epoch".to_owned()).spawn(move || {
            while let Some(inner) = weak.upgrade() {
                inner.wasmtime.increment_epoch();
                inner.ticks.fetch_add(1, Ordering::Relaxed);
                drop(inner);
                std::thread::sleep(TICK);
            }
        });
        thread.map(drop).map_err(|error| {
            self.inner.ticking.store(0, Ordering::Release);
            LoadError::Engine(error.into())
        })
    }
}
