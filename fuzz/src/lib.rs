//! Shared by the targets: a check that they reach the code they are for, and tars out of blocks.

pub mod layers;

use std::fmt::Debug;
use std::sync::LazyLock;

/// Whether the inputs are the seeds, which nothing refuses.
static SEEDS: LazyLock<bool> = LazyLock::new(|| std::env::var_os("AFRESH_FUZZ_SEEDS").is_some());

/// The parser's result, if it accepted the input.
///
/// # Panics
/// When the inputs are the seeds and this one was refused: then the fuzzer would never get past the
/// first check.
pub fn accepted<T, E: Debug>(result: Result<T, E>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) if *SEEDS => panic!("a seed was refused: {error:?}"),
        Err(_) => None,
    }
}

/// Bytes of a block of a tar.
pub const BLOCK: usize = 512;
/// Longest file that [`expand`] makes.
const MAX_FILE: usize = 256 << 10;

/// A file out of blocks. A byte 0xfe where a block begins stands, with the next byte, for as many
/// blocks of zeros.
#[must_use]
pub fn expand(mut data: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    while !data.is_empty() && file.len() < MAX_FILE {
        if let [0xfe, blocks, rest @ ..] = data {
            file.resize(file.len() + usize::from(*blocks) * BLOCK, 0);
            data = rest;
        } else {
            let (block, rest) = data.split_at(data.len().min(BLOCK));
            file.extend_from_slice(block);
            data = rest;
        }
    }
    file
}

/// Makes the checksums of a tar's headers right.
pub fn sum_headers(file: &mut [u8]) {
    for block in file.chunks_exact_mut(BLOCK) {
        if block[257..262] == *b"ustar" {
            block[148..156].fill(b' ');
            let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
}
