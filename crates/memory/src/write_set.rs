//! The write set: pages that recent runs wrote, left writable and copied back at every reset.
//!
//! The set contains all pages that a run writes, so its excess costs copying, never correctness. It
//! learns a page when a tracker reports it, and evicts a page that several samples in a row found
//! unchanged; a page that comes back after it was evicted must stay idle twice as long. Some pages
//! are written by runs and left as they were (reference counts of Python objects). Such a page is
//! never found changed, and comes back at once: each time, its required idle time doubles.
//!
//! The copy list is kept flat and joined: runs of pages whose source is contiguous are one
//! `memcpy`.

use std::collections::HashMap;

use afresh_sys::planted::{self, Bug};
use afresh_sys::{PAGE_SIZE, PageRange};

use crate::Image;
use crate::tracker::push_run;

/// Samples in a row that must find a page unchanged before it is evicted.
const IDLE_SAMPLES: u8 = 3;
/// Maximum doublings of that for a page that keeps coming back. Noticing a page costs about fifty
/// times as much as copying it, so a page that has idled for as many runs may go: with few
/// doublings neither choice costs more than about twice the better one.
const MAX_RETURNS: u8 = 1;
/// The same for a page that came back before the next sample, so that it was in use while it was
/// found unchanged. Noticing it once in some five hundred runs costs nearly nothing.
const MAX_AT_ONCE: u8 = 4;
/// Pages written once that a slot which moves between images keeps open. Sampling them costs a few
/// microseconds at every move; each would cost about three when it is written while closed.
const CROWD: usize = 64;

/// The history of a page that was evicted.
#[derive(Clone, Copy, Debug)]
struct EvictedPage {
    /// The number of doublings of its required idle samples.
    doublings: u8,
    /// Samples that had been taken, if one found it idle.
    at: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    page: usize,
    /// Samples in a row that found the page unchanged.
    idle: u8,
    /// It came back after it was evicted, or changed between two checkpoints more than once.
    steady: bool,
}

/// One piece of the copy list.
#[derive(Clone, Copy, Debug)]
struct Copy {
    to: *mut u8,
    /// Null where the image is zero.
    from: *const u8,
    len: usize,
}

impl Copy {
    /// Restores the first `len` bytes.
    ///
    /// # Safety
    /// The target must be writable for `len` bytes and quiet; the source must be alive.
    #[inline]
    unsafe fn run(&self, len: usize) {
        // SAFETY: the caller's promise; `from` is a view of the image, which never overlaps a slot.
        unsafe {
            if self.from.is_null() {
                self.to.write_bytes(0, len);
            } else {
                self.to.copy_from_nonoverlapping(self.from, len);
            }
        }
    }
}

/// Learned pages and how to restore them.
#[derive(Debug, Default)]
pub(crate) struct WriteSet {
    /// Sorted by page.
    entries: Vec<Entry>,
    copies: Vec<Copy>,
    /// The number of `copies` below the slot's initial end; the others are accessible only in a run
    /// that has grown the slot.
    core: usize,
    /// Pages that were evicted once.
    evicted: HashMap<usize, EvictedPage>,
    /// Samples taken.
    samples: u32,
    /// The entry that the next look begins with.
    cursor: usize,
}

/// The result of a sample of the set.
#[derive(Debug, Default)]
pub(crate) struct SampleResult {
    /// Pages that differed from the image.
    pub(crate) changed: usize,
    /// Pages that this sample and the one before found unchanged, and that stay nevertheless.
    pub(crate) idle: usize,
    /// The same, of pages that have come back at once, so that runs are likely to write them and
    /// leave them as they found them.
    pub(crate) used: usize,
    /// Pages that left the set, as runs. They equal the image.
    pub(crate) evicted: Vec<PageRange>,
}

// SAFETY: the pointers in `copies` lead into the slot that owns this set and into the image that
// the slot holds; both move with it, and the addresses they name do not depend on the thread.
unsafe impl Send for WriteSet {}

impl WriteSet {
    /// Number of pages in the set.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The pages as runs, in order.
    pub(crate) fn runs(&self) -> Vec<PageRange> {
        let mut runs = Vec::new();
        for entry in &self.entries {
            push_run(&mut runs, PageRange::new(entry.page, 1));
        }
        runs
    }

    /// Adds runs that are sorted by their first page; returns how many pages were new.
    pub(crate) fn learn(&mut self, runs: &[PageRange]) -> usize {
        let before = self.entries.len();
        let mut merged = Vec::with_capacity(before + runs.len());
        let mut old = self.entries.iter().copied().peekable();
        for page in runs.iter().flat_map(|r| r.start..r.end()) {
            // A run before this one has the page too.
            if merged.last().is_some_and(|last: &Entry| last.page >= page) {
                continue;
            }
            while let Some(entry) = old.next_if(|e| e.page < page) {
                merged.push(entry);
            }
            let samples = self.samples;
            let entry = || {
                let evicted = self.evicted.get_mut(&page);
                let steady = evicted.is_some();
                if let Some(evicted) = evicted.filter(|evicted| evicted.at == Some(samples)) {
                    evicted.doublings = (evicted.doublings + 1).min(MAX_AT_ONCE);
                }
                Entry { page, idle: 0, steady }
            };
            merged.push(old.next_if(|e| e.page == page).unwrap_or_else(entry));
        }
        merged.extend(old);
        self.entries = merged;
        self.entries.len() - before
    }

    /// Number of pages of `range` in the set.
    pub(crate) fn count_in(&self, range: PageRange) -> usize {
        let below = |page| self.entries.partition_point(|e| e.page < page);
        below(range.end()) - below(range.start)
    }

    /// Forgets pages in `range`.
    pub(crate) fn forget(&mut self, range: PageRange) {
        self.entries.retain(|e| !range.contains(e.page));
    }

    /// Forgets everything, including evicted pages.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Rebuilds the copy list after the set or the image changed. `base` is the address of page 0,
    /// `initial_end` the page at which the slot ends when it has not grown.
    pub(crate) fn plan(&mut self, image: &Image, base: *mut u8, initial_end: usize) {
        self.copies.clear();
        self.core = 0;
        let mut backing = std::ptr::null();
        for page in self.entries.iter().map(|e| e.page) {
            let to = base.wrapping_add(page * PAGE_SIZE);
            let source = image.source(page);
            let from = source.map_or(std::ptr::null(), |source| source.from);
            // Views of two files may happen to be adjacent; no copy crosses from one into the next.
            let same_file = source.is_some_and(|source| source.backing == backing);
            backing = source.map_or(std::ptr::null(), |source| source.backing);
            if let Some(last) = self.copies.last_mut() {
                let continues = last.to.wrapping_add(last.len) == to;
                let source_continues = match (last.from.is_null(), from.is_null()) {
                    (true, true) => true,
                    (false, false) => last.from.wrapping_add(last.len) == from && same_file,
                    _ => false,
                };
                if continues && source_continues && page != initial_end {
                    last.len += PAGE_SIZE;
                    continue;
                }
            }
            self.copies.push(Copy { to, from, len: PAGE_SIZE });
            if page < initial_end {
                self.core = self.copies.len();
            }
        }
    }

    /// Copies the pages below the initial end back from the image.
    ///
    /// # Safety
    /// The slot and image that [`WriteSet::plan`] was given must be alive, the pages accessible and
    /// writable, and no guest may run.
    #[inline]
    pub(crate) unsafe fn copy_back(&self) {
        for copy in planted::but_last(Bug::CopyBack, &self.copies[..self.core]) {
            // SAFETY: the caller's promise.
            unsafe { copy.run(copy.len) };
        }
    }

    /// Copies the pages between the initial end and `end` (an address) back from the image.
    ///
    /// # Safety
    /// As [`WriteSet::copy_back`], for pages up to `end`.
    pub(crate) unsafe fn copy_back_grown(&self, end: *mut u8) {
        for copy in planted::but_last(Bug::GrownContent, &self.copies[self.core..]) {
            let len = copy.len.min((end as usize).saturating_sub(copy.to as usize));
            // SAFETY: the caller's promise.
            unsafe { copy.run(len) };
        }
    }

    /// Compares the next `pages` pages below `initial_end` with the image, changing nothing.
    /// Returns how many were compared and how many of them differ.
    ///
    /// # Safety
    /// As [`WriteSet::copy_back`].
    #[cold]
    pub(crate) unsafe fn look(
        &mut self,
        image: &Image,
        base: *mut u8,
        initial_end: usize,
        pages: usize,
    ) -> (usize, usize) {
        self.look_by(initial_end, pages, |page| {
            // SAFETY: the caller's promise: the page is accessible and quiet for the time of this
            // call.
            let live = unsafe {
                std::slice::from_raw_parts(base.wrapping_add(page * PAGE_SIZE), PAGE_SIZE)
            };
            !image.page_is(page, live)
        })
    }

    /// As [`WriteSet::look`], with `differs` as the comparison.
    pub(crate) fn look_by(
        &mut self,
        initial_end: usize,
        pages: usize,
        mut differs: impl FnMut(usize) -> bool,
    ) -> (usize, usize) {
        let below = self.entries.partition_point(|entry| entry.page < initial_end);
        let pages = pages.min(below);
        let mut written = 0;
        for _ in 0..pages {
            self.cursor = if self.cursor + 1 < below { self.cursor + 1 } else { 0 };
            written += usize::from(differs(self.entries[self.cursor].page));
        }
        (pages, written)
    }

    /// Like [`WriteSet::copy_back`] with everything below page `end`, but looks which pages really
    /// changed, and removes those from the set that have been idle for long enough.
    ///
    /// # Safety
    /// As [`WriteSet::copy_back`], for pages below `end`.
    pub(crate) unsafe fn sample(
        &mut self,
        image: &Image,
        base: *mut u8,
        initial_end: usize,
        end: usize,
    ) -> SampleResult {
        let place = |page: usize| base.wrapping_add(page * PAGE_SIZE);
        // SAFETY: the caller's promise.
        let found =
            self.sample_by(end, |page| unsafe { restore_if_changed(image, page, place(page)) });
        if !found.evicted.is_empty() {
            self.plan(image, base, initial_end);
        }
        found
    }

    /// As [`WriteSet::sample`], for pages that `changed` restores; it returns whether they
    /// differed.
    pub(crate) fn sample_by(
        &mut self,
        end: usize,
        mut changed: impl FnMut(usize) -> bool,
    ) -> SampleResult {
        let mut found = SampleResult::default();
        self.samples = self.samples.wrapping_add(1);
        let (known, samples) = (&mut self.evicted, self.samples);
        let left = self.entries.last().filter(|_| planted::is(Bug::Sample)).map(|e| e.page);
        self.entries.retain_mut(|entry| {
            if entry.page >= end || left == Some(entry.page) {
                return true;
            }
            if changed(entry.page) {
                found.changed += 1;
                entry.idle = 0;
                return true;
            }
            entry.idle = entry.idle.saturating_add(1);
            if entry.idle < patience(known, entry.page) {
                let used = comes_at_once(known, entry.page);
                let count = if used { &mut found.used } else { &mut found.idle };
                *count += usize::from(entry.idle > 1);
                return true;
            }
            note(known, entry.page, Some(samples));
            push_run(&mut found.evicted, PageRange::new(entry.page, 1));
            false
        });
        found
    }

    /// A checkpoint found `changed` (sorted) written since the one before. Removes pages that have
    /// been idle for long enough, and most of a crowd that was written only once; they equal the
    /// image now. The copy list must be planned anew.
    pub(crate) fn settle(&mut self, changed: &[PageRange]) -> Vec<PageRange> {
        let mut changed = changed.iter().copied().peekable();
        let mut written = |page: usize| {
            while changed.next_if(|range| range.end() <= page).is_some() {}
            changed.peek().is_some_and(|range| range.contains(page))
        };
        let crowded = self.passing() > CROWD;
        // A checkpoint finds pages idle as a sample does.
        self.samples = self.samples.wrapping_add(1);
        let (known, samples) = (&mut self.evicted, self.samples);
        let mut evicted = Vec::new();
        self.entries.retain_mut(|entry| {
            let stays = if written(entry.page) {
                entry.idle = 0;
                std::mem::replace(&mut entry.steady, true) || !crowded
            } else {
                entry.idle = entry.idle.saturating_add(1);
                entry.idle < patience(known, entry.page) && (entry.steady || !crowded)
            };
            if !stays {
                note(known, entry.page, (entry.idle > 0).then_some(samples));
                push_run(&mut evicted, PageRange::new(entry.page, 1));
            }
            stays
        });
        evicted
    }

    /// Removes a crowd of pages that equal the image and were written once; as for
    /// [`WriteSet::settle`].
    pub(crate) fn disperse(&mut self) -> Vec<PageRange> {
        let mut evicted = Vec::new();
        if self.passing() > CROWD {
            self.entries.retain(|entry| {
                if !entry.steady {
                    note(&mut self.evicted, entry.page, None);
                    push_run(&mut evicted, PageRange::new(entry.page, 1));
                }
                entry.steady
            });
        }
        evicted
    }

    /// Pages that need not come back.
    fn passing(&self) -> usize {
        self.entries.iter().filter(|entry| !entry.steady).count()
    }
}

/// Samples in a row that must find the page unchanged before it is evicted.
fn patience(known: &HashMap<usize, EvictedPage>, page: usize) -> u8 {
    IDLE_SAMPLES << known.get(&page).map_or(0, |evicted| evicted.doublings)
}

/// Whether the page came back at once when it was evicted, more than once: one that is written, and
/// left as it was found.
fn comes_at_once(known: &HashMap<usize, EvictedPage>, page: usize) -> bool {
    known.get(&page).is_some_and(|evicted| evicted.doublings > MAX_RETURNS)
}

/// Notes that the page is evicted, and after how many samples where one of them found it idle.
fn note(known: &mut HashMap<usize, EvictedPage>, page: usize, at: Option<u32>) {
    let doublings = known.get(&page).map_or(MAX_RETURNS, |evicted| evicted.doublings);
    known.insert(page, EvictedPage { doublings, at });
}

/// Makes the page at `to` equal to the image's; returns whether it differed.
///
/// # Safety
/// The page must be readable and, if it may differ, writable, and must not be used elsewhere during
/// the call.
pub(crate) unsafe fn restore_if_changed(image: &Image, page: usize, to: *mut u8) -> bool {
    // SAFETY: the caller's promise: the page is quiet for the time of this call.
    let live = unsafe { std::slice::from_raw_parts(to, PAGE_SIZE) };
    match image.page(page) {
        Some(content) if live != content => {
            // SAFETY: as above, and `live` is not used again.
            unsafe { to.copy_from_nonoverlapping(content.as_ptr(), PAGE_SIZE) };
            true
        }
        None if !crate::image::is_zero(live) => {
            // SAFETY: as above, and `live` is not used again.
            unsafe { to.write_bytes(0, PAGE_SIZE) };
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learning_merges_in_order_and_counts_only_new_pages() {
        let mut set = WriteSet::default();
        assert_eq!(set.learn(&[PageRange::new(4, 2), PageRange::new(9, 1)]), 3);
        assert_eq!(set.learn(&[PageRange::new(0, 1), PageRange::new(5, 3)]), 3);
        let runs = [PageRange::new(0, 1), PageRange::new(4, 4), PageRange::new(9, 1)];
        assert_eq!(set.runs(), runs);
    }

    #[test]
    fn a_page_of_two_runs_is_learned_once() {
        let mut set = WriteSet::default();
        set.learn(&[PageRange::new(6, 1)]);
        let runs = [PageRange::new(4, 6), PageRange::new(5, 2), PageRange::new(8, 4)];
        assert_eq!(set.learn(&runs), 7);
        assert_eq!((set.len(), set.runs()), (8, vec![PageRange::new(4, 8)]));
    }

    /// Samples until page 1 of two is evicted, once it was learned.
    fn samples_until_evicted(set: &mut WriteSet, memory: &mut [u64]) -> usize {
        let (image, base) = (Image::zero(2), memory.as_mut_ptr().cast::<u8>());
        set.learn(&[PageRange::new(1, 1)]);
        set.plan(&image, base, 2);
        // SAFETY: `memory` is two pages that only the test uses.
        (1..).find(|_| !unsafe { set.sample(&image, base, 2, 2) }.evicted.is_empty()).unwrap()
    }

    #[test]
    fn an_idle_page_is_shed_and_must_idle_longer_when_it_returns() {
        let mut memory = vec![0u64; 2 * PAGE_SIZE / 8];
        let mut set = WriteSet::default();
        let first = samples_until_evicted(&mut set, &mut memory);
        assert_eq!(first, usize::from(IDLE_SAMPLES));
        for _ in 0..3 {
            // While it was away another sample was taken.
            set.sample_by(0, |_| true);
            assert_eq!(samples_until_evicted(&mut set, &mut memory), 2 * first);
        }
    }

    #[test]
    fn a_page_that_every_sixth_run_leaves_as_it_was_stays_between_checkpoints() {
        let mut set = WriteSet::default();
        let page = [PageRange::new(1, 1)];
        let mut learned = 0;
        for run in 0..96 {
            if run % 6 == 0 {
                learned += set.learn(&page);
            }
            set.settle(&[]);
        }
        // In runs 0, 6, 12, 24 and 48, where each would be noticed without a longer patience.
        assert_eq!(learned, 5);
    }

    #[test]
    fn a_page_that_is_always_left_as_it_was_is_shed_ever_more_rarely() {
        let mut memory = vec![0u64; 2 * PAGE_SIZE / 8];
        let mut set = WriteSet::default();
        let evicted: Vec<_> =
            (0..6).map(|_| samples_until_evicted(&mut set, &mut memory)).collect();
        assert_eq!(evicted, [3, 12, 24, 48, 48, 48]);
    }
}
