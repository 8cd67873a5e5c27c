//! Shared by the targets: a check that they reach the code they are for.

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
