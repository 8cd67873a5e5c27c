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
        /// Most pages it may have.
        max: usize,
    },
    /// The pool has no memory for it.
    #[error(transparent)]
    Memory(#[from] TakeError),
    /// The kernel refused a mapping.
    #[error("cannot map an arena: {0}")]
    System(#[from] SysError),
}
