//! Any bytes as a program of a Linux guest: refused, or segments inside the file and apart from
//! each other. It takes no more memory than its file.
#![no_main]

#[allow(dead_code, reason = "the loader uses all of it")]
#[path = "../../crates/linux/src/elf.rs"]
mod elf;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use elf::{Elf, Part};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Maximum bytes of the beginning of a file, as in the loader.
const HEAD: usize = 64 << 10;
/// Memory for segments and messages.
const ROOM: usize = 64 << 10;

fuzz_target!(|data: &[u8]| {
    let parse = || Elf::parse(&data[..data.len().min(HEAD)], data.len() as u64);
    let (parsed, _) = within(data.len() + ROOM, parse);
    let Some(program) = accepted(parsed) else { return };
    let mut end = 0;
    for Part { offset, address, file_len, memory_len, .. } in program.parts {
        assert!(offset + file_len <= data.len() as u64 && memory_len >= file_len);
        assert!(address >= end && memory_len > 0);
        end = address + memory_len;
    }
});
