//! Random modules: a prepared one behaves as its original, and a restored instance as a new one.

use crate::common::random::Random;
use crate::common::{RunningInstance, engine, start, start_from, stateful, wat};
use afresh_rewrite::{PrepareOptions, PreparedModule, WarmState, bake, prepare};
use arbitrary::{Arbitrary, Unstructured};
use wasmtime::{Engine, ExternRef, Val};

/// A random module of the kind that has state to restore, its loops and recursion bounded by a
/// counter in a global.
fn module(random: &mut Random) -> Option<Vec<u8>> {
    let bytes: Vec<u8> = (0..6000).flat_map(|_| random.next().to_le_bytes()).collect();
    let mut input = Unstructured::new(&bytes);
    let config = wasm_smith::Config {
        bulk_memory_enabled: true,
        reference_types_enabled: true,
        multi_value_enabled: true,
        memory64_enabled: bool::arbitrary(&mut input).ok()?,
        exceptions_enabled: true,
        tail_call_enabled: true,
        simd_enabled: true,
        gc_enabled: false,
        threads_enabled: false,
        relaxed_simd_enabled: false,
        custom_page_sizes_enabled: false,
        wide_arithmetic_enabled: false,
        shared_everything_threads_enabled: false,
        canonicalize_nans: false,
        disallow_traps: bool::arbitrary(&mut input).ok()?,
        max_imports: 0,
        min_funcs: 4,
        max_funcs: 12,
        min_tables: 1,
        max_tables: 3,
        max_table_elements: 30,
        max_memories: 2,
        max_memory32_bytes: 1 << 18,
        max_memory64_bytes: 1 << 18,
        min_globals: 2,
        max_globals: 8,
        min_element_segments: 2,
        max_element_segments: 8,
        min_data_segments: 1,
        max_data_segments: 6,
        max_instructions: 120,
        export_everything: false,
        min_exports: 5,
        allow_start_export: true,
        ..wasm_smith::Config::default()
    };
    let mut module = wasm_smith::Module::new(config, &mut input).ok()?;
    module.ensure_termination(200).ok()?;
    Some(module.to_bytes())
}

/// The result of a call, in a form that compares across instances.
fn show(result: Result<Vec<Val>, String>) -> String {
    let values = match result {
        Ok(values) => values,
        Err(trap) => return trap,
    };
    let shown: Vec<String> = values
        .iter()
        .map(|value| match value.ref_() {
            Some(reference) => format!("null: {}", reference.is_null()),
            None => format!("{value:?}"),
        })
        .collect();
    shown.join(" ")
}

type Call = (String, Vec<Val>);

fn calls(random: &mut Random, run: &mut RunningInstance) -> Vec<Call> {
    let functions = run.functions();
    let mut calls = Vec::new();
    for _ in 0..8 {
        if functions.is_empty() {
            break;
        }
        let (name, params) = &functions[random.below(functions.len())];
        let args: Option<Vec<Val>> = params.iter().map(|ty| random.value(ty)).collect();
        calls.extend(args.map(|args| (name.clone(), args)));
    }
    calls
}

/// Makes the calls; every other call is given host objects where it takes any.
fn perform(run: &mut RunningInstance, calls: &[Call]) -> Vec<String> {
    let mut results = Vec::new();
    for (at, (name, args)) in calls.iter().enumerate() {
        let mut args = args.clone();
        for arg in &mut args {
            if at % 2 == 1 && matches!(arg, Val::ExternRef(None)) {
                let host = ExternRef::new(&mut run.store, at).expect("room in the GC heap");
                *arg = Val::ExternRef(Some(host));
            }
        }
        results.push(show(run.call(name, &args)));
    }
    results
}

/// Counts of exercised features, so that the tests cannot pass on nothing.
#[derive(Debug, Default)]
struct Coverage {
    modules: u32,
    failed_starts: u32,
    traps: u32,
    returns: u32,
    changes: u32,
    dropped: u32,
    grown_tables: u32,
    grown_memories: u32,
    restores: u32,
    table_changes: u32,
    baked: u32,
    opaque: u32,
}

impl Coverage {
    fn results(&mut self, results: &[String]) {
        let traps = results.iter().filter(|text| text.contains("trap")).count() as u32;
        self.traps += traps;
        self.returns += results.len() as u32 - traps;
    }

    fn difference(&mut self, before: &WarmState, after: &WarmState) {
        self.changes += u32::from(before != after);
        self.dropped += u32::from(
            before.dropped_data != after.dropped_data
                || before.dropped_elements != after.dropped_elements,
        );
        self.table_changes += u32::from(before.tables != after.tables);
    }
}

fn start_both(
    engine: &Engine,
    wasm: &[u8],
    seen: &mut Coverage,
) -> Option<(PreparedModule, RunningInstance, RunningInstance)> {
    let options = PrepareOptions { bakeable: true, ..PrepareOptions::default() };
    let prepared = prepare(wasm, &options).expect("no random module has a reason for refusal");
    let original = start(engine, wasm);
    let rewritten = start_from(engine, &prepared);
    match (original, rewritten) {
        (Ok(original), Ok(rewritten)) => Some((prepared, original, rewritten)),
        (Err(a), Err(b)) => {
            let kind = |error: &wasmtime::Error| error.downcast_ref::<wasmtime::Trap>().copied();
            assert_eq!(kind(&a), kind(&b), "{a:?} but {b:?}");
            seen.failed_starts += 1;
            None
        }
        (a, b) => panic!("original {:?}, prepared {:?}", a.err(), b.err()),
    }
}

fn check(engine: &Engine, wasm: &[u8], random: &mut Random, seen: &mut Coverage) {
    let Some((prepared, mut original, mut run)) = start_both(engine, wasm, seen) else { return };
    seen.modules += 1;
    let count = prepared.analysis.memories.len();

    // The prepared module behaves as the original; this is also the warm-up.
    let warm_up = calls(random, &mut original);
    let expected = perform(&mut original, &warm_up);
    assert_eq!(expected, perform(&mut run, &warm_up), "prepared and original differ");
    seen.results(&expected);

    // Calls, a restore, and the state is the saved one.
    run.save();
    let saved = run.warm_state(&prepared);
    let memories = run.memories(count);
    let baked = bake(&prepared, &saved);
    for _ in 0..2 {
        let spoil = calls(random, &mut run);
        perform(&mut run, &spoil);
        let spoilt = run.warm_state(&prepared);
        seen.difference(&saved, &spoilt);
        let sizes =
            |state: &WarmState| -> Vec<usize> { state.tables.values().map(Vec::len).collect() };
        let grown = sizes(&saved) != sizes(&spoilt);
        assert_eq!(run.restore(), i32::from(grown), "only a grown table cannot be restored");
        if grown {
            seen.grown_tables += 1;
            return;
        }
        if !run.set_memories(&memories) {
            seen.grown_memories += 1;
            return;
        }
        seen.restores += 1;
        assert_eq!(saved, run.warm_state(&prepared), "restored state differs");
    }

    // The restored instance continues as the original, which was never spoilt, does.
    let after = calls(random, &mut original);
    let expected = perform(&mut original, &after);
    assert_eq!(expected, perform(&mut run, &after), "restored instance behaves differently");
    seen.results(&expected);

    // And so does an instance of the baked module.
    match baked {
        Ok(baked) => {
            let mut fresh = start(engine, &baked).expect("a baked module starts");
            assert!(fresh.set_memories(&memories), "baked memories have their warm size");
            assert_eq!(expected, perform(&mut fresh, &after), "baked module behaves differently");
            seen.baked += 1;
        }
        Err(error) => {
            assert!(error.to_string().contains("no new instance"), "{error}");
            seen.opaque += 1;
        }
    }
}

/// Names the module if the test fails over it.
struct SeedOnFailure(u64);

impl Drop for SeedOnFailure {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("seed {}", self.0);
        }
    }
}

/// Runs `make`'s modules, up to `count` or until the time is up.
fn check_all(count: u64, mut make: impl FnMut(&mut Random) -> Option<Vec<u8>>) -> Coverage {
    let engine = engine();
    let mut seen = Coverage::default();
    let begin = std::time::Instant::now();
    for seed in 0..count {
        let _named = SeedOnFailure(seed);
        let mut random = Random::new(seed);
        if let Some(wasm) = make(&mut random) {
            check(&engine, &wasm, &mut random, &mut seen);
        }
        if begin.elapsed().as_secs() >= 60 {
            break;
        }
    }
    seen
}

#[test]
fn random_modules_behave_as_before_and_come_back() {
    let seen = check_all(400, module);
    assert!(seen.modules > 20 && seen.restores > 10 && seen.changes > 5, "{seen:?}");
    assert!(seen.traps > 5 && seen.returns > 5 && seen.baked > 5, "{seen:?}");
}

#[test]
fn random_state_comes_back_and_can_be_baked() {
    let seen = check_all(500, |random| Some(wat(&stateful::module(random))));
    assert!(seen.restores > 30 && seen.table_changes > 20 && seen.dropped > 20, "{seen:?}");
    assert!(seen.traps > 20 && seen.returns > 20 && seen.baked > 20, "{seen:?}");
    assert!(seen.grown_tables > 0 && seen.grown_memories > 0, "{seen:?}");
}
