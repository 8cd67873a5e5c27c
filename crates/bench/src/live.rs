//! The floor: one live instance that is called and never reset, or reset only by copying memory
//! known to be dirty. No pristine call can be cheaper.

use wasmtime::{Engine, Instance, Linker, Memory, Store, TypedFunc};
use wasmtime_wasi::WasiCtxBuilder;
use wasmtime_wasi::p1::WasiP1Ctx;

use crate::code_cache;

/// A live instance.
pub struct LiveInstance {
    store: Store<WasiP1Ctx>,
    function: TypedFunc<(), ()>,
    memory: Memory,
    image: Vec<u8>,
}

impl LiveInstance {
    /// Instantiates `wasm` and keeps a copy of its memory.
    ///
    /// # Errors
    /// Any error of wasmtime.
    pub fn new(wasm: &[u8], function: &str) -> anyhow::Result<Self> {
        let inner = || -> wasmtime::Result<Self> {
            let engine = Engine::default();
            let mut linker: Linker<WasiP1Ctx> = Linker::new(&engine);
            wasmtime_wasi::p1::add_to_linker_sync(&mut linker, |wasi| wasi)?;
            let mut store = Store::new(&engine, WasiCtxBuilder::new().build_p1());
            let module = code_cache::module(&engine, wasm)?;
            let instance: Instance = linker.instantiate(&mut store, &module)?;
            let memory = instance
                .get_memory(&mut store, "memory")
                .ok_or_else(|| wasmtime::Error::msg("no memory"))?;
            let image = memory.data(&store).to_vec();
            let function = instance.get_typed_func(&mut store, function)?;
            Ok(Self { store, function, memory, image })
        };
        inner().map_err(|e| anyhow::anyhow!("{e:#}"))
    }

    /// One call, nothing undone.
    ///
    /// # Errors
    /// A trap.
    pub fn call(&mut self) -> anyhow::Result<()> {
        self.function.call(&mut self.store, ()).map_err(|e| anyhow::anyhow!("{e:#}"))
    }

    /// One call, then the given byte ranges are copied back: pure memory bandwidth.
    ///
    /// # Errors
    /// A trap.
    pub fn call_and_copy(&mut self, ranges: &[(usize, usize)]) -> anyhow::Result<()> {
        self.call()?;
        let live = self.memory.data_mut(&mut self.store);
        for (at, len) in ranges.iter().copied() {
            live[at..at + len].copy_from_slice(&self.image[at..at + len]);
        }
        Ok(())
    }

    /// One call, then the given byte ranges are cleared.
    ///
    /// # Errors
    /// A trap.
    pub fn call_and_clear(&mut self, ranges: &[(usize, usize)]) -> anyhow::Result<()> {
        self.call()?;
        let live = self.memory.data_mut(&mut self.store);
        for (at, len) in ranges.iter().copied() {
            live[at..at + len].fill(0);
        }
        Ok(())
    }
}
