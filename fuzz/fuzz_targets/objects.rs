//! Any bytes as a guest's value in CBOR: refused, or objects that were charged before they were
//! made.
#![no_main]

#[path = "../../crates/interpreter/src/objects/mod.rs"]
mod objects;
#[path = "../../crates/interpreter/src/tag.rs"]
mod tag;

use afresh_budget::Budget;
use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use libfuzzer_sys::fuzz_target;
use minicbor::Decoder;
use objects::ObjectReader;
use objects::testing::TreeBuilder;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// The budget of objects: small inputs exceed it.
const LIMIT: usize = 64 << 10;
/// Memory for messages.
const ROOM: usize = 4 << 10;
/// Bytes charged for a byte of CBOR, at most: a number in a set that is a key takes 2,700, an empty
/// set in one 1,900.
const EACH: usize = 4096;

fuzz_target!(|data: &[u8]| {
    let charge = Budget::new("value", LIMIT).empty();
    let mut reader = ObjectReader::new(Decoder::new(data), TreeBuilder::default(), charge);
    let (value, _) = within(LIMIT + ROOM, || reader.read());
    assert!(reader.charged() <= EACH * (data.len() + 1));
    assert!(reader.position() <= data.len());
    if let Some(value) = accepted(value) {
        assert!(!value.to_string().is_empty() || data.len() <= 2);
    }
});
