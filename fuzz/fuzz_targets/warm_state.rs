//! Any bytes as the state of a saved Wasm instance, or as those of the modules of a component.
//! Decoding takes no more memory than its limit. A state that does not fit its module is refused,
//! and one that does makes a valid module.
#![no_main]

use std::sync::LazyLock;

use afresh_budget::decode;
use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use afresh_rewrite::{PrepareOptions, PreparedModule, WarmState, bake, prepare};
use libfuzzer_sys::fuzz_target;
use wasmparser::{Validator, WasmFeatures};

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Memory of the decoded value.
const LIMIT: usize = 64 << 10;
/// Memory for messages.
const ROOM: usize = 16 << 10;
/// Bytes of memory for a byte of the state that is baked.
const EACH: usize = 256;
/// Memory to bake the module without a state.
const MODULE_ROOM: usize = 256 << 10;

/// A module with a memory, a table, globals and segments, which a function changes.
const MODULE: &[u8] = b"\0asm\x01\0\0\0\x01\x04\x01`\0\0\x03\x02\x01\0\x04\x05\x01p\x01\x03\x07\x05\x03\x01\0\x01\x06\x0b\x02\x7f\x01A\0\x0b~\0B\x01\x0b\x07\x0f\x03\x03run\0\0\x01g\x03\0\x01m\x02\0\x09\x07\x01\0A\0\x0b\x01\0\x0c\x01\x02\x0a\x12\x01\x10\0A\x01$\0\xfc\x09\x01A\0A\x016\x02\0\x0b\x0b\x0b\x02\0A\x08\x0b\x02hi\x01\x01p";

static PREPARED: LazyLock<PreparedModule> = LazyLock::new(|| {
    let options = PrepareOptions { restorable: false, bakeable: true, ..PrepareOptions::default() };
    prepare(MODULE, &options).expect("it can be baked")
});

fn check(bytes: &[u8], state: &WarmState) {
    if state.opaque().is_some() {
        return;
    }
    let (baked, _) = within(bytes.len() * EACH + MODULE_ROOM, || bake(&PREPARED, state));
    if let Ok(baked) = baked {
        let valid = Validator::new_with_features(WasmFeatures::all()).validate_all(&baked);
        valid.expect("a baked module is valid");
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, bytes)) = data.split_first() else { return };
    LazyLock::force(&PREPARED);
    match kind {
        b'n' => {
            let decoded = || decode::<Vec<Option<WarmState>>>(bytes, LIMIT);
            let (states, _) = within(LIMIT + ROOM, decoded);
            let Some((states, _)) = accepted(states) else { return };
            states.iter().flatten().for_each(|state| check(bytes, state));
        }
        _ => {
            let (state, _) = within(LIMIT + ROOM, || decode::<WarmState>(bytes, LIMIT));
            let Some((state, _)) = accepted(state) else { return };
            check(bytes, &state);
        }
    }
});
