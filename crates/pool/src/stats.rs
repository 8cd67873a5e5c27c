//! What a pool tells of itself: counts, which promise nothing but to have been true a moment ago.

/// What a pool has done so far, summed over its shards; a snapshot that may be a moment old.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Items alive, idle and in use.
    pub alive: usize,
    /// Items idle.
    pub idle: usize,
    /// Items made.
    pub created: u64,
    /// Items in use.
    pub in_use: usize,
    /// Hand-outs that came back and were made pristine.
    pub returned: u64,
    /// Items dropped because recycling failed.
    pub quarantined: u64,
    /// Items dropped because their user panicked.
    pub abandoned: u64,
    /// Items handed out beyond the limit.
    pub on_demand: u64,
    /// Times an item was trimmed to stay within the memory budget.
    pub trimmed: u64,
    /// Bytes of private memory that idle items keep.
    pub resident_bytes: usize,
}
