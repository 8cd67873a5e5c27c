//! States of the pages of a VMM, and the work that is left for them.
//!
//! Everything here is behind one lock. Pages are put in place, and events are read, while it is
//! held: a VMM that discards a page continues when the event has been read, and content that was
//! read from the source before that must not come afterwards. The source is read while it is not
//! held.
//!
//! Promises: what a VMM sends makes it grow no further than its mappings, which are no larger than
//! the source.

use std::collections::VecDeque;

use afresh_sys::{PAGE_SIZE, PageRange};

use super::ServeCounts;
use super::handshake::Mapping;
use super::page::Page;
use super::ranges::runs;
use super::watch::Watch;
use super::watches::Watches;

/// The state of a page.
#[derive(Clone, Copy, Debug)]
struct PageState {
    page: Page,
    /// A fault on it is in the queue.
    asked: bool,
    /// A fault on it waits for the thread that fills it.
    awaited: bool,
    /// There was a fault on it.
    touched: bool,
}

/// Bytes that the pages of a mapping cost the pager.
pub(super) fn cost(mapping: &Mapping) -> usize {
    let cleared = if mapping.unit > 1 { size_of::<bool>() } else { 0 };
    mapping.pages.saturating_mul(size_of::<PageState>() + cleared)
}

/// Ranges of requests that can be queued.
const MAX_QUEUED: usize = 1 << 16;

/// Pages of a VMM by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageCounts {
    pub(super) missing: usize,
    pub(super) filling: usize,
    pub(super) present: usize,
    pub(super) removed: usize,
    pub(super) unmapped: usize,
}

impl PageCounts {
    /// Pages whose content is still to come.
    pub(super) fn awaited(self) -> usize {
        self.missing + self.filling
    }

    /// Pages that are neither there nor known to be zero.
    pub(super) fn without_content(self) -> usize {
        self.awaited() + self.removed
    }

    fn of(&mut self, page: Page) -> &mut usize {
        match page {
            Page::Missing => &mut self.missing,
            Page::Filling => &mut self.filling,
            Page::Present => &mut self.present,
            Page::Removed => &mut self.removed,
            Page::Unmapped => &mut self.unmapped,
        }
    }
}

/// The progress of streaming.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamPhase {
    /// The working set comes first.
    Set,
    /// One thread reads it.
    ReadsSet,
    /// The next: a mapping and a page of it.
    From(usize, usize),
}

/// The next task of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Answer a fault on this page of this mapping.
    Fault(usize, usize),
    /// Put the working set in place.
    WorkingSet,
    /// Fill these pages of this mapping.
    Stream(usize, PageRange),
}

/// The pages of all mappings.
#[derive(Debug)]
pub(super) struct Pages {
    known: Vec<Vec<PageState>>,
    counts: PageCounts,
    /// Addresses of the mappings in the VMM, which can move them.
    bases: Vec<usize>,
    /// Pages that each mapping has in one page of the kernel.
    units: Vec<usize>,
    /// Whether the VMM has discarded a page, with only a part of its huge page, before that was in
    /// place. Such a page is zero once the huge page is filled. Empty without huge pages.
    cleared: Vec<Vec<bool>>,
    /// Faults, oldest first, each page once.
    faults: VecDeque<(usize, usize)>,
    /// Pages that were requested ahead of the rest.
    requested: VecDeque<(usize, PageRange)>,
    ahead: StreamPhase,
    /// Whether pages are streamed ahead.
    streams: bool,
    /// Whether only pages with a fault were filled so far.
    recording: bool,
    pub(super) served: ServeCounts,
    /// Write protection, for an image that is frozen or soon will be.
    pub(super) watches: Watches,
}

impl Pages {
    pub(super) fn new(mappings: &[Mapping], working_set: bool, streams: bool) -> Self {
        let missing =
            PageState { page: Page::Missing, asked: false, awaited: false, touched: false };
        let pages = mappings.iter().map(|mapping| mapping.pages).sum();
        Self {
            known: mappings.iter().map(|mapping| vec![missing; mapping.pages]).collect(),
            counts: PageCounts { missing: pages, ..PageCounts::default() },
            bases: mappings.iter().map(|mapping| mapping.base).collect(),
            units: mappings.iter().map(|mapping| mapping.unit).collect(),
            cleared: mappings
                .iter()
                .map(|mapping| vec![false; if mapping.unit > 1 { mapping.pages } else { 0 }])
                .collect(),
            faults: VecDeque::new(),
            requested: VecDeque::new(),
            ahead: if working_set { StreamPhase::Set } else { StreamPhase::From(0, 0) },
            streams,
            recording: false,
            served: ServeCounts::default(),
            watches: Watches::default(),
        }
    }

    /// Pages are filled by their own fault only, until something is requested.
    pub(super) fn record(&mut self) {
        (self.streams, self.recording) = (false, true);
    }

    pub(super) fn is_recording(&self) -> bool {
        self.recording
    }

    pub(super) fn counts(&self) -> PageCounts {
        self.counts
    }

    /// The address of a page in the VMM.
    pub(super) fn address(&self, mapping: usize, page: usize) -> usize {
        self.bases[mapping] + page * PAGE_SIZE
    }

    /// The mapping and the page at an address of the VMM.
    pub(super) fn page_at(&self, address: usize) -> Option<(usize, usize)> {
        let offsets = self.bases.iter().map(|base| address.checked_sub(*base));
        offsets.enumerate().find_map(|(mapping, offset)| {
            let page = offset? / PAGE_SIZE;
            (page < self.known[mapping].len()).then_some((mapping, page))
        })
    }

    /// The VMM has moved `len` bytes; `false` if they are only a part of a mapping.
    pub(super) fn relocate(&mut self, from: usize, to: usize, len: usize) -> bool {
        for (base, known) in self.bases.iter_mut().zip(&self.known) {
            let bytes = known.len() * PAGE_SIZE;
            if (*base, bytes) == (from, len) {
                *base = to;
                if let Some(watch) = self.watches.live_mut() {
                    watch.note_move();
                }
                return true;
            }
            if from < *base + bytes && *base < from.saturating_add(len) {
                return false;
            }
        }
        true
    }

    /// Streams everything.
    pub(super) fn request_all(&mut self) {
        (self.streams, self.recording) = (true, false);
    }

    /// Fills pages of a mapping before others are streamed; `false` if too many ranges are waiting.
    pub(super) fn request(&mut self, mapping: usize, pages: PageRange) -> bool {
        if self.requested.len() >= MAX_QUEUED {
            return false;
        }
        self.recording = false;
        self.requested.push_back((mapping, pages));
        true
    }

    /// The pages of a mapping for which `is` is true.
    pub(super) fn ranges(
        &self,
        mapping: usize,
        is: impl Fn(Page, bool) -> bool,
    ) -> impl Iterator<Item = PageRange> {
        let found =
            runs(self.known[mapping].iter().map(move |known| is(known.page, known.touched)));
        found.filter_map(|(run, is)| is.then_some(run))
    }

    /// Begins to watch writes: every page that is in place is open for them now.
    pub(super) fn begin_watch(&mut self, mut watch: Watch) {
        for (mapping, known) in self.known.iter().enumerate() {
            for (page, known) in known.iter().enumerate() {
                watch.note(mapping, PageRange::new(page, 1), known.page);
            }
        }
        self.watches.begin(watch);
    }

    /// Notes pages that are in place though nothing has filled them: the VMM had them before its
    /// handshake.
    pub(super) fn adopt(&mut self, mapping: usize, pages: PageRange) {
        for page in pages.start..pages.end() {
            if matches!(self.state(mapping, page), Page::Missing | Page::Filling) {
                let page = PageRange::new(page, 1);
                self.request_again(mapping, page);
                self.set(mapping, page, Page::Present);
            }
        }
    }

    pub(super) fn state(&self, mapping: usize, page: usize) -> Page {
        self.known[mapping][page].page
    }

    /// The pages from `from` on, before `end`, that are in the same state as the first.
    pub(super) fn run(&self, mapping: usize, from: usize, end: usize) -> PageRange {
        let state = self.state(mapping, from);
        let len = self.known[mapping][from..end].iter().take_while(|k| k.page == state).count();
        PageRange::new(from, len)
    }

    pub(super) fn set(&mut self, mapping: usize, pages: PageRange, state: Page) {
        for known in &mut self.known[mapping][pages.start..pages.end()] {
            *self.counts.of(known.page) -= 1;
            *self.counts.of(state) += 1;
            known.page = state;
            // Filling a page wakes its waiters.
            known.awaited &= state != Page::Present;
        }
        if !matches!(state, Page::Missing | Page::Filling)
            && let Some(cleared) = self.cleared[mapping].get_mut(pages.start..pages.end())
        {
            cleared.fill(false);
        }
        if let Some(watch) = self.watches.live_mut() {
            watch.note(mapping, pages, state);
        }
    }

    /// The state of a page that a fault was on. If a thread fills it, the fault waits for that.
    pub(super) fn look(&mut self, mapping: usize, page: usize) -> Page {
        let known = &mut self.known[mapping][page];
        known.awaited |= known.page == Page::Filling;
        known.page
    }

    /// Pages are not filled by the thread that had claimed them: faults that waited for that are
    /// requested again.
    pub(super) fn request_again(&mut self, mapping: usize, pages: PageRange) {
        for page in pages.start..pages.end() {
            let known = &mut self.known[mapping][page];
            if std::mem::take(&mut known.awaited) && !known.asked {
                known.asked = true;
                self.faults.push_back((mapping, page));
            }
        }
    }

    /// Leaves those of `pages` that are still being filled for later.
    pub(super) fn give_up(&mut self, mapping: usize, pages: PageRange) {
        for run in self.filling(mapping, pages) {
            self.set(mapping, run, Page::Missing);
            self.request_again(mapping, run);
            self.requested.push_back((mapping, run));
        }
    }

    /// Takes the missing ones among `pages` for the calling thread to fill.
    pub(super) fn claim(&mut self, mapping: usize, pages: PageRange) -> Vec<PageRange> {
        let mut claimed = Vec::new();
        let mut at = pages.start;
        while at < pages.end() {
            let run = self.run(mapping, at, pages.end());
            if self.state(mapping, at) == Page::Missing {
                self.set(mapping, run, Page::Filling);
                claimed.push(run);
            }
            at = run.end();
        }
        claimed
    }

    /// Those of `pages` that a thread fills.
    pub(super) fn filling(&self, mapping: usize, pages: PageRange) -> Vec<PageRange> {
        let mut filling = Vec::new();
        let mut at = pages.start;
        while at < pages.end() {
            let run = self.run(mapping, at, pages.end());
            if self.state(mapping, at) == Page::Filling {
                filling.push(run);
            }
            at = run.end();
        }
        filling
    }

    /// Notes a fault.
    pub(super) fn note_fault(&mut self, mapping: usize, page: usize) {
        self.served.faults += 1;
        let known = &mut self.known[mapping][page];
        known.touched = true;
        if !known.asked {
            known.asked = true;
            self.faults.push_back((mapping, page));
        }
    }

    /// Notes that a range was discarded, or is mapped no more, and what its pages are then.
    pub(super) fn lose(&mut self, start: usize, end: usize, state: Page) {
        self.served.removals += 1;
        for number in 0..self.bases.len() {
            let base = self.bases[number];
            let (from, to) =
                (start.max(base), end.min(base + self.known[number].len() * PAGE_SIZE));
            if from < to {
                let first = (from - base) / PAGE_SIZE;
                let lost = PageRange::new(first, (to - base) / PAGE_SIZE - first);
                // A huge page is freed as a whole.
                let unit = if state == Page::Removed { self.units[number] } else { 1 };
                let whole = lost.start.next_multiple_of(unit)..lost.end() / unit * unit;
                if whole.is_empty() {
                    self.clear(number, lost);
                    continue;
                }
                self.clear(number, PageRange::new(lost.start, whole.start - lost.start));
                self.set(number, PageRange::new(whole.start, whole.len()), state);
                self.clear(number, PageRange::new(whole.end, lost.end() - whole.end));
            }
        }
    }

    /// Notes that the VMM has discarded parts of huge pages. The kernel clears those of a huge page
    /// that is in place, and does nothing where it is not.
    fn clear(&mut self, mapping: usize, pages: PageRange) {
        for page in pages.start..pages.end() {
            let waits = matches!(self.state(mapping, page), Page::Missing | Page::Filling);
            self.cleared[mapping][page] |= waits;
        }
    }

    /// Whether a page is zero once its huge page is filled, whatever the source has.
    pub(super) fn is_cleared(&self, mapping: usize, page: usize) -> bool {
        self.cleared[mapping].get(page).is_some_and(|cleared| *cleared)
    }

    /// The next task of a thread: faults first. `batch` is the number of pages streamed at a time,
    /// if the thread can stream.
    pub(super) fn next(&mut self, mappings: &[Mapping], batch: Option<usize>) -> Option<Job> {
        if let Some((mapping, page)) = self.faults.pop_front() {
            self.known[mapping][page].asked = false;
            return Some(Job::Fault(mapping, page));
        }
        let batch = batch?;
        if let Some((number, pages)) = self.requested.pop_front() {
            let now = batch.max(mappings[number].unit).min(pages.len);
            let rest = PageRange::new(pages.start + now, pages.len - now);
            if !rest.is_empty() {
                self.requested.push_front((number, rest));
            }
            return Some(Job::Stream(number, PageRange::new(pages.start, now)));
        }
        if !self.streams {
            return None;
        }
        match self.ahead {
            StreamPhase::Set => {
                self.ahead = StreamPhase::ReadsSet;
                Some(Job::WorkingSet)
            }
            StreamPhase::ReadsSet => None,
            StreamPhase::From(number, start) => {
                let mapping = mappings.get(number)?;
                let len = batch.max(mapping.unit).min(mapping.pages - start);
                self.ahead = if start + len < mapping.pages {
                    StreamPhase::From(number, start + len)
                } else {
                    StreamPhase::From(number + 1, 0)
                };
                Some(Job::Stream(number, PageRange::new(start, len)))
            }
        }
    }

    /// The working set is in place.
    pub(super) fn set_is_there(&mut self) {
        self.ahead = StreamPhase::From(0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: usize = 512;
    const BASE: usize = 1 << 40;

    #[test]
    fn a_discarded_part_of_a_huge_page_leaves_the_rest_to_the_source() {
        let mapping = Mapping { base: BASE, pages: 4 * UNIT, offset: 0, unit: UNIT };
        let mut pages = Pages::new(&[mapping], false, true);
        pages.claim(0, PageRange::new(0, UNIT));
        pages.set(0, PageRange::new(3 * UNIT, UNIT), Page::Present);
        let mut discard = |first: usize, end: usize| {
            pages.lose(BASE + first * PAGE_SIZE, BASE + end * PAGE_SIZE, Page::Removed);
        };
        // A part of the huge page that is being filled and one that is missing, with a whole one
        // between them; a part inside a huge page that is in place.
        discard(UNIT - 2, 2 * UNIT + 1);
        discard(2 * UNIT + 5, 2 * UNIT + 6);
        discard(3 * UNIT + 5, 3 * UNIT + 6);
        let states: Vec<Page> = (0..4).map(|unit| pages.state(0, unit * UNIT + 5)).collect();
        assert_eq!(states, [Page::Filling, Page::Removed, Page::Missing, Page::Present]);
        for unit in 0..4 {
            let all = PageRange::new(unit * UNIT, UNIT);
            assert_eq!(pages.run(0, all.start, all.end()), all, "huge page {unit}");
        }
        let cleared = |pages: &Pages| -> Vec<usize> {
            (0..4 * UNIT).filter(|page| pages.is_cleared(0, *page)).collect()
        };
        assert_eq!(cleared(&pages), [UNIT - 2, UNIT - 1, 2 * UNIT, 2 * UNIT + 5]);
        pages.give_up(0, PageRange::new(0, UNIT));
        assert_eq!(cleared(&pages).len(), 4);
        pages.set(0, PageRange::new(0, UNIT), Page::Present);
        assert_eq!(cleared(&pages), [2 * UNIT, 2 * UNIT + 5]);
    }
}
