//! `bench wasm`, table `wasm-grow`: a memory that grows by 16 MiB in every call.
//!
//! Cases: `touch` is the growth and a write to every page of it, the clock round the call alone;
//! `cycle` is the same with everything that gives the next call a pristine instance; `sparse` is a
//! whole cycle that writes three pages only. Those named `first-…` make a new instance over a new
//! slot for every call; the making is part of the cycle, and the throwing away is not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh_frames::ZeroPool;
use afresh_wasm::{
    Engine, EngineConfig, Entry, Guest, GuestOptions, Lease, Mode, Warm, WarmUp, ZeroMemory,
};
use wasm_encoder::{
    BlockType, CodeSection, ExportKind, ExportSection, Function, FunctionSection, MemArg,
    MemorySection, MemoryType, Module, TypeSection, ValType,
};

use crate::rivals::{Rival, RivalGuest};
use crate::row::{Contestant, Options, Sink, contest};

const TABLE: &str = "wasm-grow";
/// 4 KiB pages of a growth.
const PAGES: usize = 4096;

/// Grows by 16 MiB and writes `count` pages, `step` pages apart.
fn growing(step: i32, count: i32) -> Function {
    const WORD: MemArg = MemArg { offset: 0, align: 2, memory_index: 0 };
    let mut function = Function::new([(2, ValType::I32)]);
    let mut code = function.instructions();
    code.i32_const(256).memory_grow(0).i32_const(16).i32_shl().local_tee(0);
    code.i32_const(count * step * 4096).i32_add().local_set(1);
    code.loop_(BlockType::Empty);
    code.local_get(0).i32_const(1).i32_store(WORD);
    code.local_get(0).i32_const(step * 4096).i32_add().local_tee(0);
    code.local_get(1).i32_lt_u().br_if(0);
    code.end().end();
    function
}

/// A memory of 64 KiB; `dense` and `sparse` grow it.
fn module() -> Vec<u8> {
    let mut types = TypeSection::new();
    types.ty().function([], []);
    let mut functions = FunctionSection::new();
    functions.function(0).function(0);
    let mut memories = MemorySection::new();
    memories.memory(MemoryType {
        minimum: 1,
        maximum: None,
        memory64: false,
        shared: false,
        page_size_log2: None,
    });
    let mut exports = ExportSection::new();
    exports.export("memory", ExportKind::Memory, 0);
    exports.export("dense", ExportKind::Func, 0).export("sparse", ExportKind::Func, 1);
    let mut code = CodeSection::new();
    code.function(&growing(1, PAGES as i32)).function(&growing(PAGES as i32 / 3, 3));
    let mut module = Module::new();
    module.section(&types).section(&functions).section(&memories);
    module.section(&exports).section(&code);
    module.finish()
}

/// A way to run calls with afresh.
struct AfreshCalls {
    name: String,
    warm: Warm,
    entry: Entry<(), ()>,
    zero_pool: Option<Arc<ZeroPool>>,
}

impl AfreshCalls {
    fn new(
        wasm: &[u8],
        call: &str,
        mode: Mode,
        zero_pool: Option<Arc<ZeroPool>>,
    ) -> anyhow::Result<Self> {
        let zero_memory = match &zero_pool {
            Some(zero_pool) => ZeroMemory::Source(zero_pool.clone()),
            None => ZeroMemory::Kernel,
        };
        let config = EngineConfig { timeouts: false, zero_memory, ..EngineConfig::default() };
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let warm = Guest::with_options(&Engine::new(config)?, wasm, options)?.warm(WarmUp::new())?;
        let entry = warm.entry(call)?;
        let without = if zero_pool.is_some() { "" } else { " without zero pool" };
        let ours = Self { name: format!("{}{without}", mode.name()), warm, entry, zero_pool };
        // The first growth is a separate case; here it must not affect the others.
        ours.wait();
        ours.call(false)?;
        Ok(ours)
    }

    /// Gives the zero pool the time it needs, which on a busy machine is long.
    fn wait(&self) {
        let waited = Instant::now();
        while self.zero_pool.as_ref().is_some_and(|zero_pool| zero_pool.ready() < PAGES)
            && waited.elapsed() < Duration::from_secs(5)
        {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// A call whose instance comes back, timed whole or without hand-out and reset.
    fn call(&self, whole: bool) -> anyhow::Result<Duration> {
        let started = Instant::now();
        let mut lease = self.warm.lease()?;
        let (before, after) = self.invoke(&mut lease)?;
        drop(lease);
        Ok(if whole { started.elapsed() } else { after - before })
    }

    /// A call in an instance over a slot that has never grown, and is thrown away after its reset.
    fn first(&self, whole: bool) -> anyhow::Result<Duration> {
        self.wait();
        let time = self.call(whole)?;
        self.warm.lease()?.discard();
        Ok(time)
    }

    fn invoke(&self, lease: &mut Lease<'_>) -> anyhow::Result<(Instant, Instant)> {
        let before = Instant::now();
        lease.invoke(&self.entry, ())?;
        Ok((before, Instant::now()))
    }
}

/// A contestant whose single calls time themselves.
fn sum<'a>(name: &str, once: impl Fn() -> anyhow::Result<Duration> + 'a) -> Contestant<'a> {
    Contestant::timed(name, move |calls| (0..calls).map(|_| once()).sum())
}

/// All cases.
///
/// # Errors
/// The first that any contestant meets.
pub fn all(options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let wasm = module();
    let zero_pool = Arc::new(ZeroPool::new(2 * PAGES)?);
    for (case, call, first, whole) in [
        ("16MiB/touch", "dense", false, false),
        ("16MiB/cycle", "dense", false, true),
        ("16MiB/sparse", "sparse", false, true),
        ("16MiB/first-touch", "dense", true, false),
        ("16MiB/first-cycle", "dense", true, true),
        ("16MiB/first-sparse", "sparse", true, true),
    ] {
        let mut ours = Vec::new();
        for mode in [Mode::Reset, Mode::Fresh] {
            for zero_pool in [Some(zero_pool.clone()), None] {
                ours.push(AfreshCalls::new(&wasm, call, mode, zero_pool)?);
            }
        }
        let mut rivals = Vec::new();
        for rival in [Rival::OnDemand, Rival::Pooling, Rival::PoolingScan] {
            rivals.push((rival.name(), RivalGuest::new(rival, &wasm, call)?));
        }
        let mut field = Vec::new();
        for guest in &ours {
            field.push(sum(&guest.name, || {
                if first { guest.first(whole) } else { guest.call(whole) }
            }));
        }
        for (name, guest) in &rivals {
            field.push(sum(name, || guest.timed_call(whole)));
        }
        contest(TABLE, case, options, field, sink)?;
        for guest in &ours {
            let found = guest.warm.lease()?.differences()?;
            anyhow::ensure!(found == (0, 0), "{case} {}: {found:?} differ", guest.name);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_module_is_valid() {
        wasmparser::Validator::new().validate_all(&super::module()).unwrap();
    }
}
