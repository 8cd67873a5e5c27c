//! A chunk: 2 MiB of an arena, and what is mapped there.

use afresh_frames::{DirtyFrame, Order};

/// Pages in a chunk.
pub(crate) const CHUNK: usize = Order::HUGE.pages();

/// What is mapped over a chunk.
#[derive(Debug, Default)]
pub(crate) enum Backing {
    /// Nothing: an access faults.
    #[default]
    Nothing,
    /// A frame of the pool.
    Frame(DirtyFrame),
    /// The kernel's anonymous memory, page by page at first touch.
    Kernel,
}

/// A chunk of an arena.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    /// What is mapped there.
    pub(crate) backing: Backing,
    /// The chunk has proved sparse: a 2 MiB frame would be wasted on it.
    pub(crate) sparse: bool,
}

impl Chunk {
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self.backing, Backing::Nothing)
    }
}
