//! mprotect answered by SIGSEGV in the writing thread: works on every Linux, in any container.
//!
//! Each run of open pages splits a mapping, and the kernel limits the mappings of a process
//! (`vm.max_map_count`, 65,530 by default). So the trackers of a process share a budget of runs, a
//! part of it each. The more of its part a slot has open *now*, the larger the blocks that one
//! fault opens; a slot that has more than its part when it is drained closes gaps between its runs.
//! A scattered writer costs copying then, not mappings.
//!
//! May break it: as with SIGBUS, a system call that writes a protected page fails with `EFAULT`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use afresh_sys::fault::{self, Fault, FaultCause, FaultHandler, FaultSignal, Registration};
use afresh_sys::{PAGE_SIZE, PageRange, Protection, Reservation, SysError, host};

use super::barrier::{Barrier, CopierCell, WriteBarrier};
use super::{DirtyPages, Tracker, TrackerKind};
use crate::TrackError;

/// Largest block opened per fault, as a power of two of pages: 1 MiB.
const MAX_ORDER: usize = 8;

/// Pages to each side that are opened when the kernel has no mapping left for a small block.
const WIDE: usize = 1 << 20;

/// Minimum divisor of the budget, so that the first trackers do not take it all.
const AT_LEAST: usize = 8;

/// The runs of all trackers of this process, and how many trackers there are. A child of a fork has
/// its parent's mappings, and so its counts.
struct Budget {
    runs: AtomicUsize,
    trackers: AtomicUsize,
}

static BUDGET: Budget = Budget { runs: AtomicUsize::new(0), trackers: AtomicUsize::new(0) };

impl Budget {
    /// Maximum runs of all trackers: half of the mappings that the kernel allows, as a run costs
    /// two when everything around it is closed; and half of that, as other code needs mappings too.
    fn all(&self) -> usize {
        host::max_mappings() / 4
    }

    /// Runs that one tracker may have.
    fn part(&self) -> usize {
        (self.all() / self.trackers.load(Ordering::Relaxed).max(AT_LEAST)).max(1)
    }
}

struct Watch {
    memory: Arc<Reservation>,
    /// Page of `memory` that is page 0 of the slot.
    first: usize,
    /// Accessible pages: only these may ever be made writable.
    watched: DirtyPages,
    /// Pages that can be written now.
    open: DirtyPages,
    /// Runs in `open`, approximately while threads open pages at the same time; corrected by each
    /// drain.
    runs: AtomicUsize,
    /// Its part of the budget at the last drain.
    part: AtomicUsize,
    dirty: DirtyPages,
    copier: CopierCell,
}

impl Watch {
    fn protect(&self, range: PageRange, protection: Protection) -> Result<(), SysError> {
        self.memory.protect(PageRange::new(self.first + range.start, range.len), protection)
    }

    fn count(&self, from: usize, to: usize) {
        self.runs.fetch_add(to, Ordering::Relaxed);
        BUDGET.runs.fetch_add(to, Ordering::Relaxed);
        self.runs.fetch_sub(from, Ordering::Relaxed);
        BUDGET.runs.fetch_sub(from, Ordering::Relaxed);
    }

    /// Opens pages; every run that touches them becomes one with them.
    fn open(&self, range: PageRange) -> Result<(), SysError> {
        let before = self.open.runs_touching(range);
        self.protect(range, Protection::ReadWrite)?;
        self.open.mark(range);
        self.count(before, 1);
        Ok(())
    }

    /// Protects pages again.
    fn arm(&self, range: PageRange) -> Result<(), SysError> {
        let before = self.open.runs_touching(range);
        self.protect(range, Protection::Read)?;
        self.open.clear(range);
        self.count(before, self.open.runs_touching(range));
        Ok(())
    }

    /// Opens a range and marks it; `false` when the kernel refused.
    fn lift(&self, range: PageRange) -> bool {
        self.copier.keep(range);
        // Marked before it is opened: a thread that sees the page open finds it in the set.
        self.dirty.mark(range);
        self.open(range).is_ok()
    }

    /// Pages that one fault opens, a power of two.
    fn block(&self) -> usize {
        let part = self.part.load(Ordering::Relaxed).max(1);
        // Threads that open and protect pages at the same time may even count below zero.
        let runs = self.runs.load(Ordering::Relaxed).min(part);
        let all = BUDGET.runs.load(Ordering::Relaxed).cast_signed();
        if all >= BUDGET.all().cast_signed() {
            return 1 << MAX_ORDER;
        }
        1 << (runs * (MAX_ORDER + 1) / part).min(MAX_ORDER)
    }

    /// Counts the runs anew, and closes the smallest gaps between them where there are more than
    /// `part`.
    fn settle(&self, part: usize) -> Result<(), SysError> {
        self.part.store(part, Ordering::Relaxed);
        let mut runs = Vec::new();
        self.open.append(&mut runs);
        self.count(self.runs.load(Ordering::Relaxed), runs.len());
        if runs.len() <= part {
            return Ok(());
        }
        let gap = |pair: &[PageRange]| PageRange::new(pair[0].end(), pair[1].start - pair[0].end());
        let mut gaps: Vec<_> = runs
            .windows(2)
            .map(gap)
            .filter(|gap| self.watched.run_around(gap.start, gap.len).end() >= gap.end())
            .filter(|gap| self.watched.contains(gap.start))
            .collect();
        gaps.sort_unstable_by_key(|gap| gap.len);
        // To a little below, so that the next page does not bring it here again.
        let excess = runs.len() - part + part / 4;
        gaps.into_iter().take(excess).try_for_each(|gap| {
            self.dirty.mark(gap);
            self.open(gap)
        })
    }
}

impl FaultHandler for Watch {
    fn answers(&self, signal: FaultSignal) -> bool {
        signal == FaultSignal::Segv
    }

    fn on_fault(&self, fault: &Fault) -> bool {
        let page = (fault.address - self.memory.page_ptr(self.first) as usize) / PAGE_SIZE;
        if fault.cause != FaultCause::Protected || !self.watched.contains(page) {
            return false;
        }
        let block = self.block();
        let around = self.watched.run_around(page, block - 1);
        let aligned = PageRange::new(page & !(block - 1), block);
        let range = around.intersect(aligned).unwrap_or(PageRange::new(page, 1));
        // Out of mappings, a large block may still go through: it joins its neighbours.
        self.lift(range) || self.lift(self.watched.run_around(page, WIDE))
    }
}

impl Barrier for Watch {
    fn protect(&self, range: PageRange) -> Result<(), TrackError> {
        Ok(self.arm(range)?)
    }

    fn copier(&self) -> &CopierCell {
        &self.copier
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
            watched: DirtyPages::new(capacity),
            open: DirtyPages::new(capacity),
            runs: AtomicUsize::new(0),
            part: AtomicUsize::new(BUDGET.part()),
            dirty: DirtyPages::new(capacity),
            copier: CopierCell::default(),
        });
        let base = memory.page_ptr(first);
        let registration = fault::register(base, capacity * PAGE_SIZE, watch.clone())?;
        BUDGET.trackers.fetch_add(1, Ordering::Relaxed);
        Ok(Self { watch, _registration: registration })
    }
}

impl Drop for Mprotect {
    fn drop(&mut self) {
        BUDGET.trackers.fetch_sub(1, Ordering::Relaxed);
        self.watch.count(self.watch.runs.load(Ordering::Relaxed), 0);
    }
}

// SAFETY: only `Watch` marks pages, and only watched ones, before it opens them; every other
// watched page is mapped without write access, so that the processor reports its first write.
// `DirtyPages` drains in order, each page once.
unsafe impl Tracker for Mprotect {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Mprotect
    }

    fn watch(&mut self, range: PageRange) -> Result<(), TrackError> {
        self.watch.arm(range)?;
        self.watch.watched.mark(range);
        Ok(())
    }

    fn hide(&mut self, range: PageRange) {
        let before = self.watch.open.runs_touching(range);
        self.watch.watched.clear(range);
        self.watch.open.clear(range);
        self.watch.count(before, self.watch.open.runs_touching(range));
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError> {
        if !self.watch.dirty.is_empty() {
            self.watch.settle(BUDGET.part())?;
            self.watch.dirty.drain(written);
        }
        Ok(())
    }

    fn arm(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        pages.iter().try_for_each(|range| self.watch.arm(*range)).map_err(TrackError::from)
    }

    fn open(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        pages.iter().try_for_each(|range| self.watch.open(*range)).map_err(TrackError::from)
    }

    fn barrier(&self) -> Option<WriteBarrier> {
        Some(WriteBarrier::new(self.watch.clone()))
    }

    fn survives_hiding(&self) -> bool {
        false
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    fn tracked(pages: usize) -> (Arc<Reservation>, Mprotect) {
        let memory = Arc::new(Reservation::new(pages).unwrap());
        let all = PageRange::new(0, pages);
        memory.map_anonymous(all, Protection::ReadWrite).unwrap();
        let mut tracker = Mprotect::new(&memory, 0, pages).unwrap();
        tracker.watch(all).unwrap();
        (memory, tracker)
    }

    fn poke(memory: &Reservation, page: usize) {
        // SAFETY: mapped, and the tracker opens it.
        unsafe { memory.page_ptr(page).write_volatile(1) };
    }

    fn drained(tracker: &mut Mprotect) -> Vec<PageRange> {
        let mut written = Vec::new();
        tracker.drain(&mut written).unwrap();
        written
    }

    #[test]
    fn earlier_writes_of_a_slot_do_not_slow_its_next_fault() {
        let (memory, mut tracker) = tracked(1 << 14);
        for round in 0..3 {
            for page in (0..1 << 14).step_by(16) {
                poke(&memory, page);
            }
            let written = drained(&mut tracker);
            assert!(written.iter().map(|run| run.len).sum::<usize>() >= 1 << 10, "{round}");
            tracker.arm(&[PageRange::new(0, 1 << 14)]).unwrap();
            poke(&memory, 5000);
            assert_eq!(drained(&mut tracker), [PageRange::new(5000, 1)]);
            tracker.arm(&[PageRange::new(5000, 1)]).unwrap();
            assert_eq!(tracker.watch.runs.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn runs_are_counted_as_pages_open_and_close() {
        let (memory, mut tracker) = tracked(64);
        let runs = |tracker: &Mprotect| tracker.watch.runs.load(Ordering::Relaxed);
        for page in [3, 5, 9] {
            poke(&memory, page);
        }
        assert_eq!(runs(&tracker), 3);
        poke(&memory, 4);
        assert_eq!(runs(&tracker), 2);
        assert_eq!(drained(&mut tracker), [PageRange::new(3, 3), PageRange::new(9, 1)]);
        tracker.arm(&[PageRange::new(4, 1)]).unwrap();
        assert_eq!(runs(&tracker), 3);
        tracker.open(&[PageRange::new(0, 64)]).unwrap();
        assert_eq!(runs(&tracker), 1);
        tracker.hide(PageRange::new(32, 32));
        assert_eq!(runs(&tracker), 1);
        tracker.hide(PageRange::new(0, 32));
        assert_eq!(runs(&tracker), 0);
    }

    #[test]
    fn gaps_are_closed_where_there_are_too_many_runs_and_reported_as_written() {
        let (memory, mut tracker) = tracked(4096);
        for page in (0..64).step_by(2) {
            poke(&memory, page);
        }
        tracker.hide(PageRange::new(200, 1));
        for page in (300..4096).step_by(512) {
            poke(&memory, page);
        }
        let part = 8;
        tracker.watch.settle(part).unwrap();
        let runs = tracker.watch.runs.load(Ordering::Relaxed);
        assert!(runs <= part, "{runs}");
        let written = drained(&mut tracker);
        // The small gaps were closed, the large ones were not, and unwatched pages were not opened.
        assert_eq!(written[0], PageRange::new(0, 63));
        assert!(written.iter().all(|run| !run.contains(200)), "{written:?}");
    }
}
