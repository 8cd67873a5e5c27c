//! Numbers that distinguish pristine states.

use std::sync::atomic::{AtomicU64, Ordering};

use afresh_sys::PerProcess;

/// A number that no other pristine state was given: in this process for certain, elsewhere but for
/// a chance of one in 2^62. A guest may keep it in a snapshot, and two processes may thaw that.
pub(crate) fn next_generation() -> u64 {
    // A child of a fork begins elsewhere.
    static NEXT: PerProcess<AtomicU64> =
        PerProcess::new(|| AtomicU64::new((afresh_sys::host::random_word() >> 2).max(1)));
    NEXT.get().fetch_add(1, Ordering::Relaxed)
}
