//! Any bytes as a Wasm module or component: it is refused, or the result of every rewriting is
//! valid where the input is. It takes memory in proportion to its bytes, and a fixed amount.
//!
//! The first byte of an input chooses the rewriting. Two modules that are linked follow each other,
//! after the length of the first.
#![no_main]

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use afresh_rewrite::{
    PrepareOptions, Roots, WarmState, WarmValue, analyze, bake, bake_component, direct_calls,
    linear_stack, link, open_component, prepare, prepare_component,
};
use libfuzzer_sys::fuzz_target;
use wasmparser::{Validator, WasmFeatures};

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Bytes of memory for a byte of a module: the smallest items have two or three bytes, and each is
/// kept parsed, analysed and rewritten.
const EACH: usize = 1024;
/// Memory beyond that: the validator of wasmparser reserves for the counts that a module claims,
/// such as 72 MB for a million exports.
const ROOM: usize = 96 << 20;

fn is_valid(wasm: &[u8]) -> bool {
    Validator::new_with_features(WasmFeatures::all()).validate_all(wasm).is_ok()
}

/// Modules and components that a rewriting made.
type Rewritten = Result<Vec<Vec<u8>>, String>;

fn prepared(wasm: &[u8], options: &PrepareOptions) -> Rewritten {
    let prepared = prepare(wasm, options).map_err(|error| error.to_string())?;
    for segment in &prepared.segments {
        let end = segment.place + segment.bytes.len();
        assert!(wasm[segment.place..end] == segment.bytes, "a segment is elsewhere");
    }
    let mut modules = Vec::new();
    if let Some(visible) = &prepared.visible {
        let globals = visible.globals.iter().map(|index| (*index, WarmValue::I32(7)));
        let memories = prepared.analysis.memories.iter().map(|memory| memory.minimum).collect();
        let warm = WarmState { memories, globals: globals.collect(), ..WarmState::default() };
        // Values of other types are refused.
        modules.extend(bake(&prepared, &warm).ok());
    }
    modules.push(prepared.module);
    Ok(modules)
}

fn component(wasm: &[u8]) -> Rewritten {
    let prepared = prepare_component(wasm).map_err(|error| error.to_string())?;
    let mut all = vec![prepared.component, direct_calls(wasm)];
    if let Ok(open) = open_component(wasm) {
        all.extend(bake_component(wasm, &vec![None; open.modules()]).ok());
        all.push(open.component);
    }
    Ok(all)
}

fn linked(data: &[u8]) -> Rewritten {
    let (len, data) = data.split_first_chunk::<2>().ok_or("no length")?;
    let (first, second) = data.split_at(usize::from(u16::from_le_bytes(*len)).min(data.len()));
    let linked = link(&[("a", first), ("b", second)]).map_err(|error| error.to_string())?;
    Ok(if is_valid(first) && is_valid(second) { vec![linked] } else { Vec::new() })
}

fn rewritten(kind: u8, wasm: &[u8]) -> Rewritten {
    let reset = PrepareOptions::default();
    match kind {
        b'c' => component(wasm),
        b'l' => linked(wasm),
        b'b' => prepared(wasm, &PrepareOptions { restorable: false, bakeable: true, ..reset }),
        b'a' => {
            let _ = linear_stack(wasm);
            let roots = Roots::Named(vec!["run".to_owned()]);
            analyze(wasm, &roots).map(|_| Vec::new()).map_err(|error| error.to_string())
        }
        _ => prepared(wasm, &reset),
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, wasm)) = data.split_first() else { return };
    let (modules, _) = within(wasm.len() * EACH + ROOM, || rewritten(*kind, wasm));
    let Some(modules) = accepted(modules) else { return };
    if *kind == b'l' || is_valid(wasm) {
        for module in modules {
            let valid = Validator::new_with_features(WasmFeatures::all()).validate_all(&module);
            valid.expect("the result of a rewriting is valid");
        }
    }
});
