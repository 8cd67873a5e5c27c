//! A new process, as a call requests it.

/// The request for a new process, which the guest's owner carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ForkRequest {
    pub(crate) id: u32,
    /// Whether its memory is a copy; otherwise it is its parent's.
    pub(crate) copies: bool,
    /// Whether its parent waits until it runs another program.
    pub(crate) waits: bool,
    /// Where its number goes in its memory.
    pub(crate) child_tid_at: Option<u64>,
    /// Its parent's descriptor of it, if it has asked for one.
    pub(crate) descriptor: Option<u64>,
}
