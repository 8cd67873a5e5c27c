//! Nothing forks in the interpreter.

/// Always the same.
#[must_use]
pub fn generation() -> u32 {
    0
}
