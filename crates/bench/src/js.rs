//! `js/request`: a request to the warm JavaScript guest, by afresh and by wasmtime on the same warm
//! state, pre-initialised with wasmtime-wizer.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use afresh_wasm::{Guest, GuestOptions, Mode, WarmUp};
use wasmparser::ValType;
use wasmtime::{Instance, Linker, Store, Val};
use wasmtime_wasi::WasiCtxBuilder;
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wizer::{InstanceState, SnapshotVal, Wizer};

use crate::code_cache;
use crate::rivals::{Rival, RivalGuest};
use crate::row::{Contestant, Options, Sink, contest};

/// The request of the benchmark: parse JSON, look into the warm heap, answer JSON.
pub const REQUEST: &[u8] = br#"{"op":"query","tag":"tag-7","ids":[17,4711,39000,79001],"scan":64}"#;

/// Refuses an error as an answer: a guest that fails is quick.
///
/// # Errors
/// The guest's message.
pub fn answered(answer: &[u8]) -> anyhow::Result<()> {
    let said = || String::from_utf8_lossy(answer).into_owned();
    anyhow::ensure!(
        !answer.starts_with(br#"{"error":"#),
        "the guest refuses the request: {}",
        said()
    );
    Ok(())
}

/// The instance state that wizer reads.
pub(crate) struct State<'a, T: 'static> {
    pub(crate) store: &'a mut Store<T>,
    pub(crate) instance: Instance,
}

impl<T: Send> InstanceState for State<'_, T> {
    async fn global_get(&mut self, name: &str, _: ValType) -> SnapshotVal {
        let value = self
            .instance
            .get_global(&mut *self.store, name)
            .map(|global| global.get(&mut *self.store));
        match value {
            Some(Val::I32(v)) => SnapshotVal::I32(v),
            Some(Val::I64(v)) => SnapshotVal::I64(v),
            Some(Val::F32(v)) => SnapshotVal::F32(v),
            Some(Val::F64(v)) => SnapshotVal::F64(v),
            Some(Val::V128(v)) => SnapshotVal::V128(v.as_u128()),
            other => unreachable!("wizer reads numbers that it exported, not {other:?}"),
        }
    }

    async fn memory_contents(&mut self, name: &str, contents: impl FnOnce(&[u8]) + Send) {
        if let Some(memory) = self.instance.get_memory(&mut *self.store, name) {
            contents(memory.data(&*self.store));
        }
    }
}

/// Runs a future that never waits for anything.
pub(crate) fn ready<T>(future: impl Future<Output = T>) -> anyhow::Result<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Ok(value),
        Poll::Pending => anyhow::bail!("wizer waited for something"),
    }
}

/// The module with its state after `_initialize` and `warm`, as wasmtime-wizer makes it.
///
/// # Errors
/// Any error of wizer or wasmtime.
pub fn wizen(wasm: &[u8], warm: &str) -> anyhow::Result<Vec<u8>> {
    let mut wizer = Wizer::new();
    wizer.init_func(warm).keep_init_func(true);
    let fail = |e: wasmtime::Error| anyhow::anyhow!("{e:#}");
    let (context, instrumented) = wizer.instrument(wasm).map_err(fail)?;
    let engine = wasmtime::Engine::default();
    let module = code_cache::module(&engine, &instrumented).map_err(fail)?;
    let mut linker: Linker<WasiP1Ctx> = Linker::new(&engine);
    wasmtime_wasi::p1::add_to_linker_sync(&mut linker, |wasi| wasi).map_err(fail)?;
    let mut store = Store::new(&engine, WasiCtxBuilder::new().build_p1());
    let instance = linker.instantiate(&mut store, &module).map_err(fail)?;
    for name in ["_initialize", warm] {
        if let Some(func) = instance.get_func(&mut store, name) {
            func.typed::<(), ()>(&store).map_err(fail)?.call(&mut store, ()).map_err(fail)?;
        }
    }
    let mut state = State { store: &mut store, instance };
    ready(wizer.snapshot(&context, &mut state))?.map_err(fail)
}

/// The contest on the byte-handling guest in `wasm`, warmed by its export `warm`.
///
/// # Errors
/// The first that any contestant meets, or answers that differ.
pub fn request(
    wasm: &[u8],
    case: &str,
    input: &[u8],
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let engine = code_cache::engine()?;
    let mut guests = Vec::new();
    for mode in [Mode::Reset, Mode::Fresh] {
        if options.wants(case, mode.name()) {
            let guest_options = GuestOptions { mode, ..GuestOptions::default() };
            let guest = Guest::with_options(&engine, wasm, guest_options)?;
            let warm = guest.warm(WarmUp::new().call("warm", &[]))?;
            let entry = warm.bytes_entry("handle")?;
            guests.push((mode.name(), warm, entry));
        }
    }
    let wizened = wizen(wasm, "warm")?;
    let mut rivals = Vec::new();
    for rival in Rival::ALL {
        if options.wants(case, rival.name()) {
            rivals.push((rival.name(), RivalGuest::new(rival, &wizened, "handle")?));
        }
    }
    let mut answers = Vec::new();
    for (name, warm, entry) in &guests {
        answers.push((*name, warm.lease()?.call_bytes(entry, input)?));
    }
    for (name, rival) in &rivals {
        answers.push((*name, rival.request(input)?));
    }
    if let Some((first, expected)) = answers.first() {
        answered(expected)?;
        for (name, answer) in &answers {
            anyhow::ensure!(answer == expected, "{name} answers otherwise than {first}");
        }
    }
    let mut field: Vec<Contestant<'_>> = Vec::new();
    for (name, warm, entry) in &guests {
        field.push(Contestant::new(*name, || {
            warm.lease()?.call_bytes(entry, input)?;
            Ok(())
        }));
    }
    for (name, rival) in &rivals {
        field.push(Contestant::new(*name, || rival.request(input).map(drop)));
    }
    contest("wasm", case, options, field, sink)
}
