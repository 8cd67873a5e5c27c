//! Limits of a pool, all optional.

use std::time::Duration;

/// The response to a request when the pool is at its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitPolicy {
    /// Wait for an item to come back, at most this long.
    Wait(Duration),
    /// An error at once.
    Error,
    /// An item beyond the limit, dropped when it comes back.
    OnDemand,
}

/// Bounds of a pool. The default has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum items alive at once, idle and in use.
    pub items: usize,
    /// Maximum bytes of private memory that idle items keep together. Above it, items coming back
    /// are trimmed.
    pub resident_bytes: usize,
    /// The response at `items`.
    pub exhausted: LimitPolicy,
}

impl Default for Limits {
    fn default() -> Self {
        Self { items: usize::MAX, resident_bytes: usize::MAX, exhausted: LimitPolicy::Error }
    }
}
