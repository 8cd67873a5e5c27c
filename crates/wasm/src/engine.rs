//! The wasmtime engine that all guests share, set up so that their memories are slots.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afresh_frames::{Frugal, ProcessStage};
use afresh_memory::ZeroStock;

use crate::LoadError;
use crate::cache::Cache;
use crate::linear::SlotMemories;

/// Where memories that grow by whole 2 MiB get them from: what is ready there is touched without faults.
#[derive(Clone, Debug, Default)]
pub enum ZeroMemory {
    /// From the kernel, by a fault for each page.
    Kernel,
    /// From the stage that the process shares: up to 32 MiB kept ready by a background thread, both of
    /// which exist once a memory has grown so far. See [`afresh_frames::ProcessStage`].
    #[default]
    Process,
    /// From a stock of the embedder's: an `Arc<afresh_frames::Stage>` of another size, say.
    Stock(Arc<dyn ZeroStock>),
}

impl ZeroMemory {
    /// The stock for the memories of one guest.
    pub(crate) fn stock(&self) -> Option<Arc<dyn ZeroStock>> {
        let stock: Arc<dyn ZeroStock> = match self {
            ZeroMemory::Kernel => return None,
            ZeroMemory::Process => Arc::new(ProcessStage),
            ZeroMemory::Stock(stock) => stock.clone(),
        };
        Some(Arc::new(Frugal::new(stock)))
    }
}

/// How the engine is set up. What is off costs nothing in compiled code.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Allows timeouts: compiled code looks at an epoch counter in loops and at function entry.
    pub timeouts: bool,
    /// Allows fuel: compiled code counts instructions, at a noticeable price.
    pub fuel: bool,
    /// Address space kept for a memory whose addresses are 64 bits and whose maximum is not declared.
    pub memory64_capacity: usize,
    /// Directory in which compiled guests are kept between runs; `None` compiles each time.
    pub cache: Option<std::path::PathBuf>,
    /// Where memory for growth comes from.
    pub zero_memory: ZeroMemory,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            timeouts: true,
            fuel: false,
            memory64_capacity: 64 << 30,
            cache: None,
            zero_memory: ZeroMemory::default(),
        }
    }
}

/// Granularity of timeouts.
pub(crate) const TICK: Duration = Duration::from_millis(5);

pub(crate) struct Inner {
    pub(crate) wasmtime: wasmtime::Engine,
    pub(crate) config: EngineConfig,
    ticking: AtomicBool,
}

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

/// Address space wasmtime may assume behind a 32-bit memory's base, so that it needs no bounds checks.
pub(crate) const RESERVATION: u64 = 4 << 30;
/// Inaccessible bytes after that.
pub(crate) const GUARD: u64 = 32 << 20;

impl Engine {
    /// Sets the engine up.
    ///
    /// # Errors
    /// [`LoadError::Engine`] when wasmtime does not support this machine or configuration.
    pub fn new(config: EngineConfig) -> Result<Self, LoadError> {
        let mut wasm = wasmtime::Config::new();
        wasm.wasm_multi_memory(true)
            .wasm_memory64(true)
            .wasm_tail_call(true)
            .wasm_function_references(true)
            .wasm_gc(true)
            .wasm_exceptions(true)
            .wasm_extended_const(true)
            .memory_reservation(RESERVATION)
            .memory_guard_size(GUARD)
            .memory_reservation_for_growth(0)
            .memory_may_move(false)
            // Initial content comes from the slots' images; wasmtime's own copy-on-write does not know
            // of them.
            .memory_init_cow(false)
            .epoch_interruption(config.timeouts)
            .consume_fuel(config.fuel)
            .with_host_memory(Arc::new(SlotMemories));
        let wasmtime = wasmtime::Engine::new(&wasm).map_err(LoadError::Engine)?;
        let inner = Inner { wasmtime, config, ticking: AtomicBool::new(false) };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The wasmtime engine underneath.
    #[must_use]
    pub fn wasmtime(&self) -> &wasmtime::Engine {
        &self.inner.wasmtime
    }

    /// Compiles a core module, or takes it from the cache.
    pub(crate) fn compile(&self, wasm: &[u8]) -> Result<wasmtime::Module, LoadError> {
        let compile = || wasmtime::Module::new(self.wasmtime(), wasm).map_err(LoadError::Compile);
        let Some(cache) = self.cache() else { return compile() };
        let key = self.cache_key(&[wasm]);
        if let Some(module) = cache.module(self.wasmtime(), &key) {
            return Ok(module);
        }
        let module = compile()?;
        cache.keep_module(&key, &module);
        Ok(module)
    }

    /// The cache of compiled guests, if there is one.
    pub(crate) fn cache(&self) -> Option<Cache<'_>> {
        self.inner.config.cache.as_deref().map(Cache::new)
    }

    /// The name in the cache of what is made from `parts` by an engine like this one.
    pub(crate) fn cache_key(&self, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(part).update(&(part.len() as u64).to_le_bytes());
        }
        let config = &self.inner.config;
        hasher.update(&[u8::from(config.timeouts), u8::from(config.fuel)]).finalize()
    }

    /// Starts the thread that advances the epoch, which timeouts are counted in. It ends with the engine.
    ///
    /// # Errors
    /// [`LoadError::Engine`] when the thread cannot be started: timeouts would never come.
    pub(crate) fn start_ticker(&self) -> Result<(), LoadError> {
        if self.inner.ticking.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let weak = Arc::downgrade(&self.inner);
        let thread = std::thread::Builder::new().name("afresh-epoch".to_owned()).spawn(move || {
            while let Some(inner) = weak.upgrade() {
                inner.wasmtime.increment_epoch();
                drop(inner);
                std::thread::sleep(TICK);
            }
        });
        thread.map(drop).map_err(|error| {
            self.inner.ticking.store(false, Ordering::Release);
            LoadError::Engine(error.into())
        })
    }
}
