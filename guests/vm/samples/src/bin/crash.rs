//! Misbehaves as selected by the first byte of the input. After each of these the host must find
//! the guest pristine again.
#![no_std]
#![no_main]
extern crate alloc;

use alloc::vec::Vec;
use core::arch::asm;

static mut COUNTER: u64 = 0;

fn init() {}

#[inline(never)]
fn recurse(depth: u64) -> u64 {
    let big = [depth; 64];
    core::hint::black_box(&big);
    if depth == u64::MAX { 0 } else { recurse(depth + 1) + core::hint::black_box(big[3]) }
}

fn call(input: &[u8]) -> Vec<u8> {
    // SAFETY: none of this is sound; that is its purpose. The host has to contain it.
    unsafe {
        COUNTER += 1;
        let code = _start as *const () as *mut u8;
        match input.first().copied().unwrap_or(0) {
            b'n' => (16 as *mut u64).write_volatile(1),
            b'u' => asm!("ud2"),
            b'd' => {
                asm!("xor edx, edx", "xor ecx, ecx", "div ecx", out("eax") _, out("edx") _, out("ecx") _)
            }
            b'p' => asm!("hlt"),
            b'o' => asm!("out 0x80, al", in("al") 0_u8),
            b'r' => code.write_volatile(0x90),
            b'x' => {
                let data = [0xc3_u8; 16];
                let entry: extern "C" fn() = core::mem::transmute(data.as_ptr());
                entry();
            }
            b's' => {
                core::hint::black_box(recurse(0));
            }
            b'w' => (0x7000_0000_0000 as *mut u8).write_volatile(1),
            b'c' => asm!("int3"),
            b'k' => asm!("syscall", out("rcx") _, out("r11") _),
            b'm' => panic!("as asked: {}", input.len()),
            b'h' => asm!("out 0xa8, eax", in("eax") 12345_u32),
            b'b' => {
                asm!("out 0xa8, eax", in("eax") 2_u32, in("rdi") 0, in("rsi") u64::MAX - 5, in("rdx") 100_u64)
            }
            b'R' => asm!("out 0xa8, eax", in("eax") 1_u32, in("rdi") 0, in("rsi") 1_u64),
            b'f' => afresh_guest::finish(7, b"because"),
            _ => {}
        }
        COUNTER.to_le_bytes().to_vec()
    }
}

afresh_guest::guest!(init, call);
