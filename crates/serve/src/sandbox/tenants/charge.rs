//! The memory and the saved state of one sandbox, as they count in budgets and bills.
//!
//! Memory is that of the present state with its files, of named checkpoints with the files that the
//! checkpoint before does not share, and of files that clients download.
//! It is measured after each turn of a sandbox: calls, connections and slices of background work. A
//! fork counts the checkpoints that it shares. A state without a name is in the tree while a
//! sandbox stands on it or can be undone to it, and counts as the present state of that sandbox.
//! May break it: a measurement that took long is not repeated at once. Memory that a Wasm guest or
//! a micro-VM writes in a call counts from its next call.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use afresh::{Session, SnapshotId};

use crate::lock::lock;
use crate::sandbox::lifecycle::undo_point::Operation;
use crate::sandbox::tenants::stored_blobs::StoredState;
use crate::sandbox::transfer::downloads::Downloads;

/// Minimum time between two measurements, as a multiple of the time of the first: one takes a
/// moment with many checkpoints or processes.
const MEASURE_FACTOR: u32 = 20;
/// Memory that a sandbox may add between two looks at the budgets.
const MIN_GROWTH: u64 = 4 << 20;
/// The memory of a sandbox that was never measured.
const UNKNOWN_MEMORY: u64 = 4 << 20;

/// The memory of the present state of a session, with its files and what was written since, and of
/// the pages of its named checkpoints.
pub(crate) fn memory_of(session: &Session) -> u64 {
    let at = session.at();
    let page = rustix::param::page_size();
    let states = session.tree();
    let bytes = states.iter().map(|state| match (state.id == at, state.name.is_some()) {
        (true, _) => state.stored_pages.saturating_mul(page),
        (false, true) => state.own_bytes,
        (false, false) => 0,
    });
    let frozen = bytes.fold(0, usize::saturating_add) as u64;
    frozen.saturating_add(session.written_memory()).saturating_add(session.file_memory())
}

/// Bytes that a sandbox is charged for.
#[derive(Default)]
pub(crate) struct Charge {
    /// Memory while it is live; 0 while it is saved.
    live: AtomicU64,
    /// Memory when it was last measured.
    measured: AtomicU64,
    /// Memory that calls have left, or that was within the budgets.
    admitted: AtomicU64,
    stored: Mutex<StoredState>,
    /// Whether a call has ended that was not measured.
    has_unmeasured_call: AtomicBool,
    /// When it may be measured again.
    next: Mutex<Option<Instant>>,
    /// Bytes for files that checkpoints have, and those before them do not.
    checkpoint_files: Mutex<HashMap<(SnapshotId, SnapshotId), u64>>,
    /// Versions of files that clients download, also while it is saved.
    pub(crate) downloads: Downloads,
}

impl Charge {
    /// The charge of a saved sandbox.
    pub(crate) fn saved(measured: u64, stored: u64) -> Self {
        let stored = Mutex::new(StoredState::of_size(stored));
        Self { measured: measured.into(), stored, ..Self::default() }
    }

    /// Measures a live sandbox after a turn, unless that was done a moment ago.
    pub(crate) fn measure(&self, session: &Session, turn: Operation) {
        let mut next = lock(&self.next);
        let begun = Instant::now();
        let is_call = matches!(turn, Operation::Call);
        if next.is_some_and(|next| begun < next) {
            self.has_unmeasured_call.fetch_or(is_call, Ordering::Relaxed);
            return;
        }
        let bytes = memory_of(session).saturating_add(self.checkpoint_files(session));
        let cost = begun.elapsed();
        *next = begun.checked_add(cost.saturating_mul(MEASURE_FACTOR));
        drop(next);
        match self.has_unmeasured_call.swap(false, Ordering::Relaxed) || is_call {
            true => self.set(bytes),
            false => self.note(bytes),
        }
    }

    /// Memory for files that the named checkpoints of a session have, and those before them do not.
    fn checkpoint_files(&self, session: &Session) -> u64 {
        let (at, states) = (session.at(), session.checkpoints());
        let mut known = lock(&self.checkpoint_files);
        let mut present = HashMap::new();
        let mut sum: u64 = 0;
        for state in states.iter().filter(|state| state.name.is_some()) {
            let Some(parent) = state.parent else { continue };
            let ends = (parent, state.id);
            let compare = || session.unshared_files(state.id, Some(parent.into())).unwrap_or(0);
            let mut bytes = known.remove(&ends).unwrap_or_else(compare);
            present.insert(ends, bytes);
            if state.id == at {
                // The present files, which count, share some of these.
                bytes = bytes.min(session.unshared_files(at, None).unwrap_or(0));
            }
            sum = sum.saturating_add(bytes);
        }
        *known = present;
        sum
    }

    /// Charges a live sandbox with these bytes of memory.
    pub(crate) fn set(&self, bytes: u64) {
        self.note(bytes);
        self.admit_growth();
    }

    /// The same, for memory that no budget was asked for.
    fn note(&self, bytes: u64) {
        self.measured.store(bytes, Ordering::Relaxed);
        self.live.store(bytes, Ordering::Relaxed);
    }

    /// Whether it has added memory since the last call or look at the budgets, enough for another.
    pub(crate) fn has_grown(&self) -> bool {
        let admitted = self.admitted.load(Ordering::Relaxed);
        self.live.load(Ordering::Relaxed).saturating_sub(admitted) >= MIN_GROWTH
    }

    /// The budgets have room for its present memory.
    pub(crate) fn admit_growth(&self) {
        self.admitted.store(self.live.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The memory that a saved sandbox has had says nothing any more.
    pub(crate) fn forget_measured(&self) {
        self.measured.store(0, Ordering::Relaxed);
    }

    /// Charges the memory of a sandbox that is about to be live.
    pub(crate) fn resume(&self) {
        self.live.store(self.expected(), Ordering::Relaxed);
        self.admit_growth();
    }

    /// The sandbox is not live any more.
    pub(crate) fn release(&self) {
        self.live.store(0, Ordering::Relaxed);
    }

    /// Sets the charge of the saved state, in place of the one before.
    pub(crate) fn store(&self, state: StoredState) {
        *lock(&self.stored) = state;
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

    /// Bytes of the saved state, with those that other states share.
    pub(crate) fn stored(&self) -> u64 {
        lock(&self.stored).bytes()
    }

    /// Bytes of the saved state that no other one of the tenant has.
    pub(crate) fn own_stored(&self) -> u64 {
        lock(&self.stored).own_bytes()
    }

    /// Bytes of the saved state if the blobs of its tenant do not count them.
    pub(crate) fn stored_apart(&self) -> u64 {
        let stored = lock(&self.stored);
        if stored.is_counted() { 0 } else { stored.bytes() }
    }
}
