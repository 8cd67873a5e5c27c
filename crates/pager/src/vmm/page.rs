//! The state of one page of a VMM.

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Page {
    Missing,
    /// It is being read.
    Filling,
    Present,
    /// The VMM has discarded it: it is zero.
    Removed,
    /// The VMM maps it no more.
    Unmapped,
}
