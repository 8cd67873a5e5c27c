//! Counts of idle items that are out of their pool to be trimmed.
//!
//! Promises: a thread that finds no idle item learns whether one may have been out while it looked.
//! In a child of a fork the trims of its parent, whose threads do not run there, count for nothing.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use afresh_sys::fork;

use crate::gate::Gate;

/// The trims of a pool.
pub(crate) struct Trims {
    /// The generation of the process that trims, and in the lower half the number of items that may
    /// be out.
    ongoing: AtomicU64,
    /// Trims that have ended, before they are counted off `ongoing`.
    ended: AtomicUsize,
}

impl Trims {
    pub(crate) fn new() -> Self {
        Self { ongoing: AtomicU64::new(0), ended: AtomicUsize::new(0) }
    }

    /// Read before a look for an idle item, for [`Trims::may_have_hidden`].
    pub(crate) fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }

    /// Whether an item may be out now.
    pub(crate) fn are_ongoing(&self) -> bool {
        let ongoing = self.ongoing.load(Ordering::SeqCst);
        ongoing >> 32 == u64::from(fork::generation()) && ongoing as u32 > 0
    }

    /// Whether an item may have been out at any time since `ended` was read.
    pub(crate) fn may_have_hidden(&self, ended: usize) -> bool {
        // In this order: one that ends in between has changed the second number.
        self.are_ongoing() || self.ended() != ended
    }

    /// Counts an item that is about to be taken out.
    pub(crate) fn begin<'a>(&'a self, gate: &'a Gate) -> OngoingTrim<'a> {
        let generation = u64::from(fork::generation());
        let begun = |ongoing: u64| match ongoing >> 32 == generation {
            true => Some(ongoing + 1),
            false => Some((generation << 32) + 1),
        };
        let _ = self.ongoing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, begun);
        OngoingTrim { trims: self, gate }
    }
}

/// An item may be out to be trimmed until this value is dropped.
pub(crate) struct OngoingTrim<'a> {
    trims: &'a Trims,
    gate: &'a Gate,
}

impl Drop for OngoingTrim<'_> {
    fn drop(&mut self) {
        self.trims.ended.fetch_add(1, Ordering::SeqCst);
        self.trims.ongoing.fetch_sub(1, Ordering::SeqCst);
        // A thread that looked for the item in the meantime waits.
        self.gate.signal();
    }
}
