//! What the targets share: a way to be sure that they reach what they are for.

use std::fmt::Debug;
use std::sync::LazyLock;

/// Whether the inputs are the seeds, which nothing refuses.
static SEEDS: LazyLock<bool> = LazyLock::new(|| std::env::var_os("AFRESH_FUZZ_SEEDS").is_some());

/// What a parser made of the input, if it accepted it.
///
/// # Panics
/// When the inputs are the seeds and this one was refused: then the fuzzer would stop at the door.
pub fn accepted<T, E: Debug>(result: Result<T, E>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) if *SEEDS => panic!("a seed was refused: {error:?}"),
        Err(_) => None,
    }
}
