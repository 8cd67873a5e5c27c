//! The rival of Wasm guests: instances in wasmtime's pooling allocator, each after a call.

use anyhow::Result;
use wasmtime::{
    Config, Engine, Instance, InstanceAllocationStrategy, Linker, PoolingAllocationConfig, Store,
};

use super::Growth;
use crate::Sink;
use crate::js::REQUEST;
use crate::rivals::RivalHost;

/// Maximum bytes of a memory.
const MEMORY: usize = 64 << 20;

/// Instances of the small module.
pub(super) fn small(
    wasm: &[u8],
    count: usize,
    names: (&str, &str),
    sink: &mut Sink<'_>,
) -> Result<()> {
    instances(wasm, count, names, sink, |store, instance| {
        instance.get_typed_func::<(), ()>(&mut *store, "scatter64")?.call(store, ())
    })
}

/// Instances of the JavaScript guest, whose module has its warm state.
pub(super) fn js(
    wasm: &[u8],
    count: usize,
    names: (&str, &str),
    sink: &mut Sink<'_>,
) -> Result<()> {
    instances(wasm, count, names, sink, |store, instance| {
        let missing = || wasmtime::Error::msg("the guest has no memory");
        let len = REQUEST.len() as i32;
        let buffer = instance.get_typed_func::<i32, i32>(&mut *store, "afresh_buffer")?;
        let at = buffer.call(&mut *store, len)? as u32 as usize;
        let memory = instance.get_memory(&mut *store, "memory").ok_or_else(missing)?;
        memory.write(&mut *store, at, REQUEST)?;
        instance.get_typed_func::<i32, i64>(&mut *store, "handle")?.call(store, len).map(drop)
    })
}

type Call = fn(&mut Store<RivalHost>, &Instance) -> wasmtime::Result<()>;

fn instances(
    wasm: &[u8],
    count: usize,
    names: (&str, &str),
    sink: &mut Sink<'_>,
    call: Call,
) -> Result<()> {
    let inner = || -> wasmtime::Result<(Growth, Vec<Store<RivalHost>>)> {
        let mut config = Config::new();
        let mut pool = PoolingAllocationConfig::default();
        let many = u32::try_from(count)?;
        pool.total_memories(many).total_core_instances(many).total_tables(many);
        pool.max_memory_size(MEMORY).table_elements(1 << 16).max_core_instance_size(1 << 20);
        config.memory_init_cow(true).memory_reservation(MEMORY as u64).memory_guard_size(64 << 10);
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
        let engine = Engine::new(&config)?;
        let module = crate::code_cache::module(&engine, wasm)?;
        let mut linker = Linker::new(&engine);
        wasmtime_wasi::p1::add_to_linker_sync(&mut linker, RivalHost::p1)?;
        let pre = linker.instantiate_pre(&module)?;
        let growth = Growth::begin().map_err(|e| wasmtime::Error::msg(format!("{e:#}")))?;
        let mut held = Vec::with_capacity(count);
        for _ in 0..count {
            let mut store = Store::new(&engine, RivalHost::default());
            let instance = match pre.instantiate(&mut store) {
                Ok(instance) => instance,
                Err(error) => {
                    eprintln!("{} {}: {} guests: {error}", names.0, names.1, held.len());
                    break;
                }
            };
            call(&mut store, &instance)?;
            held.push(store);
        }
        Ok((growth, held))
    };
    let (growth, held) = inner().map_err(|error| anyhow::anyhow!("{error:#}"))?;
    growth.report(names, (count, held.len()), None, sink)
}
