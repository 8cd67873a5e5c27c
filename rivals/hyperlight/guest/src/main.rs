//! The Hyperlight side of the comparison: returns at once, or writes a number of pages first.
#![no_std]
#![no_main]
extern crate alloc;

use alloc::vec;

use hyperlight_guest_bin::guest_function;

/// Writes one byte in each of `pages` pages of fresh heap; returns how many.
#[guest_function("Dirty")]
fn dirty(pages: i32) -> i32 {
    let mut memory = vec![0_u8; pages.max(0) as usize * 4096 + 1];
    for page in memory.chunks_mut(4096) {
        // SAFETY: a reference to a byte of the vector.
        unsafe { (&raw mut page[0]).write_volatile(1) };
    }
    pages
}
