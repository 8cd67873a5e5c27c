//! Copies the pages of a capture while its guest runs.
//!
//! A slot that is frozen this way protects the pages that may differ from its image, and hands
//! their content to a [`PageCopier`]. A reader of the new image has the copier fetch the pages that
//! it needs. A guest that writes to a page first has it copied by its fault handler, before the
//! page opens.
//!
//! Each captured page is *pending* until one thread takes it, and *secured* from the moment at
//! which a write to it can no longer reach the image:
//!
//! * A fault handler takes the page, inserts it, and then marks it as secured. The page stays
//!   protected meanwhile: every other handler that wants to open it waits for the mark.
//! * A reader copies the page into its own buffer first, and marks it as secured afterwards, if it
//!   is still pending, in one atomic step. If it was, no handler had taken it, so it was protected
//!   during the copy and the buffer has its content. Otherwise the buffer is discarded. So a
//!   handler never waits for a reader that the scheduler has suspended.
//!
//! Readers hold a lock while they copy from the slot. [`PageCopier::finish`] waits for it, and
//! takes the memory away: nothing is copied from the slot afterwards. No handler takes that lock. A
//! forked child copies nothing and waits for nothing: its image has failed unless it was complete.
//!
//! A capture whose image is dropped is abandoned: its pages are freed, and handlers that open one
//! mark it without a copy.
//!
//! Promises: each page of the image has the content that the slot had at the capture, or the image
//! has failed with the cause. May break it: a page that is opened without [`PageCopier::keep`], and
//! a guest that runs during the capture itself.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use afresh_sys::errno::ESRCH;
use afresh_sys::{Call, PAGE_SIZE, PageRange, Reservation, SysError, fork};

use super::arrived_pages::ArrivedPages;
use super::backing::FillState;
use super::{Extent, Filler, Image, Inserter, build};
use crate::ImageError;

/// Pages that a reader copies at a time.
const BATCH_PAGES: usize = 64;

/// Two bits for each captured page. None is set while it is pending.
struct PageStates(Box<[AtomicU64]>);

/// A fault handler has taken the page.
const TAKEN: u64 = 1;
/// Its content is outside of the slot, or will never be used.
const SECURED: u64 = 2;

impl PageStates {
    fn new(pages: usize) -> Self {
        Self((0..pages.div_ceil(32)).map(|_| AtomicU64::new(0)).collect())
    }

    fn word(&self, page: usize) -> (&AtomicU64, usize) {
        (&self.0[page / 32], page % 32 * 2)
    }

    /// Takes a pending page for a handler; returns whether it was pending.
    fn take(&self, page: usize) -> bool {
        let (word, shift) = self.word(page);
        word.fetch_or(TAKEN << shift, Ordering::AcqRel) >> shift & (TAKEN | SECURED) == 0
    }

    /// Marks a page that a handler took.
    fn secure(&self, page: usize) {
        let (word, shift) = self.word(page);
        word.fetch_or(SECURED << shift, Ordering::AcqRel);
    }

    /// Marks a pending page in one step; returns whether it was pending.
    fn secure_pending(&self, page: usize) -> bool {
        let (word, shift) = self.word(page);
        let secured =
            |bits: u64| (bits >> shift & (TAKEN | SECURED) == 0).then_some(bits | SECURED << shift);
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, secured).is_ok()
    }

    fn is_secured(&self, page: usize) -> bool {
        let (word, shift) = self.word(page);
        word.load(Ordering::Acquire) >> shift & SECURED != 0
    }
}

/// All that the captured pages need while they are in the slot: its memory, and the images whose
/// files it maps, which captured pages without a private copy show.
pub(crate) type CapturedMemory = (Arc<Reservation>, Image, Option<Image>);

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
    /// `None` once nothing may be copied from the slot any more. Held for reading during copies.
    memory: RwLock<Option<CapturedMemory>>,
    /// Ascending in both positions, and without gaps in the backing.
    runs: Vec<CapturedRun>,
    inserter: Inserter,
    arrived: Arc<ArrivedPages>,
    states: PageStates,
    /// The process that made the capture. A child may inherit locked locks and taken pages.
    generation: u32,
    /// No image has the pages any more.
    abandoned: AtomicBool,
    /// The error of the first page that could not be kept; 0 for none.
    errno: AtomicI32,
}

impl PageCopier {
    fn new(
        captured: &[PageRange],
        memory: CapturedMemory,
        base: *const u8,
        (inserter, arrived): (Inserter, Arc<ArrivedPages>),
    ) -> Self {
        let mut at = 0;
        let runs = captured.iter().map(|range| {
            let run = CapturedRun { range: *range, at };
            at += range.len;
            run
        });
        let runs = runs.collect();
        Self {
            base: base as usize,
            memory: RwLock::new(Some(memory)),
            runs,
            inserter,
            arrived,
            states: PageStates::new(at),
            generation: fork::generation(),
            abandoned: AtomicBool::new(false),
            errno: AtomicI32::new(0),
        }
    }

    fn memory(&self) -> RwLockReadGuard<'_, Option<CapturedMemory>> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for readers that copy from the slot, and lets none begin.
    fn release_memory(&self) {
        let memory = self.memory.write().unwrap_or_else(PoisonError::into_inner).take();
        drop(memory);
    }

    /// Whether this is a forked child of the process that made the capture.
    pub(crate) fn is_of_parent(&self) -> bool {
        self.generation != fork::generation()
    }

    fn address(&self, page: usize) -> *const u8 {
        (self.base + page * PAGE_SIZE) as *const u8
    }

    fn has_failed(&self) -> bool {
        self.errno.load(Ordering::Acquire) != 0
    }

    fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    /// Whether some pages will never arrive.
    fn has_ended(&self) -> bool {
        self.has_failed() || self.is_abandoned()
    }

    /// Ends the capture without an image, and frees its pages.
    fn abandon(&self) {
        if self.is_of_parent() {
            return;
        }
        self.abandoned.store(true, Ordering::Release);
        self.release_memory();
        self.inserter.free();
    }

    fn fail(&self, error: &SysError) {
        let _ = self.errno.compare_exchange(0, error.errno, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Copies the captured pages in `range`, which are the slot's. When it returns, writes to
    /// `range` do not reach the image. The caller is a fault handler of the slot, which opens the
    /// pages afterwards.
    pub(crate) fn keep(&self, range: PageRange) {
        if self.is_of_parent() {
            return;
        }
        let first = self.runs.partition_point(|run| run.range.end() <= range.start);
        for run in &self.runs[first..] {
            let Some(part) = run.range.intersect(range) else { break };
            let at = run.at + part.start - run.range.start;
            (0..part.len).for_each(|n| self.keep_page(at + n, part.start + n));
        }
    }

    /// As [`PageCopier::keep`], for the page `at` of the backing, which is `page` of the slot.
    fn keep_page(&self, at: usize, page: usize) {
        if !self.states.take(at) {
            // Another handler marks it, also when it cannot store the page.
            while !self.states.is_secured(at) {
                std::thread::yield_now();
            }
            return;
        }
        // SAFETY: the page is accessible in a slot that has not been reset since the capture. It is
        // write-protected, and no handler opens it before it is marked as secured below.
        let content = unsafe { std::slice::from_raw_parts(self.address(page), PAGE_SIZE) };
        if !self.is_abandoned()
            && let Err(error) = self.inserter.put(at, content)
        {
            self.fail(&error);
        }
        self.states.secure(at);
    }

    /// Copies what is still pending of `pages` of the backing, for which `buffer` has room. The run
    /// `first` has the first of them. The caller holds the lock of `memory`.
    fn copy(&self, pages: PageRange, first: usize, buffer: &mut [u8]) -> Result<(), SysError> {
        let mut to = &mut *buffer;
        for run in &self.runs[first..] {
            let place = PageRange::new(run.at, run.range.len);
            let Some(part) = place.intersect(pages) else { break };
            let (now, rest) = to.split_at_mut(part.byte_len());
            let from = self.address(run.range.start + part.start - run.at);
            // SAFETY: the caller holds the lock of the slot's memory, in which captured pages stay
            // accessible until the slot has taken that memory away. The copy uses a raw pointer
            // because the guest may write to a page once a handler has kept it: the buffer then
            // holds some mixture, which is not used.
            unsafe { from.copy_to_nonoverlapping(now.as_mut_ptr(), now.len()) };
            to = rest;
        }
        let mut from = 0;
        while from < pages.len {
            let at = pages.start + from;
            let taken =
                (at..pages.end()).take_while(|page| self.states.secure_pending(*page)).count();
            let content = &buffer[from * PAGE_SIZE..(from + taken) * PAGE_SIZE];
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
        let mut buffer = vec![0; BATCH_PAGES.min(pages.len) * PAGE_SIZE];
        for start in (pages.start..pages.end()).step_by(BATCH_PAGES) {
            let batch = PageRange::new(start, BATCH_PAGES.min(pages.end() - start));
            if !self.arrived.has_all(batch) {
                let memory = self.memory();
                if memory.is_none() || self.has_ended() {
                    break;
                }
                let first = self.runs.partition_point(|run| run.at + run.range.len <= start);
                self.copy(batch, first, &mut buffer[..batch.byte_len()])?;
            }
        }
        for page in pages.start..pages.end() {
            while !self.arrived.has(page) && !self.has_ended() {
                std::thread::yield_now();
            }
        }
        if self.arrived.all() && self.memory().is_some() {
            self.release_memory();
        }
        Ok(())
    }

    /// Copies everything that an image needs, before the slot's memory changes. Nothing is copied
    /// from the slot afterwards: pages that could not be copied fail the image.
    pub(crate) fn finish(&self) {
        if self.is_of_parent() {
            return;
        }
        self.fill(PageRange::new(0, self.inserter.pages()));
        if !self.arrived.all() {
            self.fail(&SysError::new(Call::UffdFill, ESRCH));
        }
        self.release_memory();
    }

    /// Copies `pages` of the backing; returns whether all of them arrived.
    fn fill(&self, pages: PageRange) -> bool {
        if self.is_of_parent() {
            self.fail(&SysError::new(Call::UffdFill, ESRCH));
        } else if let Err(error) = self.copy_all(pages) {
            self.fail(&error);
        }
        !self.has_ended()
    }
}

impl Drop for PageCopier {
    fn drop(&mut self) {
        // A handler may have put a page after the others were freed.
        if self.is_abandoned() {
            self.inserter.free();
        }
    }
}

/// The filler of the image of a capture.
struct CaptureFiller(Arc<PageCopier>);

impl Drop for CaptureFiller {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl Filler for CaptureFiller {
    fn fill_in_handler(&self, page: usize) -> bool {
        // Slots map the image when it is complete: see `capture_live`.
        self.0.arrived.has(page)
    }

    fn fill(&self, pages: PageRange) -> bool {
        self.0.fill(pages)
    }

    fn failure(&self) -> Option<String> {
        let errno = self.0.errno.load(Ordering::Acquire);
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
    pub(crate) fn capture_live(
        &self,
        pages: usize,
        captured: &[PageRange],
        memory: CapturedMemory,
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
        let filler = Arc::new(CaptureFiller(copier.clone()));
        let filling = FillState { filler, arrived, live: false };
        let backing = Arc::new(backing.filled_by(vec![all], filling).release_pages());
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
        let held = (memory, before.clone(), None);
        let (image, copier) = before.capture_live(PAGES, &captured, held, base).unwrap();
        let copier = copier.unwrap();
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
        if cfg!(miri) {
            // Mappings of one file share no memory there. The threads above are its part.
            return;
        }
        for page in 0..PAGES {
            let byte = if captured.iter().any(|run| run.contains(page)) { page + 1 } else { 0 };
            assert!(image.page_is(page, &[byte as u8; PAGE_SIZE]), "page {page}");
        }
        assert_eq!(before.differing_content(&image).unwrap(), captured);
    }

    fn capture_of(memory: &Arc<Reservation>, pages: usize) -> (Image, Arc<PageCopier>) {
        let all = PageRange::new(0, pages);
        memory.map_anonymous(all, Protection::ReadWrite).unwrap();
        let before = Image::zero(pages);
        let held = (memory.clone(), before.clone(), None);
        let base = memory.page_ptr(0);
        let (image, copier) = before.capture_live(pages, &[all], held, base).unwrap();
        (image, copier.unwrap())
    }

    #[test]
    fn the_end_of_a_capture_waits_for_readers_of_the_slot() {
        let memory = Arc::new(Reservation::new(4).unwrap());
        let (image, copier) = capture_of(&memory, 4);
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = copier.memory();
            scope.spawn(|| {
                copier.finish();
                over.store(true, Ordering::Release);
            });
            while !copier.arrived.all() {
                std::thread::yield_now();
            }
            (0..1000).for_each(|_| std::thread::yield_now());
            assert!(!over.load(Ordering::Acquire));
            drop(reader);
        });
        assert_eq!(Arc::strong_count(&memory), 1);
        image.complete().unwrap();
    }

    #[test]
    fn nothing_is_copied_from_the_slot_after_the_end_of_a_capture() {
        let memory = Arc::new(Reservation::new(4).unwrap());
        let (image, copier) = capture_of(&memory, 4);
        copier.keep(PageRange::new(1, 1));
        // As if a page could not be stored.
        copier.fail(&SysError::new(Call::UffdFill, 12));
        copier.finish();
        assert_eq!(Arc::strong_count(&memory), 1);
        assert!(image.complete().is_err());
        assert!(image.resolve(PageRange::new(2, 1)).is_err());
        image.resolve(PageRange::new(1, 1)).unwrap();
        assert!(!copier.arrived.has(2));
    }

    #[test]
    fn a_handler_waits_for_a_page_that_another_copies_also_in_a_failed_image() {
        let memory = Arc::new(Reservation::new(4).unwrap());
        let (_image, copier) = capture_of(&memory, 4);
        assert!(copier.states.take(2));
        copier.fail(&SysError::new(Call::UffdFill, 12));
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                copier.keep(PageRange::new(2, 1));
                over.store(true, Ordering::Release);
            });
            (0..1000).for_each(|_| std::thread::yield_now());
            assert!(!over.load(Ordering::Acquire));
            copier.states.secure(2);
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "every page is resident there")]
    fn a_capture_without_an_image_stores_nothing_and_keeps_nothing() {
        let memory = Arc::new(Reservation::new(4).unwrap());
        let (image, copier) = capture_of(&memory, 4);
        let view = Reservation::new(4).unwrap();
        let all = PageRange::new(0, 4);
        let (file, start) = image.inner.extents[0].backing.file();
        view.map_shared(all, Protection::Read, file, start).unwrap();
        copier.keep(PageRange::new(1, 1));
        assert_eq!(view.resident_pages(all), 1);
        let derived = image.clone();
        drop(image);
        assert!(!copier.is_abandoned());
        drop(derived);
        assert!(copier.is_abandoned());
        assert_eq!(Arc::strong_count(&memory), 1);
        copier.keep(PageRange::new(0, 3));
        assert!(copier.states.is_secured(2));
        assert!(!copier.arrived.has(2));
        assert_eq!(view.resident_pages(all), 0);
        // As a handler does that took the page before.
        copier.inserter.put(3, &[3; PAGE_SIZE]).unwrap();
        assert_eq!(view.resident_pages(all), 1);
        copier.finish();
        drop(copier);
        assert_eq!(view.resident_pages(all), 0);
    }
}
