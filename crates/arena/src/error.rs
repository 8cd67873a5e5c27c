//! Why an arena could not be made, grown, shrunk or reset.

use afresh_frames::TakeError;
use afresh_sys::SysError;

/// An operation on an arena failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The arena cannot become so large.
    #[error("an arena of {max} pages cannot hold {wanted}; make it with a larger maximum")]
    Full {
        /// Pages wanted in all.
        wanted: usize,
        /// Maximum pages it may have.
        max: usize,
    },
    /// The pool has no memory for it.
    #[error(transparent)]
    Memory(#[from] TakeError),
    /// Memory of an earlier use could not be taken away, so it may be accessible still.
    #[error("the arena could not be cleared and may hold old content: drop it and make another")]
    Unclean,
    /// The arena was made by the parent of this process.
    #[error("the arena was made before a fork: a child does not have its memory; make another")]
    Forked,
    /// The kernel refused a mapping.
    #[error("cannot map an arena: {0}")]
    System(#[from] SysError),
}
