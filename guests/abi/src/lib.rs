//! The byte-handling interface, seen from the guest.
//!
//! A guest is a `wasm32-wasip1` reactor. It exports
//!
//! | export | meaning |
//! |---|---|
//! | `memory` | its only linear memory |
//! | `_initialize` | the WASI reactor initialiser: once, before anything else |
//! | `warm()` | builds the state that every later call starts from |
//! | `afresh_buffer(len: i32) -> i32` | address of an input buffer of at least `len` bytes, 0 when there is no memory for it |
//! | `handle(len: i32) -> i64` | reads `len` bytes from the buffer, returns `address << 32 \| length` of the answer |
//! | `afresh_reseed(lo: i64, hi: i64)` | optional: takes 128 bits of new entropy after every restore |
//!
//! The answer stays valid until the next call into the guest. A guest that fails inside its own
//! language answers with its own error; one that cannot continue traps.
//!
//! This crate provides `_initialize` and `afresh_buffer`, keeps the answer alive, and holds the
//! random generator behind `afresh_reseed`. All state is thread-local, which in these single
//! threaded guests means one of each.

use std::cell::RefCell;

mod random;

pub use random::Random;

/// A size for [`reserve`] that most requests and answers fit in.
pub const BUFFER: usize = 16 << 10;

thread_local! {
    static INPUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static OUTPUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

#[cfg(target_arch = "wasm32")]
unsafe extern "C" {
    /// Made by the linker: runs the constructors of the C parts.
    fn __wasm_call_ctors();
}

/// The WASI reactor initialiser. Calling the constructors here also keeps the linker from wrapping
/// every export in a call to them.
#[cfg(target_arch = "wasm32")]
#[unsafe(no_mangle)]
pub extern "C" fn _initialize() {
    // SAFETY: the linker defines this function with this signature; the host calls `_initialize`
    // once, before any other export, so the constructors run once and first.
    unsafe { __wasm_call_ctors() }
}

/// Address of a buffer of at least `len` bytes for the next request; 0 when `len` is negative or
/// there is no memory for it. The buffer is kept and reused, so its address stays the same until a
/// larger request needs a larger one.
#[unsafe(no_mangle)]
pub extern "C" fn afresh_buffer(len: i32) -> i32 {
    let Ok(len) = usize::try_from(len) else { return 0 };
    INPUT.with_borrow_mut(|input| {
        if len > input.len() {
            let more = len - input.len();
            if input.try_reserve(more).is_err() {
                return 0;
            }
            input.resize(len, 0);
        }
        input.as_mut_ptr() as usize as i32
    })
}

/// Sets both buffers aside at `bytes` bytes each, so that requests and answers up to that size
/// allocate nothing. For the end of a warm-up; does nothing when there is no memory for it.
pub fn reserve(bytes: usize) {
    if let Ok(len) = i32::try_from(bytes) {
        afresh_buffer(len);
    }
    // Failing here costs the answer its head start, no more.
    OUTPUT.with_borrow_mut(|output| output.try_reserve(bytes).unwrap_or_default());
}

/// Passes the first `len` bytes of the input buffer to `answer` and returns the packed address and
/// length of the output: the body of `handle` in a guest.
///
/// A `len` that is negative or larger than the buffer is cut to the buffer.
pub fn respond(len: i32, answer: impl FnOnce(&[u8], &mut Vec<u8>)) -> i64 {
    INPUT.with_borrow(|input| {
        let len = usize::try_from(len).unwrap_or(0).min(input.len());
        OUTPUT.with_borrow_mut(|output| {
            output.clear();
            answer(&input[..len], output);
            ((output.as_ptr() as usize as i64) << 32) | output.len() as i64
        })
    })
}

/// Ends the guest with a trap, after saying why on standard error.
pub fn fail(why: &str) -> ! {
    eprintln!("guest failed: {why}");
    std::process::abort()
}

/// Writes `{"error": message}`, by hand because the guest's own JSON writer may have failed.
pub fn write_error(message: &str, answer: &mut Vec<u8>) {
    answer.extend_from_slice(b"{\"error\":\"");
    for character in message.chars() {
        match character {
            '"' => answer.extend_from_slice(b"\\\""),
            '\\' => answer.extend_from_slice(b"\\\\"),
            control if control < ' ' => {
                answer.extend_from_slice(format!("\\u{:04x}", u32::from(control)).as_bytes());
            }
            other => answer.extend_from_slice(other.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    answer.extend_from_slice(b"\"}");
}
