//! CPython by wasmtime's own ways: the module with its warm state in it, a new store and instance
//! for each run.
//!
//! wasmtime-wizer makes the module, once for all rivals. It and its compiled code are kept next to
//! the guest, because they take minutes.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_interpreter::{Language, RUN, SETUP};
use anyhow::Context;
use wasmtime::{Caller, Engine, Extern, Instance, InstancePre, Linker, Module, Store};
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::{FsPerms, WasiCtxBuilder};
use wasmtime_wizer::Wizer;

use crate::code_cache;
use crate::js::{State, ready};
use crate::python::request;
use crate::rivals::Rival;

/// The path and the name of the library in the guest.
const LIBRARY: (&str, &str) = ("/usr/local/lib", "python315.zip");

/// The starting point of all rivals.
pub(crate) struct RivalStart {
    /// The module with its warm state.
    wasm: PathBuf,
    /// A directory with the library.
    library: PathBuf,
    env: &'static [(&'static str, &'static str)],
}

/// The store data of a wasmtime instance: WASI, built when a call first uses it, as afresh does,
/// and the answer.
struct RivalHost {
    wasi: Option<WasiP1Ctx>,
    library: PathBuf,
    env: &'static [(&'static str, &'static str)],
    answer: Vec<u8>,
}

impl RivalHost {
    fn new(library: &Path, env: &'static [(&'static str, &'static str)]) -> Self {
        Self { wasi: None, library: library.to_owned(), env, answer: Vec::new() }
    }

    fn p1(&mut self) -> &mut WasiP1Ctx {
        self.wasi.get_or_insert_with(|| {
            let mut builder = WasiCtxBuilder::new();
            builder.envs(self.env);
            // It was opened before; if it is missing, the guest reports that.
            let _ = builder.preopened_dir(&self.library, LIBRARY.0, FsPerms::ReadOnly);
            builder.build_p1()
        })
    }
}

fn linker(engine: &Engine) -> wasmtime::Result<Linker<RivalHost>> {
    let mut linker = Linker::new(engine);
    wasmtime_wasi::p1::add_to_linker_sync(&mut linker, RivalHost::p1)?;
    linker.func_wrap("host", "call", take_frame)?;
    Ok(linker)
}

/// Takes a frame: an answer is kept, other frames are dropped.
fn take_frame(
    mut caller: Caller<'_, RivalHost>,
    address: i32,
    len: i32,
    to_address: i32,
    to_len: i32,
) -> wasmtime::Result<i32> {
    let missing = || wasmtime::Error::msg("the guest exports no memory");
    let memory = caller.get_export("memory").and_then(Extern::into_memory).ok_or_else(missing)?;
    let mut frame = vec![0; len as u32 as usize];
    memory.read(&caller, address as u32 as usize, &mut frame)?;
    if frame.first() == Some(&0) {
        caller.data_mut().answer = frame.split_off(1);
    }
    for to in [to_address, to_len] {
        memory.write(&mut caller, to as u32 as usize, &[0; 4])?;
    }
    Ok(0)
}

/// Has an instance do one turn.
fn turn(store: &mut Store<RivalHost>, instance: Instance, bytes: &[u8]) -> wasmtime::Result<()> {
    let len = i32::try_from(bytes.len())?;
    let room = instance.get_typed_func::<i32, i32>(&mut *store, "host_alloc")?;
    let at = room.call(&mut *store, len)?;
    let missing = || wasmtime::Error::msg("the guest exports no memory");
    let memory = instance.get_memory(&mut *store, "memory").ok_or_else(missing)?;
    memory.write(&mut *store, at as u32 as usize, bytes)?;
    let turn = instance.get_typed_func::<(i32, i32), i32>(&mut *store, "turn")?;
    match turn.call(&mut *store, (at, len))? {
        0 => Ok(()),
        status => Err(wasmtime::Error::msg(format!("the turn ended with status {status}"))),
    }
}

/// An engine with more stack than a thread's, which calls on fibers have.
fn with_stack(rival: Rival) -> wasmtime::Result<Engine> {
    Engine::new(rival.config().max_wasm_stack(STACK).async_stack_size(2 * STACK))
}

/// Bytes of stack, which fit into a thread's own.
const STACK: usize = 4 << 20;

impl RivalStart {
    /// Makes the module, or takes the one that was made before of the same.
    pub(crate) fn new(path: &Path, cache: &Path, setup: &str) -> anyhow::Result<Self> {
        let language = Language::named("python")?;
        let prelude = language.prelude().context("CPython is warmed by source")?;
        let about = std::fs::metadata(path)?;
        let mut hasher = DefaultHasher::new();
        (about.len(), about.modified()?, &prelude, setup).hash(&mut hasher);
        let library = cache.join("library");
        std::fs::create_dir_all(&library)?;
        let (zip, seen) = (path.with_file_name("python-stdlib.zip"), library.join(LIBRARY.1));
        if !seen.is_file() {
            std::fs::hard_link(&zip, &seen).or_else(|_| std::fs::copy(&zip, &seen).map(drop))?;
        }
        let wasm = cache.join(format!("warm-{:016x}.wasm", hasher.finish()));
        let this = Self { wasm, library, env: language.env };
        if !this.wasm.is_file() {
            let warm = [prelude.into_bytes(), request(setup, SETUP).bytes().to_vec()];
            let wizened = this
                .wizen(&std::fs::read(path)?, &warm)
                .map_err(|e| anyhow::anyhow!("wasmtime-wizer on {}: {e:#}", path.display()))?;
            let new = this.wasm.with_extension("new");
            std::fs::write(&new, wizened)?;
            std::fs::rename(&new, &this.wasm)?;
        }
        Ok(this)
    }

    fn wizen(&self, wasm: &[u8], warm: &[Vec<u8>]) -> wasmtime::Result<Vec<u8>> {
        let mut wizer = Wizer::new();
        wizer.init_func("turn").keep_init_func(true);
        let (context, instrumented) = wizer.instrument(wasm)?;
        let engine = with_stack(Rival::OnDemand)?;
        let module = Module::new(&engine, &instrumented)?;
        let mut store = Store::new(&engine, RivalHost::new(&self.library, self.env));
        let instance = linker(&engine)?.instantiate(&mut store, &module)?;
        instance.get_typed_func::<(), ()>(&mut store, "_initialize")?.call(&mut store, ())?;
        for bytes in warm {
            turn(&mut store, instance, bytes)?;
        }
        let mut state = State { store: &mut store, instance };
        ready(wizer.snapshot(&context, &mut state))
            .map_err(|e| wasmtime::Error::msg(format!("{e:#}")))?
    }

    /// The module compiled for an engine, or as it was compiled before.
    fn compiled(&self, engine: &Engine) -> wasmtime::Result<Module> {
        let folder = self.wasm.parent().unwrap_or(Path::new("."));
        code_cache::module_in(folder, engine, &std::fs::read(&self.wasm)?)
    }
}

/// CPython ready for calls, by a plain wasmtime instance.
pub(crate) struct RivalPython {
    engine: Engine,
    pre: InstancePre<RivalHost>,
    shared: Arc<RivalStart>,
    /// The number of clones.
    clones: AtomicU64,
}

impl RivalPython {
    pub(crate) fn new(rival: Rival, shared: &Arc<RivalStart>) -> anyhow::Result<Self> {
        let inner = || -> wasmtime::Result<Self> {
            let engine = with_stack(rival)?;
            let pre = linker(&engine)?.instantiate_pre(&shared.compiled(&engine)?)?;
            Ok(Self { engine, pre, shared: shared.clone(), clones: AtomicU64::new(0) })
        };
        inner().map_err(|e| anyhow::anyhow!("{}: {e:#}", rival.name()))
    }

    /// Runs code in a new instance; the answer.
    pub(crate) fn run(&self, code: &str) -> anyhow::Result<Vec<u8>> {
        let mut request = request(code, RUN);
        // Each is a separate clone, and seeds its generators.
        let clone = self.clones.fetch_add(1, Ordering::Relaxed) + 1;
        request.address_to(clone, afresh::wasm::entropy_bytes());
        let inner = || -> wasmtime::Result<Vec<u8>> {
            let host = RivalHost::new(&self.shared.library, self.shared.env);
            let mut store = Store::new(&self.engine, host);
            let instance = self.pre.instantiate(&mut store)?;
            turn(&mut store, instance, request.bytes())?;
            Ok(std::mem::take(&mut store.data_mut().answer))
        };
        inner().map_err(|e| anyhow::anyhow!("{e:#}"))
    }
}
