//! Counts of an instance.

use std::collections::BTreeMap;

/// Counts of an instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Calls made.
    pub calls: u64,
    /// Processes made: the first, and one for each that was killed.
    pub processes: u64,
    /// Bytes that the last reset copied back.
    pub copied: u64,
    /// Bytes of the image, as mapped.
    pub image: u64,
    /// Bytes of the image that take memory; all processes share them.
    pub resident: u64,
    /// Counts of system calls that returned `ENOSYS`, by number.
    pub unserved: BTreeMap<i64, u64>,
}
