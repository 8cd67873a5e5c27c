//! wasmtime's own ways to give each call a pristine instance: `InstancePre` and a new `Store` each
//! time.

use std::time::{Duration, Instant};

use wasmtime::{
    Config, Enabled, Engine, Extern, InstanceAllocationStrategy, InstancePre, Linker, ModuleExport,
    PoolingAllocationConfig, Store,
};
use wasmtime_wasi::WasiCtxBuilder;
use wasmtime_wasi::p1::WasiP1Ctx;

use crate::code_cache;

/// WASI, built when a call first uses it, as afresh does.
#[derive(Default)]
pub struct RivalHost(Option<WasiP1Ctx>);

impl RivalHost {
    pub(crate) fn p1(&mut self) -> &mut WasiP1Ctx {
        self.0.get_or_insert_with(|| WasiCtxBuilder::new().build_p1())
    }
}

/// A configuration of wasmtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rival {
    /// The on-demand allocator with copy-on-write images.
    OnDemand,
    /// The pooling allocator with copy-on-write images.
    Pooling,
    /// The same, giving memory back in batches of 64.
    PoolingBatch,
    /// The same, keeping all memory resident and finding the pages to clear by a page-table scan.
    PoolingScan,
}

impl Rival {
    /// All of them.
    pub const ALL: [Rival; 4] =
        [Rival::OnDemand, Rival::Pooling, Rival::PoolingBatch, Rival::PoolingScan];

    /// Its name in the rows.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Rival::OnDemand => "wasmtime/on-demand",
            Rival::Pooling => "wasmtime/pooling-cow",
            Rival::PoolingBatch => "wasmtime/pooling-batch",
            Rival::PoolingScan => "wasmtime/pooling-keep-scan",
        }
    }

    pub(crate) fn engine(self) -> wasmtime::Result<Engine> {
        Engine::new(&self.config())
    }

    pub(crate) fn config(self) -> Config {
        let mut config = Config::new();
        config.wasm_multi_memory(true).memory_init_cow(true);
        if self != Rival::OnDemand {
            let mut pool = PoolingAllocationConfig::default();
            pool.total_memories(64)
                .total_core_instances(64)
                .total_tables(64)
                .table_elements(1 << 20)
                .max_core_instance_size(16 << 20)
                .max_memory_size(4 << 30)
                .max_unused_warm_slots(64);
            if self == Rival::PoolingBatch {
                pool.decommit_batch_size(64);
            }
            if self == Rival::PoolingScan {
                pool.linear_memory_keep_resident(256 << 20)
                    .table_keep_resident(1 << 20)
                    .pagemap_scan(Enabled::Auto);
            }
            config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
        }
        config
    }
}

/// A module ready to be called pristine by a rival.
pub struct RivalGuest {
    engine: Engine,
    pre: InstancePre<RivalHost>,
    export: ModuleExport,
    memory: Option<ModuleExport>,
    buffer: Option<ModuleExport>,
}

impl RivalGuest {
    /// Compiles `wasm` for calls of `function`.
    ///
    /// # Errors
    /// Any error of wasmtime.
    pub fn new(rival: Rival, wasm: &[u8], function: &str) -> anyhow::Result<Self> {
        let inner = || -> wasmtime::Result<Self> {
            let engine = rival.engine()?;
            let module = code_cache::module(&engine, wasm)?;
            let mut linker: Linker<RivalHost> = Linker::new(&engine);
            wasmtime_wasi::p1::add_to_linker_sync(&mut linker, RivalHost::p1)?;
            let pre = linker.instantiate_pre(&module)?;
            let export = module
                .get_export_index(function)
                .ok_or_else(|| wasmtime::Error::msg(format!("no export {function}")))?;
            let memory = module.get_export_index("memory");
            let buffer = module.get_export_index("afresh_buffer");
            Ok(Self { engine, pre, export, memory, buffer })
        };
        inner().map_err(|e| anyhow::anyhow!("{}: {e:#}", rival.name()))
    }

    /// One call of a function without arguments or results.
    ///
    /// # Errors
    /// A trap.
    pub fn call(&self) -> anyhow::Result<()> {
        let inner = || -> wasmtime::Result<()> {
            let mut store = Store::new(&self.engine, RivalHost::default());
            let instance = self.pre.instantiate(&mut store)?;
            let Some(Extern::Func(func)) = instance.get_module_export(&mut store, &self.export)
            else {
                return Err(wasmtime::Error::msg("not a function"));
            };
            func.typed::<(), ()>(&store)?.call(&mut store, ())
        };
        inner().map_err(|e| anyhow::anyhow!("{e:#}"))
    }

    /// One call, timed with the making and dropping of its instance (`whole`) or without.
    ///
    /// # Errors
    /// A trap.
    pub fn timed_call(&self, whole: bool) -> anyhow::Result<Duration> {
        let inner = || -> wasmtime::Result<Duration> {
            let made = Instant::now();
            let mut store = Store::new(&self.engine, RivalHost::default());
            let instance = self.pre.instantiate(&mut store)?;
            let Some(Extern::Func(func)) = instance.get_module_export(&mut store, &self.export)
            else {
                return Err(wasmtime::Error::msg("not a function"));
            };
            let func = func.typed::<(), ()>(&store)?;
            let called = Instant::now();
            func.call(&mut store, ())?;
            let call = called.elapsed();
            drop(store);
            Ok(if whole { made.elapsed() } else { call })
        };
        inner().map_err(|e| anyhow::anyhow!("{e:#}"))
    }

    /// One request through the byte interface; returns the answer.
    ///
    /// # Errors
    /// A trap, or a guest without the interface.
    pub fn request(&self, input: &[u8]) -> anyhow::Result<Vec<u8>> {
        let inner = || -> wasmtime::Result<Vec<u8>> {
            let missing = || wasmtime::Error::msg("the guest lacks the byte interface");
            let mut store = Store::new(&self.engine, RivalHost::default());
            let instance = self.pre.instantiate(&mut store)?;
            let mut export = |index: Option<ModuleExport>| {
                index.and_then(|i| instance.get_module_export(&mut store, &i))
            };
            let (Some(Extern::Func(buffer)), Some(Extern::Memory(memory)), Some(Extern::Func(f))) =
                (export(self.buffer), export(self.memory), export(Some(self.export)))
            else {
                return Err(missing());
            };
            let len = input.len() as i32;
            let at = buffer.typed::<i32, i32>(&store)?.call(&mut store, len)?;
            memory.write(&mut store, at as u32 as usize, input)?;
            let packed = f.typed::<i32, i64>(&store)?.call(&mut store, len)? as u64;
            let (at, len) = ((packed >> 32) as usize, (packed & 0xffff_ffff) as usize);
            let mut answer = vec![0; len];
            memory.read(&store, at, &mut answer)?;
            Ok(answer)
        };
        inner().map_err(|e| anyhow::anyhow!("{e:#}"))
    }
}
