//! A copy between the memories of two processes.

/// A copy between the current process and another, or within the current one.
#[derive(Debug)]
pub(crate) struct PeerCopy {
    /// The other process.
    pub(crate) peer: u32,
    /// Whether the other process's memory is written.
    pub(crate) writes: bool,
    /// Addresses and lengths of the bytes, and of their places.
    pub(crate) from: Vec<(u64, u64)>,
    pub(crate) to: Vec<(u64, u64)>,
}
