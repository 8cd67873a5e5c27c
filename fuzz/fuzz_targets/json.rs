//! Any bytes as a JSON document of a store: refused, or parsed. It takes no more memory than it was
//! charged.
#![no_main]

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use afresh_store::fuzzing::{JsonDocument, json_weight, parse_json};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Memory for messages.
const ROOM: usize = 64 << 10;

fuzz_target!(|data: &[u8]| {
    let Some((kind, text)) = data.split_first() else { return };
    let document = match kind {
        b'i' => JsonDocument::Index,
        b'm' => JsonDocument::Manifest,
        _ => JsonDocument::Config,
    };
    let (parsed, _) = within(json_weight(text) + ROOM, || parse_json(document, text));
    let _ = accepted(parsed);
});
