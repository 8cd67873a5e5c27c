//! Nothing forks in the interpreter.

/// Always the same.
#[must_use]
pub fn generation() -> u32 {
    0
}

/// Always the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark;

impl Mark {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        Self
    }

    /// Always.
    #[must_use]
    pub fn is_alone(self) -> bool {
        true
    }
}

/// Does `work`.
pub fn to_execute<T>(work: impl FnOnce() -> T) -> T {
    work()
}
