//! The memory and the saved state of one sandbox, as they count in budgets and bills.
//!
//! Memory is that of the present state at its last measurement, of named checkpoints, and of files
//! that clients download. A fork counts the checkpoints that it shares. A state without a name is
//! in the tree while a sandbox stands on it or can be undone to it, and counts as the present state
//! of that sandbox. May break it: memory that the last call added counts from the next measurement.
//! Memory that background work adds is in no state, and counts from the next call.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use afresh::Session;

use crate::lock::lock;
use crate::sandbox::transfer::downloads::Downloads;

/// Minimum time between two measurements: one takes a moment with many checkpoints.
const MEASURE_INTERVAL: Duration = Duration::from_millis(200);
/// The memory of a sandbox that was never measured.
const UNKNOWN_MEMORY: u64 = 4 << 20;

/// The memory of the present state of a session and of its named checkpoints.
pub(crate) fn memory_of(session: &Session) -> u64 {
    let at = session.at();
    let page = rustix::param::page_size();
    let states = session.tree();
    let bytes = states.iter().map(|state| match (state.id == at, state.name.is_some()) {
        (true, _) => state.stored_pages.saturating_mul(page),
        (false, true) => state.own_bytes,
        (false, false) => 0,
    });
    bytes.fold(0, usize::saturating_add) as u64
}

/// Bytes that a sandbox is charged for.
#[derive(Default)]
pub(crate) struct Charge {
    /// Memory while it is live; 0 while it is saved.
    live: AtomicU64,
    /// Memory when it was last measured.
    measured: AtomicU64,
    stored: AtomicU64,
    last: Mutex<Option<Instant>>,
    /// Versions of files that clients download, also while it is saved.
    pub(crate) downloads: Downloads,
}

impl Charge {
    /// The charge of a saved sandbox.
    pub(crate) fn saved(measured: u64, stored: u64) -> Self {
        Self { measured: measured.into(), stored: stored.into(), ..Self::default() }
    }

    /// Measures a live sandbox, unless that was done a moment ago.
    pub(crate) fn measure(&self, session: &Session) {
        {
            let mut last = lock(&self.last);
            if last.is_some_and(|last| last.elapsed() < MEASURE_INTERVAL) {
                return;
            }
            *last = Some(Instant::now());
        }
        self.measure_now(session);
    }

    /// Measures a live sandbox.
    pub(crate) fn measure_now(&self, session: &Session) {
        self.set(memory_of(session));
    }

    /// Charges a live sandbox with these bytes of memory.
    pub(crate) fn set(&self, bytes: u64) {
        self.measured.store(bytes, Ordering::Relaxed);
        self.live.store(bytes, Ordering::Relaxed);
    }

    /// The memory that a saved sandbox has had says nothing any more.
    pub(crate) fn forget_measured(&self) {
        self.measured.store(0, Ordering::Relaxed);
    }

    /// Charges the memory of a sandbox that is about to be live.
    pub(crate) fn resume(&self) {
        self.live.store(self.expected(), Ordering::Relaxed);
    }

    /// The sandbox is not live any more.
    pub(crate) fn release(&self) {
        self.live.store(0, Ordering::Relaxed);
    }

    /// Sets the bytes of the saved state.
    pub(crate) fn store(&self, bytes: u64) {
        self.stored.store(bytes, Ordering::Relaxed);
    }

    /// Memory while it is live, and of downloads from it.
    pub(crate) fn memory(&self) -> u64 {
        self.live.load(Ordering::Relaxed).saturating_add(self.downloads.bytes())
    }

    /// Memory that it had when it was last live, or 0.
    pub(crate) fn measured(&self) -> u64 {
        self.measured.load(Ordering::Relaxed)
    }

    /// Memory that it is expected to take when it is resumed.
    pub(crate) fn expected(&self) -> u64 {
        match self.measured() {
            0 => UNKNOWN_MEMORY,
            bytes => bytes,
        }
    }

    /// Bytes of the saved state.
    pub(crate) fn stored(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }
}
