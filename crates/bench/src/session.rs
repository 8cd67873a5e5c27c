//! `session`: checkpoints, rollbacks and forks of the live JavaScript guest, whose heap takes about
//! 45 MiB. The rival does not know which pages were written: it copies all of them, and compares.
//!
//! Every iteration makes a turn first, outside of the clock: a request that changes some objects.

use std::time::{Duration, Instant};

use afresh_snapshot::{Branch, Tree};
use afresh_wasm::{BytesEntry, Guest, Session, Warm, WarmUp};
use wasmtime::{Linker, Memory, Module, Store, TypedFunc};
use wasmtime_wasi::WasiCtxBuilder;
use wasmtime_wasi::p1::WasiP1Ctx;

use crate::code_cache;
use crate::row::{Contestant, Options, Row, Sink, contest, summarise};

/// Name of the table.
const TABLE: &str = "session";
/// Sessions that one forks into.
const FORKS: usize = 100;
/// Of so many copies, one is timed.
const COPY_STRIDE: usize = 10;
/// The unit of a diff.
const PAGE: usize = 4096;

/// The request of a turn: some products and a customer change.
pub(crate) fn request(turn: u64) -> Vec<u8> {
    let ids = [turn * 37 % 1000, 40_000 + turn % 100, 79_000 + turn % 64];
    format!(r#"{{"op":"query","ids":{ids:?},"customer":{}}}"#, turn % 500).into_bytes()
}

/// Counts turns.
#[derive(Default)]
struct Turns(u64);

impl Turns {
    fn next(&mut self) -> Vec<u8> {
        self.0 += 1;
        request(self.0)
    }
}

/// The guest of all contests, compiled once: this takes longer than most of them.
struct CompiledGuest {
    warm: Warm,
    plain: Module,
}

impl CompiledGuest {
    fn new(wasm: &[u8]) -> anyhow::Result<Self> {
        let engine = code_cache::engine()?;
        let warm = Guest::new(&engine, wasm)?.warm(WarmUp::new().call("warm", &[]))?;
        let plain = code_cache::module(&wasmtime::Engine::default(), wasm).map_err(fail)?;
        Ok(Self { warm, plain })
    }
}

/// A session of the warm guest.
struct OurSession {
    branch: Branch<Session>,
    entry: BytesEntry,
    turns: Turns,
}

impl OurSession {
    fn new(guest: &CompiledGuest) -> anyhow::Result<Self> {
        let warm = guest.warm.clone();
        let root = warm.root()?;
        let entry = warm.bytes_entry("handle")?;
        let branch = Branch::from_state(&Tree::new(), warm, root);
        Ok(Self { branch, entry, turns: Turns::default() })
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        let input = self.turns.next();
        self.branch.guest_mut()?.lease().call_bytes(&self.entry, &input)?;
        Ok(())
    }

    /// `n` times what `then` does after a turn.
    fn after_turns(
        &mut self,
        n: u64,
        mut then: impl FnMut(&mut Self) -> anyhow::Result<Duration>,
    ) -> anyhow::Result<Duration> {
        let mut total = Duration::ZERO;
        for _ in 0..n {
            self.turn()?;
            total += then(self)?;
        }
        Ok(total)
    }
}

/// A plain instance with the same heap.
struct PlainInstance {
    linker: Linker<WasiP1Ctx>,
    module: Module,
    store: Store<WasiP1Ctx>,
    memory: Memory,
    buffer: TypedFunc<i32, i32>,
    handle: TypedFunc<i32, i64>,
    /// The memory at the last checkpoint.
    kept: Vec<u8>,
    turns: Turns,
}

fn fail(error: wasmtime::Error) -> anyhow::Error {
    anyhow::anyhow!("{error:#}")
}

fn store(engine: &wasmtime::Engine) -> Store<WasiP1Ctx> {
    Store::new(engine, WasiCtxBuilder::new().build_p1())
}

impl PlainInstance {
    fn new(guest: &CompiledGuest) -> anyhow::Result<Self> {
        let module = guest.plain.clone();
        let engine = module.engine();
        let mut linker: Linker<WasiP1Ctx> = Linker::new(engine);
        wasmtime_wasi::p1::add_to_linker_sync(&mut linker, |wasi| wasi).map_err(fail)?;
        let mut store = store(engine);
        let instance = linker.instantiate(&mut store, &module).map_err(fail)?;
        for name in ["_initialize", "warm"] {
            if let Some(func) = instance.get_func(&mut store, name) {
                func.typed::<(), ()>(&store).map_err(fail)?.call(&mut store, ()).map_err(fail)?;
            }
        }
        let memory = instance
            .get_memory(&mut store, "memory")
            .ok_or_else(|| anyhow::anyhow!("the guest exports no memory"))?;
        let buffer = instance.get_typed_func(&mut store, "afresh_buffer").map_err(fail)?;
        let handle = instance.get_typed_func(&mut store, "handle").map_err(fail)?;
        let kept = memory.data(&store).to_vec();
        Ok(Self { linker, module, store, memory, buffer, handle, kept, turns: Turns::default() })
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        let input = self.turns.next();
        let len = input.len() as i32;
        let at = self.buffer.call(&mut self.store, len).map_err(fail)?;
        self.memory.write(&mut self.store, at as u32 as usize, &input)?;
        self.handle.call(&mut self.store, len).map_err(fail)?;
        Ok(())
    }

    /// Copies the whole memory and finds the pages that changed.
    fn checkpoint(&mut self) -> Vec<(usize, [u8; PAGE])> {
        let now = self.memory.data(&self.store).to_vec();
        let mut changed = Vec::new();
        for (page, bytes) in now.chunks_exact(PAGE).enumerate() {
            if self.kept.get(page * PAGE..(page + 1) * PAGE) != Some(bytes) {
                let mut copy = [0; PAGE];
                copy.copy_from_slice(bytes);
                changed.push((page, copy));
            }
        }
        self.kept = now;
        changed
    }

    /// Copies the whole memory back.
    fn rollback(&mut self) {
        let data = self.memory.data_mut(&mut self.store);
        let len = data.len().min(self.kept.len());
        data[..len].copy_from_slice(&self.kept[..len]);
    }

    /// A new instance with a copy of the memory.
    fn fork(&mut self) -> anyhow::Result<Store<WasiP1Ctx>> {
        let mut other = store(self.module.engine());
        let instance = self.linker.instantiate(&mut other, &self.module).map_err(fail)?;
        let memory = instance
            .get_memory(&mut other, "memory")
            .ok_or_else(|| anyhow::anyhow!("the guest exports no memory"))?;
        let data = self.memory.data(&self.store);
        let pages = data.len().saturating_sub(memory.data_size(&other)).div_ceil(1 << 16);
        memory.grow(&mut other, pages as u64).map_err(fail)?;
        memory.data_mut(&mut other)[..data.len()].copy_from_slice(data);
        Ok(other)
    }
}

/// Times what runs.
fn time<R>(run: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<(Duration, R)> {
    let started = Instant::now();
    let result = run()?;
    Ok((started.elapsed(), result))
}

/// The contests on the byte-handling JavaScript guest in `wasm`; `small` is a guest that evaluates
/// JavaScript and has a small heap, if available.
///
/// # Errors
/// The first error of any contestant.
pub fn all(
    wasm: &[u8],
    small: Option<&[u8]>,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let guest = CompiledGuest::new(wasm)?;
    checkpoint(&guest, options, sink)?;
    rollback(&guest, options, sink)?;
    fork(&guest, options, sink)?;
    drop(guest);
    crate::session_saved::all(wasm, small, options, sink)?;
    crate::session_files::all(options, sink)
}

fn checkpoint(guest: &CompiledGuest, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let (mut ours, mut plain) = (OurSession::new(guest)?, PlainInstance::new(guest)?);
    let field = vec![
        Contestant::timed("afresh", move |n| {
            ours.after_turns(n, |ours| {
                let before = ours.branch.at();
                let (took, _) = time(|| Ok(ours.branch.checkpoint()?))?;
                // So that the tree does not grow with the number of rounds.
                ours.branch.drop_snapshot(before)?;
                Ok(took)
            })
        }),
        Contestant::timed("copy-and-diff", move |n| {
            let mut total = Duration::ZERO;
            for _ in 0..n {
                plain.turn()?;
                let (took, changed) = time(|| Ok(plain.checkpoint()))?;
                anyhow::ensure!(!changed.is_empty(), "a turn changes something");
                total += took;
            }
            Ok(total)
        }),
    ];
    contest(TABLE, "js45/checkpoint", options, field, sink)?;
    changed(guest, options, sink)
}

/// The number of pages that a turn changes: the measure for the costs above.
fn changed(guest: &CompiledGuest, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    const STRATEGY: &str = "pages of a turn";
    if !options.wants("js45/checkpoint", STRATEGY) {
        return Ok(());
    }
    let mut ours = OurSession::new(guest)?;
    let mut pages = Vec::new();
    for _ in 0..options.rounds {
        ours.turn()?;
        let before = ours.branch.mark()?;
        ours.turn()?;
        let after = ours.branch.current()?;
        pages.push(ours.branch.tree().diff(before.id(), after)?.pages as f64);
    }
    let row = summarise(TABLE, "js45/checkpoint", STRATEGY.to_owned(), 1, pages);
    sink(&Row { unit: "pages", ..row });
    Ok(())
}

fn rollback(guest: &CompiledGuest, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let (mut ours, mut plain) = (OurSession::new(guest)?, PlainInstance::new(guest)?);
    ours.turn()?;
    let kept = ours.branch.checkpoint()?;
    let field = vec![
        Contestant::timed("afresh", move |n| {
            ours.after_turns(n, |ours| Ok(time(|| Ok(ours.branch.rollback(kept)?))?.0))
        }),
        Contestant::timed("copy-back", move |n| {
            let mut total = Duration::ZERO;
            for _ in 0..n {
                plain.turn()?;
                total += time(|| {
                    plain.rollback();
                    Ok(())
                })?
                .0;
            }
            Ok(total)
        }),
    ];
    contest(TABLE, "js45/rollback", options, field, sink)
}

fn fork(guest: &CompiledGuest, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    // Until that many sessions exist; their instances come with their first calls, which is the
    // next case.
    let (mut ours, mut plain) = (OurSession::new(guest)?, PlainInstance::new(guest)?);
    let forks = |ours: &mut OurSession, many: usize| -> anyhow::Result<Vec<Branch<Session>>> {
        let here = ours.branch.current()?;
        (0..many).map(|_| Ok(ours.branch.fork(here)?)).collect()
    };
    let field = vec![
        Contestant::timed("afresh", move |n| {
            ours.after_turns(n, |ours| {
                let (took, _) = time(|| forks(ours, FORKS))?;
                Ok(took)
            })
        }),
        // Each is dropped before the next, or they would not fit into memory. So all take the same
        // time, and a tenth of them is timed.
        Contestant::timed("copy", move |n| {
            let copies = n * (FORKS / COPY_STRIDE) as u64;
            let (took, ()) = time(|| (0..copies).try_for_each(|_| plain.fork().map(drop)))?;
            Ok(took * COPY_STRIDE as u32)
        }),
    ];
    let few = Options { rounds: options.rounds.min(7), ..options.clone() };
    contest(TABLE, &format!("js45/fork{FORKS}"), &few, field, sink)?;

    let (mut ours, mut plain) = (OurSession::new(guest)?, PlainInstance::new(guest)?);
    let input = request(0);
    let field = vec![
        Contestant::timed("afresh", move |n| {
            ours.after_turns(n, |ours| {
                let here = ours.branch.current()?;
                let mut fork = ours.branch.fork(here)?;
                let (took, _) =
                    time(|| Ok(fork.guest_mut()?.lease().call_bytes(&ours.entry, &input)?))?;
                Ok(took)
            })
        }),
        Contestant::new("copy", move || plain.fork().map(drop)),
    ];
    contest(TABLE, "js45/fork-answers", options, field, sink)
}
