//! Zero memory from a zero source instead of from faults, and its later use.
//!
//! Where a slot comes by whole 2 MiB of zero memory, by growth or at its creation, a zero source
//! may move resident huge pages there. Such a one is watched as a whole: it is write-protected by
//! one entry of the page table, and its first write opens, and reports, all of it. So a dense
//! writer takes one signal in 512 pages and no fault.
//!
//! The first reset after that judges each huge page. One in which at least an eighth of the pages
//! were written stays, as part of the write set, and is still a huge page: from then on growing
//! costs one change of protection and resetting one `memset`. Any other huge page is released; its
//! pages come from ordinary faults, and are watched one by one.
//!
//! Promises: a slot holds memory beyond its guest's touched pages only until its first reset after
//! a growth, and at most eight times the written pages from then on. May break it: nothing that a
//! guest does; the judgement decides which memory is kept, never which is restored.

use afresh_sys::{HUGE_PAGES, PAGE_SIZE, PageRange, Protection, SysError};

use super::{Method, Slot};
use crate::tracker::push_run;
use crate::{ResetError, SlotError};

/// A huge page is kept when at least one of this many pages was written.
const DENSE: usize = 8;
/// Pages between two that are looked at when the tracker reports huge pages only.
const STRIDE: usize = 16;

impl Slot {
    /// The huge pages entirely within `range`: their boundaries are those of the address space.
    fn huge_pages_in(&self, range: PageRange) -> PageRange {
        let base = self.base() as usize / PAGE_SIZE;
        let start = (base + range.start).next_multiple_of(HUGE_PAGES) - base;
        let end = (base + range.end()) / HUGE_PAGES * HUGE_PAGES;
        PageRange::new(start, end.saturating_sub(base + start))
    }

    /// Whether huge pages pay: the tracker must keep them while they are hidden, or they would be
    /// filled and thrown away by every run.
    fn takes_huge_pages(&self) -> bool {
        match &self.method {
            Method::WriteSet(tracker) => tracker.watches_huge_pages() && !self.adapt.discarding(),
            _ => false,
        }
    }

    /// Fills pages that the slot has just gained, which are accessible, untouched and not yet
    /// watched, from the zero source. Returns the huge pages filled, which are as yet unwatched
    /// too.
    pub(super) fn prezero_growth(&mut self, range: PageRange) -> Result<PageRange, SysError> {
        let none = PageRange::new(range.start, 0);
        let Some(source) = self.config.zero_source.clone() else { return Ok(none) };
        let huge = self.huge_pages_in(range);
        if huge.is_empty() || !self.takes_huge_pages() {
            return Ok(none);
        }
        let moved = source.supply(&self.space.memory, self.space.absolute(huge))?;
        let filled = PageRange::new(huge.start, moved);
        self.prezeroed.extend((0..moved).step_by(HUGE_PAGES).map(|at| huge.start + at));
        Ok(filled)
    }

    /// Fills zero pages of the image, which was just placed and is not watched yet, from the zero
    /// source.
    pub(super) fn prezero_image(&mut self) -> Result<(), SlotError> {
        let Some(source) = self.config.zero_source.clone() else { return Ok(()) };
        if !matches!(self.method, Method::WriteSet(_)) {
            return Ok(());
        }
        let mut left = self.config.zero_pages_at_start / HUGE_PAGES * HUGE_PAGES;
        for hole in self.holes() {
            let huge = self.huge_pages_in(hole);
            let wanted = PageRange::new(huge.start, huge.len.min(left));
            if wanted.is_empty() {
                continue;
            }
            let moved = source.supply(&self.space.memory, self.space.absolute(wanted))?;
            self.prezeroed.extend((0..moved).step_by(HUGE_PAGES).map(|at| wanted.start + at));
            left -= moved;
        }
        Ok(())
    }

    /// Runs of accessible pages that are mapped from no file.
    fn holes(&self) -> Vec<PageRange> {
        let mapped: Vec<PageRange> = self.image.runs().iter().map(|run| run.range).collect();
        let mut holes = Vec::new();
        for region in self.space.accessible() {
            let mut from = region.start;
            for run in mapped.iter().filter_map(|range| range.intersect(region)) {
                holes.push(PageRange::new(from, run.start - from));
                from = run.end();
            }
            holes.push(PageRange::new(from, region.end() - from));
        }
        holes
    }

    /// Has prezeroed huge pages inside `range`, which is watched already, noticed as wholes.
    pub(super) fn watch_huge_pages(&mut self, range: PageRange) {
        if let Method::WriteSet(tracker) = &mut self.method
            && tracker.watches_huge_pages()
        {
            for start in self.prezeroed.iter().copied().filter(|start| range.contains(*start)) {
                tracker.by_huge_page(PageRange::new(start, HUGE_PAGES), true);
            }
        }
    }

    /// Blocks of `range`, which a run is growing into again, that proved dense while they consisted
    /// of small pages, because the zero source was empty at the time: the zero source is queried
    /// again.
    pub(super) fn prezero_regrowth(&mut self, range: PageRange) -> Result<(), SlotError> {
        if self.config.zero_source.is_none() || !self.takes_huge_pages() {
            return Ok(());
        }
        let huge = self.huge_pages_in(range);
        let mut replaced = false;
        for start in (huge.start..huge.end()).step_by(HUGE_PAGES) {
            let huge = PageRange::new(start, HUGE_PAGES);
            if self.settled.contains(&start) || self.write_set.count_in(huge) * 2 < HUGE_PAGES {
                continue;
            }
            let prezeroed = self.prezero_growth(huge)?;
            if prezeroed.is_empty() {
                break;
            }
            self.write_set.forget(huge);
            if let Method::WriteSet(tracker) = &mut self.method {
                tracker.rearm(huge)?;
            }
            self.watch_huge_pages(huge);
            replaced = true;
        }
        if replaced {
            self.plan()?;
        }
        Ok(())
    }

    /// Keeps the huge pages that the run wrote densely and throws the others away. Must come after
    /// the written pages have been learned, and before anything is copied back. Returns how many
    /// pages of the write set were in prezeroed huge pages.
    #[cold]
    pub(super) fn settle_prezeroed(&mut self) -> Result<usize, ResetError> {
        let (mut learned, mut used) = (0, 0);
        let mut wasted = Vec::new();
        for start in std::mem::take(&mut self.prezeroed) {
            let huge = PageRange::new(start, HUGE_PAGES);
            if let Method::WriteSet(tracker) = &mut self.method {
                tracker.by_huge_page(huge, false);
            }
            let touched = self.write_set.count_in(huge);
            learned += touched;
            // While the mappings show another image than the slot's, a page must not be thrown
            // away.
            let keep = self.stale() || self.written_densely(huge, touched);
            if keep {
                used += HUGE_PAGES;
            } else {
                push_run(&mut wasted, huge);
            }
            // A huge page that was not touched may be tried again once it is.
            if keep || touched > 0 {
                self.settled.insert(start);
            }
        }
        for range in &wasted {
            // Mapped anew rather than discarded, so that faults bring small pages and the mapping
            // joins its neighbours.
            self.space.clear(*range, Protection::ReadWrite)?;
            self.write_set.forget(*range);
            if let Method::WriteSet(tracker) = &mut self.method {
                tracker.rearm(*range)?;
            }
        }
        if !wasted.is_empty() {
            self.plan()?;
        }
        if let Some(source) = &self.config.zero_source {
            source.report_use(used, wasted.iter().map(|range| range.len).sum());
        }
        Ok(learned)
    }

    /// Whether at least one page in [`DENSE`] of a prezeroed huge page is not zero any more.
    fn written_densely(&self, huge: PageRange, learned: usize) -> bool {
        let by_huge_page = match &self.method {
            Method::WriteSet(tracker) => tracker.watches_huge_pages(),
            _ => return false,
        };
        if !by_huge_page || learned < HUGE_PAGES {
            return learned * DENSE >= HUGE_PAGES;
        }
        let mut needed = HUGE_PAGES / STRIDE / DENSE;
        for page in (huge.start..huge.end()).step_by(STRIDE) {
            // SAFETY: a prezeroed huge page is accessible until the reset that judges it hides it,
            // and the caller promises that no guest runs.
            let live =
                unsafe { std::slice::from_raw_parts(self.base().add(page * PAGE_SIZE), PAGE_SIZE) };
            if !crate::image::is_zero(live) {
                needed -= 1;
                if needed == 0 {
                    return true;
                }
            }
        }
        false
    }

    /// All huge pages have been thrown away with everything else.
    pub(super) fn forget_prezeroed(&mut self) {
        self.settled.clear();
        for start in std::mem::take(&mut self.prezeroed) {
            if let Method::WriteSet(tracker) = &mut self.method {
                tracker.by_huge_page(PageRange::new(start, HUGE_PAGES), false);
            }
        }
    }
}
