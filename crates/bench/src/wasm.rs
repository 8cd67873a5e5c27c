//! `bench wasm`: a pristine call of a small and a large module, by every strategy of afresh, by
//! wasmtime's own best configurations, and by the floor.

use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use afresh_memory::{Features, HostAccess, Strategy};
use afresh_wasm::{Engine, Entry, Guest, GuestOptions, Mode, Warm, WarmUp};

use crate::code_cache;
use crate::live::LiveInstance;
use crate::modules::{DIRTY, LARGE_MODULE, SCATTER, SMALL_MODULE, Shape};
use crate::rivals::{Rival, RivalGuest};
use crate::row::{Contestant, Options, Sink, contest, summarise};
use crate::wago::{STRATEGY as WAGO, Wago};

const TABLE: &str = "wasm";
/// The scaling rows are a separate table: their harness, threads that watch a flag, costs some
/// nanoseconds at every number of threads.
const THREADS_TABLE: &str = "wasm-threads";
/// Threads of the scaling rows.
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];

/// A guest of afresh, ready to be called.
struct WarmRival {
    warm: Warm,
    entry: Entry<(), ()>,
}

impl WarmRival {
    fn new(
        engine: &Engine,
        wasm: &[u8],
        call: &str,
        mode: Mode,
        strategy: Strategy,
    ) -> anyhow::Result<Self> {
        let options = GuestOptions { mode, strategy, ..GuestOptions::default() };
        let warm = Guest::with_options(engine, wasm, options)?.warm(WarmUp::new())?;
        let entry = warm.entry(call)?;
        Ok(Self { warm, entry })
    }

    /// Hand-out, call, reset and return.
    #[inline]
    fn call(&self) -> anyhow::Result<()> {
        Ok(self.warm.lease()?.invoke(&self.entry, ())?)
    }
}

/// Modes and strategies of afresh, with their names in the rows.
fn ours() -> Vec<(String, Mode, Strategy)> {
    let mut list = vec![
        ("reset".to_owned(), Mode::Reset, Strategy::Auto),
        ("fresh".to_owned(), Mode::Fresh, Strategy::Auto),
    ];
    for strategy in Strategy::FORCED {
        if strategy.choose(Features::host(), HostAccess::Threads).is_ok() {
            list.push((format!("reset/{strategy}"), Mode::Reset, strategy));
        }
    }
    list
}

/// Runs one exported function of a module from the caller. `wago` is the program of
/// [`wago`](crate::wago), which may be missing.
///
/// # Errors
/// When the module does not load or the call fails.
pub fn module(
    wasm: &[u8],
    call: &str,
    case: &str,
    wago: Option<&Path>,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let engine = code_cache::engine()?;
    let mut theirs = None;
    if let Some(program) = wago.filter(|_| options.wants(case, WAGO)) {
        match Wago::start(program, wasm, call) {
            Ok(wago) => theirs = Some(wago),
            Err(error) => eprintln!("{case} {}: left out: {error:#}", WAGO),
        }
    }
    let mut guests = Vec::new();
    for (name, mode, strategy) in ours() {
        if options.wants(case, &name) {
            match WarmRival::new(&engine, wasm, call, mode, strategy) {
                Ok(guest) => guests.push((name, guest)),
                Err(error) => eprintln!("{case} {name}: left out: {error:#}"),
            }
        }
    }
    let mut rivals = Vec::new();
    for rival in Rival::ALL {
        if options.wants(case, rival.name()) {
            rivals.push((rival.name(), RivalGuest::new(rival, wasm, call)?));
        }
    }
    let floor = std::cell::RefCell::new(LiveInstance::new(wasm, call)?);
    let mut field: Vec<Contestant<'_>> = Vec::new();
    for (name, guest) in &guests {
        field.push(Contestant::new(name, || guest.call()));
    }
    for (name, rival) in &rivals {
        field.push(Contestant::new(*name, || rival.call()));
    }
    if let Some(wago) = &mut theirs {
        field.push(Contestant::timed(WAGO, |n| wago.calls(n)).optional());
    }
    // An instance that is never reset would grow without end.
    if !case.ends_with("/grow") {
        field.push(Contestant::new("floor/never-reset", || floor.borrow_mut().call()));
    }
    contest(TABLE, case, options, field, sink)
}

/// The byte ranges that a case dirties.
fn dirtied(call: &str) -> Vec<(usize, usize)> {
    match call {
        "scatter64" => (0..64).map(|n| ((SCATTER.0 + n * SCATTER.1) & !4095, 4096)).collect(),
        "dirty1m" => vec![DIRTY],
        _ => Vec::new(),
    }
}

fn floor(shape: &Shape, call: &str, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let ranges = dirtied(call);
    let case = format!("{}/{call}", shape.name);
    if ranges.is_empty() {
        return Ok(());
    }
    let live = std::cell::RefCell::new(LiveInstance::new(&shape.module(), call)?);
    let engine = code_cache::engine()?;
    let reset = WarmRival::new(&engine, &shape.module(), call, Mode::Reset, Strategy::Auto)?;
    // Beside ours in one contest, so that the ratio is of the same minutes.
    let field = vec![
        Contestant::new("reset (beside floor)", || reset.call()),
        Contestant::new("floor/bandwidth", || {
            if shape.name == "small" {
                live.borrow_mut().call_and_clear(&ranges)
            } else {
                live.borrow_mut().call_and_copy(&ranges)
            }
        }),
    ];
    contest(TABLE, &case, options, field, sink)
}

/// Everything: both modules, all cases, then scaling over threads.
///
/// # Errors
/// The first that any contestant meets.
pub fn all(wago: Option<&Path>, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    for shape in [SMALL_MODULE, LARGE_MODULE] {
        let wasm = shape.module();
        for call in ["empty", "scatter64", "dirty1m", "grow"] {
            module(&wasm, call, &format!("{}/{call}", shape.name), wago, options, sink)?;
            floor(&shape, call, options, sink)?;
        }
    }
    threads(options, sink)
}

/// Time per call over all threads together: wall time divided by calls.
fn scaled(
    threads: usize,
    batch: Duration,
    call: &(dyn Fn() -> anyhow::Result<()> + Sync),
) -> anyhow::Result<f64> {
    let barrier = Barrier::new(threads + 1);
    let stop = AtomicBool::new(false);
    let calls = AtomicU64::new(0);
    let failed = AtomicBool::new(false);
    let mut wall = Duration::ZERO;
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                // The first call of a thread makes its instance, which is not measured.
                let first = call();
                barrier.wait();
                let mut count = 0;
                let mut ok = first.is_ok();
                while ok && !stop.load(Ordering::Relaxed) {
                    ok = call().is_ok();
                    count += 1;
                }
                calls.fetch_add(count, Ordering::Relaxed);
                failed.fetch_or(!ok, Ordering::Relaxed);
            });
        }
        barrier.wait();
        let started = Instant::now();
        std::thread::sleep(batch);
        stop.store(true, Ordering::Relaxed);
        wall = started.elapsed();
    });
    anyhow::ensure!(!failed.load(Ordering::Relaxed), "a call failed on one of {threads} threads");
    Ok(wall.as_secs_f64() * 1e6 / calls.load(Ordering::Relaxed).max(1) as f64)
}

/// The empty and the scattering call of the small module on 1 to 16 threads.
///
/// # Errors
/// The first that any contestant meets.
pub fn threads(options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    type Call = Box<dyn Fn() -> anyhow::Result<()> + Sync>;
    let engine = code_cache::engine()?;
    let wasm = SMALL_MODULE.module();
    for call in ["empty", "scatter64"] {
        let case = format!("{}/{call}", SMALL_MODULE.name);
        let mut field: Vec<(&str, Call)> = Vec::new();
        for (name, mode) in [("reset", Mode::Reset), ("fresh", Mode::Fresh)] {
            let guest = WarmRival::new(&engine, &wasm, call, mode, Strategy::Auto)?;
            field.push((name, Box::new(move || guest.call())));
        }
        for rival in [Rival::Pooling, Rival::PoolingScan] {
            let guest = RivalGuest::new(rival, &wasm, call)?;
            field.push((rival.name(), Box::new(move || guest.call())));
        }
        field.retain(|(name, _)| options.wants(&case, name));
        let mut times = vec![[const { Vec::new() }; THREADS.len()]; field.len()];
        for _ in 0..options.rounds.div_ceil(3) {
            for (contestant, (_, call)) in field.iter().enumerate() {
                for (at, threads) in THREADS.iter().enumerate() {
                    let time = scaled(*threads, options.batch * 4, call)?;
                    times[contestant][at].push(time);
                }
            }
        }
        for ((name, _), times) in field.iter().zip(times) {
            for (threads, times) in THREADS.iter().zip(times) {
                sink(&summarise(THREADS_TABLE, &case, (*name).to_owned(), *threads, times));
            }
        }
    }
    Ok(())
}
