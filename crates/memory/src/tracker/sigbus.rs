//! userfaultfd write protection answered by SIGBUS in the writing thread.
//!
//! The first write to a protected page costs a signal and a system call (2 to 5 µs); after that the
//! page is open and costs nothing. Works without privilege. One descriptor serves every slot of the
//! process.
//!
//! It also answers for pages of a lazily filled image that are not there yet. Such a fault and one on a
//! protected page look alike; a page that is in place is taken for protected.
//!
//! What may break it: a *system call* that writes a protected page fails with `EFAULT`, because the
//! kernel, not a thread, takes the fault. Slots whose memory system calls write use the scan tracker
//! instead ([`crate::HostAccess::Syscalls`]), or open the range first ([`crate::Slot::open_range`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use afresh_sys::fault::{self, FaultHandler, FaultSignal, Registration};
use afresh_sys::{HUGE_SIZE, Interest, PAGE_SIZE, PageRange, Uffd, UffdMode};

use super::{Descriptor, DirtyPages, Tracker, TrackerKind};
use crate::TrackError;
use crate::image::{Met, Missing};

/// Largest number of pages opened for one fault when writes run forward. What is opened too much is
/// copied back needlessly until the write set sheds it, so the window stays small.
const MAX_WINDOW: usize = 16;

/// Pages to each side that are opened when opening just the page failed: the writer must get on, and
/// too many dirty pages are only slow.
const WIDE: usize = 256;

static UFFD: Descriptor = Descriptor::new(UffdMode::Sigbus);

/// The part that the fault handler reads.
struct Watch {
    uffd: &'static Uffd,
    base: usize,
    /// Pages under write protection or open; gaps between regions are in neither state.
    watched: DirtyPages,
    /// Blocks, counted from the one that `base` lies in, that are opened as wholes.
    blocks: DirtyPages,
    /// The page that would continue the last fault's window, and that window's size.
    next: AtomicUsize,
    window: AtomicUsize,
    dirty: DirtyPages,
    missing: Option<Missing>,
}

/// Pages in a block.
const BLOCK: usize = HUGE_SIZE / PAGE_SIZE;

impl Watch {
    /// The block that `page` lies in, counted from the one that `base` lies in.
    fn block_of(&self, page: usize) -> usize {
        (self.base % HUGE_SIZE / PAGE_SIZE + page) / BLOCK
    }

    /// The pages of a block; only for blocks that begin at page 0 or later.
    fn pages_of(&self, block: usize) -> PageRange {
        PageRange::new((block * BLOCK).saturating_sub(self.base % HUGE_SIZE / PAGE_SIZE), BLOCK)
    }

    /// Opens a range and marks it; `false` when the kernel refused.
    fn lift(&self, range: PageRange) -> bool {
        // Marked before it is opened: whoever sees the page open finds it in the set.
        self.dirty.mark(range);
        let start = (self.base + range.byte_start()) as *const u8;
        self.uffd.write_protect(start, range.byte_len(), false).is_ok()
    }
}

impl FaultHandler for Watch {
    fn on_fault(&self, address: usize, signal: FaultSignal) -> bool {
        let page = (address - self.base) / PAGE_SIZE;
        if signal != FaultSignal::Bus || !self.watched.contains(page) {
            return false;
        }
        if self.missing.as_ref().is_some_and(|missing| missing.answer(page) != Met::Present) {
            return true;
        }
        let block = self.block_of(page);
        if self.blocks.contains(block) {
            return self.lift(self.pages_of(block))
                || self.lift(self.watched.run_around(page, WIDE));
        }
        let window = if self.next.load(Ordering::Relaxed) == page {
            (self.window.load(Ordering::Relaxed) * 2).min(MAX_WINDOW)
        } else {
            1
        };
        let single =
            |page| self.watched.contains(page) && !self.blocks.contains(self.block_of(page));
        let len = (1..window).take_while(|i| single(page + i)).count() + 1;
        let range = PageRange::new(page, len);
        self.window.store(window, Ordering::Relaxed);
        self.next.store(range.end(), Ordering::Relaxed);
        self.lift(range) || self.lift(self.watched.run_around(page, WIDE))
    }
}

/// Notices writes through SIGBUS.
pub(super) struct Sigbus {
    watch: Arc<Watch>,
    _registration: Registration,
}

impl Sigbus {
    pub(super) fn new(
        base: *mut u8,
        capacity: usize,
        missing: Option<Missing>,
    ) -> Result<Self, TrackError> {
        let watch = Arc::new(Watch {
            uffd: UFFD.get()?,
            base: base as usize,
            watched: DirtyPages::new(capacity),
            blocks: DirtyPages::new(capacity / BLOCK + 2),
            next: AtomicUsize::new(usize::MAX),
            window: AtomicUsize::new(1),
            dirty: DirtyPages::new(capacity),
            missing,
        });
        let registration = fault::register(base, capacity * PAGE_SIZE, watch.clone())?;
        Ok(Self { watch, _registration: registration })
    }

    fn protect(&self, range: PageRange, protect: bool) -> Result<(), TrackError> {
        let start = (self.watch.base + range.byte_start()) as *const u8;
        if !range.is_empty() {
            self.watch.uffd.write_protect(start, range.byte_len(), protect)?;
        }
        Ok(())
    }
}

impl Tracker for Sigbus {
    fn kind(&self) -> TrackerKind {
        TrackerKind::UffdSigbus
    }

    fn failure(&self) -> Option<String> {
        self.watch.missing.as_ref()?.failure()
    }

    fn watch(&mut self, range: PageRange) -> Result<(), TrackError> {
        let start = (self.watch.base + range.byte_start()) as *const u8;
        self.watch.uffd.register(start, range.byte_len(), Interest::WRITES)?;
        for part in self.watch.missing.iter().flat_map(|missing| missing.within(range)) {
            let start = (self.watch.base + part.byte_start()) as *const u8;
            let interest = Interest { missing: true, ..Interest::WRITES };
            self.watch.uffd.register(start, part.byte_len(), interest)?;
        }
        self.protect(range, true)?;
        self.watch.watched.mark(range);
        Ok(())
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError> {
        if !self.watch.dirty.is_empty() {
            self.watch.dirty.drain(written);
            self.watch.next.store(usize::MAX, Ordering::Relaxed);
        }
        Ok(())
    }

    fn arm(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        pages.iter().try_for_each(|range| self.protect(*range, true))
    }

    fn open(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        pages.iter().try_for_each(|range| self.protect(*range, false))
    }

    fn watches_blocks(&self) -> bool {
        true
    }

    fn by_block(&mut self, block: PageRange, on: bool) {
        let block = PageRange::new(self.watch.block_of(block.start), 1);
        if on {
            self.watch.blocks.mark(block);
        } else {
            self.watch.blocks.clear(block);
        }
    }
}
