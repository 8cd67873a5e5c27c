//! SHA-256 of the input.
#![no_std]
#![no_main]
extern crate alloc;

use alloc::vec::Vec;
use sha2::{Digest, Sha256};

fn init() {}

fn call(input: &[u8]) -> Vec<u8> {
    Sha256::digest(input).to_vec()
}

afresh_guest::guest!(init, call);
