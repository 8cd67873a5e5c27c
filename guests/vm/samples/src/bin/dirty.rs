//! Writes to its heap on command, for benchmarks and tests. The input is little-endian words: a
//! command, then its arguments.
//!
//! 0: return the rest of the input (echo).
//! 1 first count stride value: write `value` to the first word of `count` pages, `stride` apart.
//! 2 first count stride: the sum of those words.
//! 3 length: return that many bytes.
//! 4 address value: write eight bytes anywhere.
//! 5 address: read one byte from anywhere.
//! 7 number rdi rsi rdx r10 r8: make that hypercall and return its result.
//! 8 rounds: alternate between writing a page and letting the host function `stamp` write one; the
//!   stamps must arrive. Returns how many did.
//! 6: change every register it may (segments, extended state), then return.
//! 9 leaf index: the four registers of CPUID, a word each.
#![no_std]
#![no_main]
extern crate alloc;

use alloc::vec;
use alloc::vec::Vec;
use core::arch::asm;

/// Pages that commands 1 and 2 use: the whole heap but its first part, where the allocator works.
const RESERVED: u64 = 16;

static STAMP: afresh_guest::Import = afresh_guest::Import::new("stamp");

fn init() {}

fn word(input: &[u8], index: usize) -> u64 {
    input
        .get(index * 8..index * 8 + 8)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

fn page(index: u64) -> *mut u64 {
    let boot = afresh_guest::boot();
    let address = boot.heap + (RESERVED + index) * 4096;
    assert!(address + 8 <= boot.heap + boot.heap_len, "page {index} is outside the heap");
    address as *mut u64
}

fn call(input: &[u8]) -> Vec<u8> {
    let argument = |index: usize| word(input, index + 1);
    match word(input, 0) {
        0 => input.get(8..).unwrap_or_default().to_vec(),
        1 => {
            let (first, count, stride, value) =
                (argument(0), argument(1), argument(2), argument(3));
            for index in 0..count {
                // SAFETY: `page` checked the address.
                unsafe { page(first + index * stride).write_volatile(value) };
            }
            count.to_le_bytes().to_vec()
        }
        2 => {
            let (first, count, stride) = (argument(0), argument(1), argument(2));
            let mut sum = 0_u64;
            for index in 0..count {
                // SAFETY: `page` checked the address.
                sum = sum.wrapping_add(unsafe { page(first + index * stride).read_volatile() });
            }
            sum.to_le_bytes().to_vec()
        }
        3 => vec![0xa5; argument(0) as usize],
        4 => {
            // SAFETY: not sound; the host contains it.
            unsafe { (argument(0) as *mut u64).write_unaligned(argument(1)) };
            Vec::new()
        }
        5 => {
            // SAFETY: not sound; the host contains it.
            vec![unsafe { (argument(0) as *const u8).read_volatile() }]
        }
        6 => {
            // SAFETY: this guest uses none of the changed state.
            unsafe {
                asm!(
                    "xor eax, eax", "mov ds, ax", "mov es, ax", "mov gs, ax",
                    "pcmpeqd xmm15, xmm15", "fld1", "fld1",
                    out("eax") _, out("xmm15") _,
                );
            }
            Vec::new()
        }
        7 => {
            let result: u64;
            // SAFETY: for all arguments, the host acts only on memory of this guest.
            unsafe {
                asm!(
                    "out 0xa8, eax",
                    inlateout("rax") argument(0) => result,
                    in("rdi") argument(1), in("rsi") argument(2), in("rdx") argument(3),
                    in("r10") argument(4), in("r8") argument(5),
                );
            }
            result.to_le_bytes().to_vec()
        }
        8 => {
            let mut arrived = 0_u64;
            for round in 0..argument(0) {
                // SAFETY: `page` checked the addresses; nothing else uses these pages.
                let bytes = unsafe {
                    page(2 * round).write_volatile(round);
                    core::slice::from_raw_parts_mut(page(2 * round + 1).cast::<u8>(), 4096)
                };
                let arguments = round.to_le_bytes();
                let number = STAMP.number().unwrap_or(u64::MAX);
                if afresh_guest::call_host(number, &arguments, bytes) == Ok(8)
                    && bytes[..8] == arguments
                {
                    arrived += 1;
                }
            }
            arrived.to_le_bytes().to_vec()
        }
        9 => {
            let found = core::arch::x86_64::__cpuid_count(argument(0) as u32, argument(1) as u32);
            [found.eax, found.ebx, found.ecx, found.edx]
                .iter()
                .flat_map(|register| u64::from(*register).to_le_bytes())
                .collect()
        }
        other => panic!("unknown command {other}"),
    }
}

afresh_guest::guest!(init, call);
