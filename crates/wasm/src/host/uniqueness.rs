//! Numbers and random bits that no two clones share, in this process or any other.
//!
//! May break it: a fork that [`afresh_sys::fork`] does not see.

use std::sync::atomic::{AtomicU64, Ordering};

use afresh_sys::host::random_word;
use afresh_sys::{PerProcess, fork};

/// 128 random bits, from the source that seeds a clone that exports `afresh_reseed`: for the
/// embedder's host functions and requests that give a guest its entropy.
#[must_use]
pub fn entropy_bytes() -> [u8; 16] {
    let (lo, hi) = entropy();
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&lo.to_le_bytes());
    bytes[8..].copy_from_slice(&hi.to_le_bytes());
    bytes
}

/// 128 bits that no other call in this or any other process gets: a keyed hash of a counter, under
/// a key of the operating system's.
pub(crate) fn entropy() -> (i64, i64) {
    // A child of a fork must not continue with its parent's key and count: it would draw the same.
    static SOURCE: PerProcess<([u8; 32], AtomicU64)> = PerProcess::new(|| {
        let mut key = [0u8; 32];
        for part in key.chunks_mut(8) {
            part.copy_from_slice(&random_word().to_le_bytes());
        }
        (key, AtomicU64::new(0))
    });
    let (key, counter) = SOURCE.get();
    let count = counter.fetch_add(1, Ordering::Relaxed);
    let hash = blake3::keyed_hash(key, &count.to_le_bytes());
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&hash.as_bytes()[at..at + 8]);
        i64::from_le_bytes(bytes)
    };
    (word(0), word(8))
}

/// Numbers for clones, without a counter that all threads share: unique in this process for
/// certain, elsewhere but for a tiny chance. A guest may keep its number in a snapshot that two
/// processes thaw.
pub(crate) fn next_generation() -> u64 {
    const BLOCK: u64 = 1 << 16;
    // A child of a fork begins elsewhere, also in the thread that forked.
    static NEXT: PerProcess<AtomicU64> =
        PerProcess::new(|| AtomicU64::new((random_word() >> 2) & !(BLOCK - 1)));
    thread_local!(static MINE: std::cell::Cell<(u32, u64)> = const { std::cell::Cell::new((0, 0)) });
    let process = fork::generation();
    let (of, mut next) = MINE.get();
    if of != process || next.is_multiple_of(BLOCK) {
        next = NEXT.get().fetch_add(BLOCK, Ordering::Relaxed);
    }
    MINE.set((process, next + 1));
    next + 1
}
