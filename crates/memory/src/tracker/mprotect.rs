//! mprotect answered by SIGSEGV in the writing thread: works on every Linux, in any container.
//!
//! Each run of open pages is a mapping of its own, and a process may have only so many
//! (`vm.max_map_count`, 65,530 by default). The more runs are open, the larger the blocks that one
//! fault opens, so that a scattered writer costs copying, not mappings.
//!
//! What may break it: as with SIGBUS, a system call that writes a protected page fails with `EFAULT`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use afresh_sys::fault::{self, FaultHandler, FaultSignal, Registration};
use afresh_sys::{PAGE_SIZE, PageRange, Protection, Reservation, SysError};

use super::{DirtyPages, Tracker, TrackerKind};
use crate::TrackError;

/// Faults at which the block opened per fault doubles.
const FAULTS_PER_DOUBLING: usize = 256;
/// Largest block opened per fault, as a power of two of pages: 1 MiB.
const MAX_ORDER: usize = 8;

/// Pages to each side that are opened when the kernel has no mapping left for a small block.
const WIDE: usize = 1 << 20;

struct Watch {
    memory: Arc<Reservation>,
    /// Page of `memory` that is page 0 of the slot.
    first: usize,
    faults: AtomicUsize,
    /// Accessible pages: only these may ever be made writable.
    watched: DirtyPages,
    dirty: DirtyPages,
}

impl Watch {
    fn protect(&self, range: PageRange, protection: Protection) -> Result<(), SysError> {
        self.memory.protect(PageRange::new(self.first + range.start, range.len), protection)
    }
}

impl Watch {
    /// Opens a range and marks it; `false` when the kernel refused.
    fn lift(&self, range: PageRange) -> bool {
        // Marked before it is opened: whoever sees the page open finds it in the set.
        self.dirty.mark(range);
        self.protect(range, Protection::ReadWrite).is_ok()
    }
}

impl FaultHandler for Watch {
    fn on_fault(&self, address: usize, signal: FaultSignal) -> bool {
        let page = (address - self.memory.page_ptr(self.first) as usize) / PAGE_SIZE;
        if signal != FaultSignal::Segv || !self.watched.contains(page) {
            return false;
        }
        let faults = self.faults.fetch_add(1, Ordering::Relaxed);
        let block = 1 << (faults / FAULTS_PER_DOUBLING).min(MAX_ORDER);
        let around = self.watched.run_around(page, block - 1);
        let aligned = PageRange::new(page & !(block - 1), block);
        let range = around.intersect(aligned).unwrap_or(PageRange::new(page, 1));
        // Out of mappings, a large block may still go through: it joins its neighbours.
        self.lift(range) || self.lift(self.watched.run_around(page, WIDE))
    }
}

/// Notices writes through SIGSEGV.
pub(super) struct Mprotect {
    watch: Arc<Watch>,
    _registration: Registration,
}

impl Mprotect {
    pub(super) fn new(
        memory: &Arc<Reservation>,
        first: usize,
        capacity: usize,
    ) -> Result<Self, TrackError> {
        let watch = Arc::new(Watch {
            memory: memory.clone(),
            first,
            faults: AtomicUsize::new(0),
            watched: DirtyPages::new(capacity),
            dirty: DirtyPages::new(capacity),
        });
        let base = memory.page_ptr(first);
        let registration = fault::register(base, capacity * PAGE_SIZE, watch.clone())?;
        Ok(Self { watch, _registration: registration })
    }

    fn protect(&self, pages: &[PageRange], protection: Protection) -> Result<(), TrackError> {
        for range in pages {
            self.watch.protect(*range, protection)?;
        }
        Ok(())
    }
}

impl Tracker for Mprotect {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Mprotect
    }

    fn watch(&mut self, range: PageRange) -> Result<(), TrackError> {
        self.protect(&[range], Protection::Read)?;
        self.watch.watched.mark(range);
        Ok(())
    }

    fn hide(&mut self, range: PageRange) {
        self.watch.watched.clear(range);
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError> {
        self.watch.dirty.drain(written);
        Ok(())
    }

    fn arm(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        self.protect(pages, Protection::Read)
    }

    fn open(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        self.protect(pages, Protection::ReadWrite)
    }

    fn survives_hiding(&self) -> bool {
        false
    }
}
