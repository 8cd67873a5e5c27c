//! Any bytes as a guest program: refused, or inside its file and its span. It takes no more memory
//! than its file.
#![no_main]

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use afresh_vm::Program;
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Memory for segments and messages.
const ROOM: usize = 64 << 10;

fuzz_target!(|data: &[u8]| {
    let (parsed, _) = within(data.len() + ROOM, || Program::parse(data));
    let Some(program) = accepted(parsed) else { return };
    assert!(program.entry() < program.span());
    assert!(program.span().is_multiple_of(4096) && program.span() <= 1 << 30);
});
