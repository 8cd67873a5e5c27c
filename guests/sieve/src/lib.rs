//! A small plain module for `wasm32-unknown-unknown`: no WASI, no imports at all.
//!
//! `warm(n)` sieves the primes below `n` and sets an arena of 16 MiB aside. The other exports read
//! that state, change it by a chosen amount, or fail in a chosen way. Together their signatures use
//! all four number types. Before `warm`, reading finds no primes and an empty arena.

use std::cell::{Cell, RefCell};
use std::hint::black_box;

/// Bytes that `dirty`, `dirty_bytes` and `read` work on.
const ARENA: usize = 16 << 20;
const PAGE: usize = 4096;

thread_local! {
    /// `composite[i]` means that `i` is not prime.
    static COMPOSITE: RefCell<Vec<bool>> = const { RefCell::new(Vec::new()) };
    static ARENA_BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static SECRET: Cell<i64> = const { Cell::new(0) };
    static CALLS: Cell<i32> = const { Cell::new(0) };
}

/// Builds the state: the primes below `n` (nothing when `n` is negative) and a zeroed arena.
#[unsafe(no_mangle)]
pub extern "C" fn warm(n: i32) {
    let n = usize::try_from(n).unwrap_or(0);
    let mut composite = vec![false; n];
    for known in composite.iter_mut().take(2) {
        *known = true;
    }
    let mut i = 2;
    while i * i < n {
        if !composite[i] {
            for multiple in (i * i..n).step_by(i) {
                composite[multiple] = true;
            }
        }
        i += 1;
    }
    COMPOSITE.set(composite);
    ARENA_BYTES.set(vec![0; ARENA]);
}

/// Does nothing: the cost of a call alone.
#[unsafe(no_mangle)]
pub extern "C" fn empty() {}

/// The number of primes below `n`, as far as the warm-up sieved.
#[unsafe(no_mangle)]
pub extern "C" fn primes(n: i32) -> i32 {
    let n = usize::try_from(n).unwrap_or(0);
    COMPOSITE.with_borrow(|composite| {
        composite.iter().take(n).filter(|composite| !**composite).count() as i32
    })
}

/// `a + b`, wrapping.
#[unsafe(no_mangle)]
pub extern "C" fn sum(a: i32, b: i32) -> i32 {
    a.wrapping_add(b)
}

/// `a * b`, wrapping.
#[unsafe(no_mangle)]
pub extern "C" fn product(a: i64, b: i64) -> i64 {
    a.wrapping_mul(b)
}

/// `a * x + b`, with a single-precision `x`.
#[unsafe(no_mangle)]
pub extern "C" fn line(a: f64, x: f32, b: f64) -> f64 {
    a * f64::from(x) + b
}

/// Adds one and returns it: 1 on every call that starts from the warm state.
#[unsafe(no_mangle)]
pub extern "C" fn count() -> i32 {
    CALLS.set(CALLS.get().wrapping_add(1));
    CALLS.get()
}

/// Changes one byte in each of `pages` pages, spread over the arena; returns the number of changed
/// pages, which is smaller when the arena has fewer.
#[unsafe(no_mangle)]
pub extern "C" fn dirty(pages: i32) -> i32 {
    ARENA_BYTES.with_borrow_mut(|arena| {
        let have = arena.len() / PAGE;
        let pages = usize::try_from(pages).unwrap_or(0).min(have);
        let stride = have.checked_div(pages).unwrap_or(0);
        for page in 0..pages {
            let at = page * stride * PAGE + page % PAGE;
            arena[at] = arena[at].wrapping_add(1);
        }
        pages as i32
    })
}

/// Overwrites the first `bytes` bytes of the arena with `value`; returns how many it overwrote.
#[unsafe(no_mangle)]
pub extern "C" fn dirty_bytes(bytes: i32, value: i32) -> i32 {
    ARENA_BYTES.with_borrow_mut(|arena| {
        let bytes = usize::try_from(bytes).unwrap_or(0).min(arena.len());
        black_box(&mut arena[..bytes]).fill(value as u8);
        bytes as i32
    })
}

/// The sum of all bytes of the arena: 0 in the warm state.
#[unsafe(no_mangle)]
pub extern "C" fn arena_sum() -> i64 {
    ARENA_BYTES.with_borrow(|arena| arena.iter().map(|byte| i64::from(*byte)).sum())
}

/// Keeps a secret.
#[unsafe(no_mangle)]
pub extern "C" fn secret_write(secret: i64) {
    SECRET.set(secret);
}

/// The secret: 0 in the warm state.
#[unsafe(no_mangle)]
pub extern "C" fn secret_read() -> i64 {
    SECRET.get()
}

/// Grows the linear memory by `pages` Wasm pages of 64 KiB and writes to the last of them; returns
/// the former size in pages, or -1 when it cannot grow.
#[unsafe(no_mangle)]
pub extern "C" fn grow(pages: i32) -> i32 {
    let Ok(delta) = usize::try_from(pages) else { return -1 };
    let before = core::arch::wasm32::memory_grow::<0>(delta);
    if before == usize::MAX {
        return -1;
    }
    if delta > 0 {
        let last = ((before + delta) << 16) - 8;
        // SAFETY: `memory_grow` succeeded, so these eight bytes at the end of memory exist; they
        // are aligned, and new, so nothing else refers to them.
        unsafe { core::ptr::with_exposed_provenance_mut::<u64>(last).write_volatile(u64::MAX) };
    }
    before as i32
}

/// The size of the linear memory in Wasm pages of 64 KiB.
#[unsafe(no_mangle)]
pub extern "C" fn size() -> i32 {
    core::arch::wasm32::memory_size::<0>() as i32
}

/// Writes a secret and a page of the arena, then traps.
#[unsafe(no_mangle)]
pub extern "C" fn trap() {
    SECRET.set(-1);
    dirty(1);
    core::arch::wasm32::unreachable()
}

/// Calls itself `depth` times, each with a new frame, and returns the depth it reached; overflows
/// the stack, and traps, when that is too deep.
#[unsafe(no_mangle)]
pub extern "C" fn recurse(depth: i32) -> i32 {
    let frame = black_box([depth; 16]);
    if depth <= 0 { 0 } else { recurse(black_box(frame[15] - 1)) + 1 }
}

/// Never returns.
#[unsafe(no_mangle)]
pub extern "C" fn spin() {
    loop {
        CALLS.set(black_box(CALLS.get().wrapping_add(1)));
    }
}
