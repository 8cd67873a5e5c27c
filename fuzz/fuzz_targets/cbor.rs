//! Any bytes as a guest's answer in CBOR: refused, or a value. It takes memory in proportion to its
//! bytes.
#![no_main]

#[path = "../../crates/interpreter/src/answer.rs"]
mod answer;
#[path = "../../crates/interpreter/src/tag.rs"]
mod tag;
#[path = "../../crates/interpreter/src/value.rs"]
mod value;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use answer::Answer;
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Bytes of memory for a byte of CBOR: an array of one element is one byte and its element, and a
/// list of one has room for four.
const EACH: usize = 1024;
/// Memory for messages.
const ROOM: usize = 64 << 10;

fuzz_target!(|data: &[u8]| {
    let (answer, _) = within(data.len() * EACH + ROOM, || Answer::read(data));
    match accepted(answer) {
        Some(Answer::Value(rendered)) => {
            if let Some(json) = rendered.json {
                assert!(serde_json::from_str::<serde_json::Value>(&json.to_string()).is_ok());
            }
        }
        Some(Answer::Threw(thrown)) => assert!(thrown.traceback().contains(&thrown.message)),
        Some(Answer::Done) | None => {}
    }
});
