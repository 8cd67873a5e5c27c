//! Zero memory from a stock instead of from faults, and what becomes of it.
//!
//! Where a slot comes by whole 2 MiB of zero memory, by growth or at its creation, a stock may move
//! resident huge pages there. Such a *block* is watched as a whole: it is write-protected by one entry of
//! the page table, and its first write opens, and reports, all of it. So a dense writer takes one
//! signal in 512 pages and no fault.
//!
//! The first reset after that judges each block. One in which at least an eighth of the pages were
//! written stays, as part of the write set, and is still a huge page: from then on growing costs one
//! change of protection and resetting one `memset`. Any other block is thrown away; its pages come from
//! faults like everybody's, and are watched one by one.
//!
//! Promises: a slot holds memory beyond what its guest touched only until its first reset after a growth,
//! and at most eight times what was written from then on. May break it: nothing that a guest does; the
//! judgement decides what is kept, never what is restored.

use afresh_sys::{HUGE_SIZE, PAGE_SIZE, PageRange, Protection, SysError};

use super::{Method, Slot};
use crate::tracker::push_run;
use crate::{ResetError, SlotError};

/// Pages in a block.
pub(super) const BLOCK: usize = HUGE_SIZE / PAGE_SIZE;
/// A block is kept when at least one page in so many was written.
const DENSE: usize = 8;
/// Pages between two that are looked at when the tracker reports blocks only.
const STRIDE: usize = 16;

impl Slot {
    /// The blocks that lie wholly in `range`: block boundaries are those of the address space.
    fn blocks_in(&self, range: PageRange) -> PageRange {
        let base = self.base() as usize / PAGE_SIZE;
        let start = (base + range.start).next_multiple_of(BLOCK) - base;
        let end = (base + range.end()) / BLOCK * BLOCK;
        PageRange::new(start, end.saturating_sub(base + start))
    }

    /// Whether blocks pay: the tracker must keep them while they are hidden, or they would be staged
    /// and thrown away by every run.
    fn takes_blocks(&self) -> bool {
        match &self.method {
            Method::WriteSet(tracker) => tracker.watches_blocks() && !self.adapt.discarding(),
            _ => false,
        }
    }

    /// Fills pages that the slot has just gained, which are accessible, untouched and not yet watched,
    /// from the stock. Returns the blocks filled, which are as yet unwatched too.
    pub(super) fn stage_growth(&mut self, range: PageRange) -> Result<PageRange, SysError> {
        let none = PageRange::new(range.start, 0);
        let Some(stock) = self.config.stock.clone() else { return Ok(none) };
        let blocks = self.blocks_in(range);
        if blocks.is_empty() || !self.takes_blocks() {
            return Ok(none);
        }
        let moved = stock.supply(&self.memory, self.absolute(blocks))?;
        let filled = PageRange::new(blocks.start, moved);
        self.staged.extend((0..moved).step_by(BLOCK).map(|at| blocks.start + at));
        Ok(filled)
    }

    /// Fills zero pages of the image, which was just placed and is not watched yet, from the stock.
    pub(super) fn stage_image(&mut self) -> Result<(), SlotError> {
        let Some(stock) = self.config.stock.clone() else { return Ok(()) };
        if !matches!(self.method, Method::WriteSet(_)) {
            return Ok(());
        }
        let mut left = self.config.stock_at_start / BLOCK * BLOCK;
        for hole in self.holes() {
            let blocks = self.blocks_in(hole);
            let wanted = PageRange::new(blocks.start, blocks.len.min(left));
            if wanted.is_empty() {
                continue;
            }
            let moved = stock.supply(&self.memory, self.absolute(wanted))?;
            self.staged.extend((0..moved).step_by(BLOCK).map(|at| wanted.start + at));
            left -= moved;
        }
        Ok(())
    }

    /// Runs of accessible pages that are mapped from no file.
    fn holes(&self) -> Vec<PageRange> {
        let mapped: Vec<PageRange> = self.image.chunks().iter().map(|chunk| chunk.range).collect();
        let mut holes = Vec::new();
        for region in self.accessible() {
            let mut from = region.start;
            for chunk in mapped.iter().filter_map(|range| range.intersect(region)) {
                holes.push(PageRange::new(from, chunk.start - from));
                from = chunk.end();
            }
            holes.push(PageRange::new(from, region.end() - from));
        }
        holes
    }

    /// Has staged blocks inside `range`, which is watched already, noticed as wholes.
    pub(super) fn watch_blocks(&mut self, range: PageRange) {
        if let Method::WriteSet(tracker) = &mut self.method
            && tracker.watches_blocks()
        {
            for start in self.staged.iter().copied().filter(|start| range.contains(*start)) {
                tracker.by_block(PageRange::new(start, BLOCK), true);
            }
        }
    }

    /// Blocks of `range`, which a run is growing into again, that proved dense while they consisted of small
    /// pages, because the stock had none to spare at the time: the stock is asked again.
    pub(super) fn restage(&mut self, range: PageRange) -> Result<(), SlotError> {
        if self.config.stock.is_none() || !self.takes_blocks() {
            return Ok(());
        }
        let blocks = self.blocks_in(range);
        let mut replaced = false;
        for start in (blocks.start..blocks.end()).step_by(BLOCK) {
            let block = PageRange::new(start, BLOCK);
            if self.settled.contains(&start) || self.write_set.count_in(block) * 2 < BLOCK {
                continue;
            }
            let staged = self.stage_growth(block)?;
            if staged.is_empty() {
                break;
            }
            self.write_set.forget(block);
            if let Method::WriteSet(tracker) = &mut self.method {
                tracker.rearm(block)?;
            }
            self.watch_blocks(block);
            replaced = true;
        }
        if replaced {
            self.plan()?;
        }
        Ok(())
    }

    /// Keeps the blocks that the run wrote densely and throws the others away. Must come after what was
    /// written has been learned, and before anything is copied back. Returns how many pages of the
    /// write set lay in staged blocks.
    #[cold]
    pub(super) fn judge_staged(&mut self) -> Result<usize, ResetError> {
        let (mut learned, mut used) = (0, 0);
        let mut wasted = Vec::new();
        for start in std::mem::take(&mut self.staged) {
            let block = PageRange::new(start, BLOCK);
            if let Method::WriteSet(tracker) = &mut self.method {
                tracker.by_block(block, false);
            }
            let touched = self.write_set.count_in(block);
            learned += touched;
            // While the mappings show another image than the slot's, a page must not be thrown away.
            let keep = self.stale || self.written_densely(block, touched);
            if keep {
                used += BLOCK;
            } else {
                push_run(&mut wasted, block);
            }
            // A block that was not touched may be tried again once it is.
            if keep || touched > 0 {
                self.settled.insert(start);
            }
        }
        for range in &wasted {
            // Mapped anew rather than discarded, so that faults bring small pages and the mapping joins
            // its neighbours.
            self.memory.map_anonymous(self.absolute(*range), Protection::ReadWrite)?;
            self.write_set.forget(*range);
            if let Method::WriteSet(tracker) = &mut self.method {
                tracker.rearm(*range)?;
            }
        }
        if !wasted.is_empty() {
            self.plan()?;
        }
        if let Some(stock) = &self.config.stock {
            stock.judged(used, wasted.iter().map(|range| range.len).sum());
        }
        Ok(learned)
    }

    /// Whether at least one page in [`DENSE`] of a staged block is not zero any more.
    fn written_densely(&self, block: PageRange, learned: usize) -> bool {
        let by_block = match &self.method {
            Method::WriteSet(tracker) => tracker.watches_blocks(),
            _ => return false,
        };
        if !by_block || learned < BLOCK {
            return learned * DENSE >= BLOCK;
        }
        let mut needed = BLOCK / STRIDE / DENSE;
        for page in (block.start..block.end()).step_by(STRIDE) {
            // SAFETY: a staged block is accessible until the reset that judges it hides it, and the caller
            // promises that no guest runs.
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

    /// All blocks have been thrown away with everything else.
    pub(super) fn forget_staged(&mut self) {
        self.settled.clear();
        for start in std::mem::take(&mut self.staged) {
            if let Method::WriteSet(tracker) = &mut self.method {
                tracker.by_block(PageRange::new(start, BLOCK), false);
            }
        }
    }
}
