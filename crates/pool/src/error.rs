//! Errors of pools.

/// Why the pool returned no item.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError<E> {
    /// The pool is at its limit and the caller chose not to wait.
    #[error(
        "all {limit} items of the pool are in use: raise the limit, wait, or allow items on demand"
    )]
    Exhausted {
        /// The limit.
        limit: usize,
    },
    /// The pool stayed at its limit until the caller's timeout.
    #[error("no item of the pool came back within {0:?}")]
    TimedOut(std::time::Duration),
    /// Making a new item failed.
    #[error(transparent)]
    Create(E),
}
