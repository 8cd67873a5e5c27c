//! Copies the pages of a capture while its guest runs.
//!
//! A slot that is frozen this way protects the pages that may differ from its image, and hands their
//! content to a [`PageCopier`]. A reader of the new image has the copier fetch the pages that it needs.
//! A guest that writes to a page first has it copied by its fault handler, before the page opens.
//!
//! Each captured page is *pending* until one thread takes it, and *secured* from the moment at
//! which a write to it can no longer reach the image:
//!
//! * A fault handler takes the page, inserts it, and then marks it as secured. The page stays
//!   protected meanwhile: every other handler that wants to open it waits for the mark.
//! * A reader copies the page into its own buffer first, and takes it afterwards. If it gets the
//!   page, no handler had taken it, so it was protected during the copy and the buffer has its
//!   content. If it does not, a handler has the content, and the buffer is discarded. So a handler
//!   never waits for a reader that the scheduler has suspended during a copy.
//!
//! Promises: each page of the image has the content that the slot had at the capture, or the image
//! has failed with the cause. May break it: a page that is opened without [`PageCopier::keep`], and
//! a guest that runs during the capture itself.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh_sys::{Call, PAGE_SIZE, PageRange, Reservation, SysError};

use super::backing::Filling;
use super::inserter::Arrived;
use super::{Extent, Filler, Image, Inserter, build};
use crate::ImageError;

/// Pages that a reader copies at a time.
const BATCH_PAGES: usize = 64;

/// A bit for each captured page.
struct PageBits(Box<[AtomicU64]>);

impl PageBits {
    fn new(pages: usize, set: bool) -> Self {
        let word = if set { u64::MAX } else { 0 };
        Self((0..pages.div_ceil(64)).map(|_| AtomicU64::new(word)).collect())
    }

    fn set(&self, page: usize) {
        self.0[page / 64].fetch_or(1 << (page % 64), Ordering::AcqRel);
    }

    fn has(&self, page: usize) -> bool {
        self.0[page / 64].load(Ordering::Acquire) & (1 << (page % 64)) != 0
    }

    /// Clears the bit and returns whether it was set.
    fn take(&self, page: usize) -> bool {
        let bit = 1 << (page % 64);
        self.0[page / 64].fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }
}

/// Pages that follow one another in the slot and in the backing.
struct CapturedRun {
    range: PageRange,
    /// Their first page in the backing.
    at: usize,
}

/// The captured pages of a slot, on their way into an image.
pub(crate) struct PageCopier {
    /// Address of page 0 of the slot.
    base: usize,
    /// The slot's memory, which stays mapped until every page has arrived.
    memory: Mutex<Option<Arc<Reservation>>>,
    /// Ascending in both positions, and without gaps in the backing.
    runs: Vec<CapturedRun>,
    inserter: Inserter,
    arrived: Arc<Arrived>,
    /// Pages whose content is only in the slot.
    pending: PageBits,
    /// Pages whose content is elsewhere too.
    secured: PageBits,
    /// The error of the first page that could not be kept; 0 for none.
    errno: AtomicI32,
}

impl PageCopier {
    fn new(
        captured: &[PageRange],
        memory: &Arc<Reservation>,
        base: *const u8,
        (inserter, arrived): (Inserter, Arc<Arrived>),
    ) -> Self {
        let mut at = 0;
        let runs = captured.iter().map(|range| {
            let run = CapturedRun { range: *range, at };
            at += range.len;
            run
        });
        let runs = runs.collect();
        let (pending, secured) = (PageBits::new(at, true), PageBits::new(at, false));
        Self {
            base: base as usize,
            memory: Mutex::new(Some(memory.clone())),
            runs,
            inserter,
            arrived,
            pending,
            secured,
            errno: AtomicI32::new(0),
        }
    }

    fn memory(&self) -> MutexGuard<'_, Option<Arc<Reservation>>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn address(&self, page: usize) -> *const u8 {
        (self.base + page * PAGE_SIZE) as *const u8
    }

    fn has_failed(&self) -> bool {
        self.errno.load(Ordering::Acquire) != 0
    }

    fn fail(&self, error: &SysError) {
        self.errno.store(error.errno, Ordering::Release);
    }

    /// Copies the captured pages in `range`, which are the slot's. When it returns, writes to
    /// `range` do not reach the image. The caller is a fault handler of the slot, which opens the
    /// pages afterwards.
    pub(crate) fn keep(&self, range: PageRange) {
        let first = self.runs.partition_point(|run| run.range.end() <= range.start);
        for run in &self.runs[first..] {
            let Some(part) = run.range.intersect(range) else { break };
            let at = run.at + part.start - run.range.start;
            (0..part.len).for_each(|n| self.keep_page(at + n, part.start + n));
        }
    }

    /// As [`PageCopier::keep`], for the page `at` of the backing, which is `page` of the slot.
    fn keep_page(&self, at: usize, page: usize) {
        if !self.pending.take(at) {
            // A failed image needs no content, and a page without it must not stop the guest.
            while !self.secured.has(at) && !self.has_failed() {
                std::thread::yield_now();
            }
            return;
        }
        // SAFETY: the page is accessible in a slot that has not been reset since the capture. It is
        // write-protected, and no handler opens it before it is marked as secured below.
        let content = unsafe { std::slice::from_raw_parts(self.address(page), PAGE_SIZE) };
        if let Err(error) = self.inserter.put(at, content) {
            self.fail(&error);
        }
        self.secured.set(at);
    }

    /// Copies what is still pending of `pages` of the backing, for which `buffer` has room. The run
    /// `first` has the first of them.
    fn copy(&self, pages: PageRange, first: usize, buffer: &mut [u8]) -> Result<(), SysError> {
        let mut to = &mut *buffer;
        for run in &self.runs[first..] {
            let place = PageRange::new(run.at, run.range.len);
            let Some(part) = place.intersect(pages) else { break };
            let (now, rest) = to.split_at_mut(part.byte_len());
            let from = self.address(run.range.start + part.start - run.at);
            // SAFETY: the caller holds the slot's memory, in which captured pages stay accessible
            // until the slot has had all of them copied. The copy uses a raw pointer because the
            // guest may write to a page once a handler has kept it: the buffer then holds some
            // mixture, which is not used.
            unsafe { from.copy_to_nonoverlapping(now.as_mut_ptr(), now.len()) };
            to = rest;
        }
        let mut from = 0;
        while from < pages.len {
            let at = pages.start + from;
            let taken = (at..pages.end()).take_while(|page| self.pending.take(*page)).count();
            let content = &buffer[from * PAGE_SIZE..(from + taken) * PAGE_SIZE];
            (at..at + taken).for_each(|page| self.secured.set(page));
            if taken > 0 {
                self.inserter.put(at, content)?;
            }
            // The page behind them is a handler's, or another reader's.
            from += taken + 1;
        }
        Ok(())
    }

    /// Copies `pages` of the backing, or waits for handlers that do.
    fn copy_all(&self, pages: PageRange) -> Result<(), SysError> {
        let Some(memory) = self.memory().clone() else { return Ok(()) };
        let mut buffer = vec![0; BATCH_PAGES.min(pages.len) * PAGE_SIZE];
        for start in (pages.start..pages.end()).step_by(BATCH_PAGES) {
            let batch = PageRange::new(start, BATCH_PAGES.min(pages.end() - start));
            if !self.arrived.has_all(batch) {
                let first = self.runs.partition_point(|run| run.at + run.range.len <= start);
                self.copy(batch, first, &mut buffer[..batch.byte_len()])?;
            }
        }
        for page in pages.start..pages.end() {
            while !self.arrived.has(page) && !self.has_failed() {
                std::thread::yield_now();
            }
        }
        drop(memory);
        if self.arrived.all() {
            *self.memory() = None;
        }
        Ok(())
    }

    /// Copies everything, before the slot's memory changes.
    pub(crate) fn finish(&self) {
        self.fill(PageRange::new(0, self.inserter.pages()));
    }
}

impl Filler for PageCopier {
    fn fill_in_handler(&self, page: usize) -> bool {
        let run = self.runs.partition_point(|run| run.at + run.range.len <= page);
        let Some(run) = self.runs.get(run) else { return false };
        self.keep_page(page, run.range.start + page - run.at);
        while !self.arrived.has(page) && !self.has_failed() {
            std::thread::yield_now();
        }
        !self.has_failed()
    }

    fn fill(&self, pages: PageRange) -> bool {
        if let Err(error) = self.copy_all(pages) {
            self.fail(&error);
        }
        !self.has_failed()
    }

    fn failure(&self) -> Option<String> {
        let errno = self.errno.load(Ordering::Acquire);
        let error = (errno != 0).then(|| SysError::new(Call::UffdFill, errno))?;
        Some(format!("a page of a capture could not be stored: {error}"))
    }
}

impl Image {
    /// This image with `pages` pages, except that `captured` (sorted and disjoint) have the content
    /// of a slot whose page 0 is at `base` in `memory`. That content is copied on demand: the slot
    /// must call the copier before any of these pages changes.
    ///
    /// # Errors
    /// [`ImageError`] when memory or descriptors ran out.
    pub(crate) fn capture_behind(
        &self,
        pages: usize,
        captured: &[PageRange],
        memory: &Arc<Reservation>,
        base: *const u8,
    ) -> Result<(Image, Option<Arc<PageCopier>>), ImageError> {
        build::check_sorted(captured, pages)?;
        let mut extents = self.kept_extents(pages, captured);
        let all = PageRange::new(0, captured.iter().map(|range| range.len).sum());
        if all.is_empty() {
            return Ok((Image::from_extents(pages, extents), None));
        }
        let (backing, inserter, arrived) = Inserter::open(all.len, vec![all])?;
        let copier = PageCopier::new(captured, memory, base, (inserter, arrived.clone()));
        let copier = Arc::new(copier);
        // Slots wait until all is copied. With faults, one guest would wait for another.
        let filling = Filling { filler: copier.clone(), arrived, live: false };
        let backing = Arc::new(backing.filled_by(vec![all], filling));
        let extent =
            |run: &CapturedRun| Extent { range: run.range, backing: backing.clone(), at: run.at };
        extents.extend(copier.runs.iter().map(extent));
        extents.sort_by_key(|extent| extent.range.start);
        Ok((Image::from_extents(pages, extents), Some(copier)))
    }
}

#[cfg(test)]
mod tests {
    use afresh_sys::Protection;

    use super::*;

    #[test]
    fn each_page_is_copied_once_by_handlers_and_readers_together() {
        const PAGES: usize = 12;
        let memory = Arc::new(Reservation::new(PAGES).unwrap());
        memory.map_anonymous(PageRange::new(0, PAGES), Protection::ReadWrite).unwrap();
        let base = memory.page_ptr(0);
        for page in 0..PAGES {
            // SAFETY: inside the mapping, which only this thread uses so far.
            unsafe { base.add(page * PAGE_SIZE).write_bytes(page as u8 + 1, PAGE_SIZE) };
        }
        let captured = [PageRange::new(1, 3), PageRange::new(5, 1), PageRange::new(7, 4)];
        let before = Image::zero(PAGES);
        let (image, copier) = before.capture_behind(PAGES, &captured, &memory, base).unwrap();
        let copier = copier.unwrap();
        drop(memory);
        assert!(!image.is_complete());
        std::thread::scope(|scope| {
            scope.spawn(|| (0..PAGES).rev().for_each(|page| copier.keep(PageRange::new(page, 2))));
            scope.spawn(|| image.complete().unwrap());
            scope.spawn(|| image.resolve(PageRange::new(3, 6)).unwrap());
        });
        assert!(image.is_complete());
        // Handlers free nothing.
        copier.finish();
        assert!(copier.memory().is_none());
        for page in 0..PAGES {
            let byte = if captured.iter().any(|run| run.contains(page)) { page + 1 } else { 0 };
            assert!(image.page_is(page, &[byte as u8; PAGE_SIZE]), "page {page}");
        }
        assert_eq!(before.differing_content(&image).unwrap(), captured);
    }
}
