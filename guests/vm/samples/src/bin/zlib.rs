//! A real C library: zlib compresses the input, expands it again, compares, and returns the
//! compressed bytes.
#![no_std]
#![no_main]
extern crate alloc;

use alloc::vec;
use alloc::vec::Vec;
use core::ffi::{c_int, c_ulong};

const Z_OK: c_int = 0;

#[link(name = "z", kind = "static")]
unsafe extern "C" {
    fn compress2(
        to: *mut u8,
        len: *mut c_ulong,
        from: *const u8,
        from_len: c_ulong,
        level: c_int,
    ) -> c_int;
    fn uncompress(to: *mut u8, len: *mut c_ulong, from: *const u8, from_len: c_ulong) -> c_int;
    fn compressBound(len: c_ulong) -> c_ulong;
}

fn init() {}

fn call(input: &[u8]) -> Vec<u8> {
    // SAFETY: zlib reads the input and writes at most the lengths it is given.
    unsafe {
        let mut len = compressBound(input.len() as c_ulong);
        let mut packed = vec![0; len as usize];
        let status =
            compress2(packed.as_mut_ptr(), &mut len, input.as_ptr(), input.len() as c_ulong, 6);
        assert_eq!(status, Z_OK, "compress");
        packed.truncate(len as usize);
        let mut back_len = input.len() as c_ulong;
        let mut back = vec![0; input.len().max(1)];
        let status = uncompress(back.as_mut_ptr(), &mut back_len, packed.as_ptr(), len);
        assert_eq!(status, Z_OK, "uncompress");
        assert!(back[..back_len as usize] == *input, "zlib changed the data");
        packed
    }
}

afresh_guest::guest!(init, call);
