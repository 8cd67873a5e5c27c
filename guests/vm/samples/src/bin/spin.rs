//! Never returns, unless the input is empty.
#![no_std]
#![no_main]
extern crate alloc;

use alloc::vec::Vec;

fn init() {}

fn call(input: &[u8]) -> Vec<u8> {
    while !input.is_empty() {
        core::hint::spin_loop();
    }
    b"did not spin".to_vec()
}

afresh_guest::guest!(init, call);
