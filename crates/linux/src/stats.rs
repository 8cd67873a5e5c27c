//! Counts of an instance.

use std::collections::BTreeMap;

/// Counts of an instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Calls made.
    pub calls: u64,
    /// Processes made: one, and one more for each that was killed.
    pub processes: u64,
    /// Bytes that the last reset copied back.
    pub copied: u64,
    /// Bytes of the image, as mapped.
    pub image: u64,
    /// Bytes of the image that take memory; all processes share them.
    pub resident: u64,
    /// System calls that were answered with `ENOSYS`: how often, by number.
    pub unserved: BTreeMap<i64, u64>,
}
