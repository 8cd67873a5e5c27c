//! Why the pool could not be made, or could not return memory.

use afresh_sys::SysError;

/// The pool could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NewPoolError {
    /// The limit is below 2 MiB or above the range of page numbers (8 TiB).
    #[error("a pool of {0} pages is not possible: give it between 512 pages and 2^31")]
    Limit(usize),
    /// The kernel refused the file, the window or the thread.
    #[error("cannot set up the frame pool: {0}")]
    System(#[from] SysError),
    /// The background thread could not be started.
    #[error(
        "cannot start the zeroing thread: {0}; run without background zeroing, or raise ulimit -u"
    )]
    Thread(#[source] std::io::Error),
}

/// Why no frame could be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TakeError {
    /// The pool has lent as much as its limit allows.
    #[error(
        "the frame pool is at its limit: {lent} of {limit} pages lent, {wanted} more wanted; give \
         memory back or raise the limit"
    )]
    Limit {
        /// Pages lent out.
        lent: usize,
        /// Maximum pages that may be lent.
        limit: usize,
        /// Pages asked for.
        wanted: usize,
    },
    /// The host or the control group is short of memory.
    #[error(
        "the host or its control group has {headroom} bytes left and the frame pool wanted \
         {wanted}; free memory, trim the pool or raise the memory limit"
    )]
    Headroom {
        /// Bytes that could still be allocated.
        headroom: u64,
        /// Bytes the pool wanted to allocate.
        wanted: u64,
    },
    /// Free memory is in pieces too small for the request.
    #[error("the frame pool's free memory is in pieces smaller than {wanted} pages")]
    Fragmented {
        /// Requested pages in one piece.
        wanted: usize,
    },
    /// The kernel refused to allocate or map.
    #[error("the kernel refused memory for a frame: {0}")]
    System(#[from] SysError),
}
