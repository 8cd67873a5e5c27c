//! The record of write protection: what each page of a VMM was when its image was frozen, and the
//! pages that were written since.
//!
//! Promises: a page of a frozen image is copied before it is opened for writing. An image that has
//! lost a page has failed, and is never stored. The record and the copies are charged to the
//! budget.
//!
//! May break it: devices that write to memory around its page tables, as a passed-through device
//! does.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_budget::{Budget, BudgetExceeded, Charge};
use afresh_sys::planted::{self, Bug};
use afresh_sys::{PAGE_SIZE, PageRange, ProcessMemory};

use super::page::Page;
use super::ranges::runs;
use super::watch_end::{LossReason, WatchId};

/// Pages between two open ones that are protected again with them: cheaper than a call for each.
const MERGE_GAP: usize = 16;
/// Bytes that a copy costs: its page, and its place in the table.
const COPY_COST: usize = PAGE_SIZE + 64;

/// Where the content of a page of the image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Source,
    Process,
    Zero,
}

/// A page of a frozen image, copied before the guest wrote to it.
type CopiedPage = Box<[u8; PAGE_SIZE]>;

/// The record for one VMM.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) id: WatchId,
    pub(super) process: Arc<ProcessMemory>,
    mappings: Vec<WatchedMapping>,
    /// Whether every page in place was looked at once.
    prepared: bool,
    frozen: bool,
    /// Copies by address.
    copies: HashMap<usize, CopiedPage>,
    charge: Option<Charge>,
    /// Of the budget, for the record itself.
    _record: Option<Charge>,
    loss: Option<LossReason>,
}

/// The pages of a mapping.
#[derive(Debug)]
struct WatchedMapping {
    origins: Vec<Origin>,
    /// A bit for each page that is in place and not protected.
    open: Vec<u64>,
}

impl WatchedMapping {
    fn set_open(&mut self, page: usize, open: bool) {
        let (word, bit) = (&mut self.open[page / 64], 1 << (page % 64));
        if open { *word |= bit } else { *word &= !bit }
    }

    fn are_in_place(&self, mut pages: Range<usize>) -> bool {
        pages.all(|page| self.origins[page] == Origin::Process)
    }

    fn is_open(&self, page: usize) -> bool {
        self.open[page / 64] >> (page % 64) & 1 == 1
    }
}

impl Watch {
    /// A record for mappings of so many pages each, in no known state.
    pub(super) fn new(
        process: Arc<ProcessMemory>,
        mappings: impl Iterator<Item = usize>,
        budget: Option<&Budget>,
    ) -> Result<Self, BudgetExceeded> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mappings: Vec<usize> = mappings.collect();
        let bytes = mappings.iter().map(|pages| pages + pages.div_ceil(8)).sum();
        let record = budget.map(|budget| budget.charge(bytes)).transpose()?;
        let watched = |pages: usize| WatchedMapping {
            origins: vec![Origin::Source; pages],
            open: vec![0; pages.div_ceil(64)],
        };
        Ok(Self {
            id: WatchId::new(NEXT.fetch_add(1, Ordering::Relaxed)),
            process,
            mappings: mappings.into_iter().map(watched).collect(),
            prepared: false,
            frozen: false,
            copies: HashMap::new(),
            charge: budget.map(Budget::empty),
            _record: record,
            loss: None,
        })
    }

    pub(super) fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// Whether it knows all pages that are in place, so that it can be frozen.
    pub(super) fn is_prepared(&self) -> bool {
        self.prepared
    }

    pub(super) fn note_prepared(&mut self) {
        self.prepared = true;
    }

    /// Notes that pages are in another state now.
    pub(super) fn note(&mut self, mapping: usize, pages: PageRange, state: Page) {
        // The image does not change any more.
        if self.frozen {
            return;
        }
        let watched = &mut self.mappings[mapping];
        for page in pages.start..pages.end() {
            watched.origins[page] = match state {
                Page::Missing | Page::Filling => Origin::Source,
                Page::Present => Origin::Process,
                Page::Removed | Page::Unmapped => Origin::Zero,
            };
            watched.set_open(page, state == Page::Present);
        }
    }

    /// The open pages among `pages` of a mapping, with short gaps of pages that are in place as
    /// well. In a gap without a page there may be no mapping, which the kernel refuses to protect,
    /// or protection would outlive the fill.
    pub(super) fn open_runs(&self, mapping: usize, pages: PageRange) -> Vec<PageRange> {
        let watched = &self.mappings[mapping];
        let mut runs: Vec<PageRange> = Vec::new();
        let mut page = pages.start;
        while page < pages.end() {
            let rest = watched.open[page / 64] >> (page % 64);
            if rest == 0 {
                page = (page / 64 + 1) * 64;
                continue;
            }
            page += rest.trailing_zeros() as usize;
            if page >= pages.end() {
                break;
            }
            match runs.last_mut() {
                Some(last)
                    if page - last.end() <= MERGE_GAP && watched.are_in_place(last.end()..page) =>
                {
                    last.len = page + 1 - last.start;
                }
                _ => runs.push(PageRange::new(page, 1)),
            }
            page += 1;
        }
        runs
    }

    /// Open pages of all mappings.
    pub(super) fn open_pages(&self) -> usize {
        let bits = |watched: &WatchedMapping| {
            watched.open.iter().map(|word| word.count_ones() as usize).sum::<usize>()
        };
        self.mappings.iter().map(bits).sum()
    }

    /// Notes that pages of a mapping are protected. Those of them that are not `present` were
    /// discarded silently.
    pub(super) fn close(&mut self, mapping: usize, pages: PageRange, present: Option<&[bool]>) {
        let watched = &mut self.mappings[mapping];
        for page in pages.start..pages.end() {
            watched.set_open(page, false);
            let absent = present.is_some_and(|present| !present[page - pages.start]);
            if absent && watched.origins[page] == Origin::Process {
                watched.origins[page] = Origin::Zero;
            }
        }
    }

    /// Freezes the image: every page that is in place is protected now.
    pub(super) fn freeze(&mut self) {
        self.frozen = true;
    }

    /// A page at `address` is about to be opened for writing: copies it if the frozen image has it.
    pub(super) fn keep(&mut self, (mapping, page): (usize, usize), address: usize) {
        let watched = &mut self.mappings[mapping];
        let wanted =
            self.frozen && watched.origins[page] == Origin::Process && !watched.is_open(page);
        if watched.origins[page] == Origin::Process {
            watched.set_open(page, true);
        }
        if !wanted || self.loss.is_some() || planted::is(Bug::Torn) {
            return;
        }
        if let Some(charge) = &mut self.charge
            && charge.add(COPY_COST).is_err()
        {
            self.lose(LossReason::Budget);
            return;
        }
        let mut copy: CopiedPage = Box::new([0; PAGE_SIZE]);
        let mut protected = [false];
        let read = self.process.read(address, &mut copy[..]);
        // Protected until now, so nothing has written to it since the image was frozen.
        let checked = read.and_then(|()| self.process.write_protected(address, &mut protected));
        if checked.is_ok() && protected[0] {
            self.copies.insert(address, copy);
        } else {
            self.lose(LossReason::Discarded);
        }
    }

    /// A mapping was moved. Copies are found by their address.
    pub(super) fn note_move(&mut self) {
        if self.frozen {
            self.lose(LossReason::Moved);
        }
    }

    /// Notes that the image has lost a page. Returns why the first one was lost.
    pub(super) fn lose(&mut self, why: LossReason) -> LossReason {
        let first = *self.loss.get_or_insert(why);
        self.copies = HashMap::new();
        self.charge = None;
        first
    }

    /// Why the image cannot be stored, if so.
    pub(super) fn loss(&self) -> Option<LossReason> {
        self.loss
    }

    /// The copy of the page at `address`.
    pub(super) fn copy_of(&self, address: usize) -> Option<&[u8; PAGE_SIZE]> {
        self.copies.get(&address).map(|copy| &**copy)
    }

    /// Copies of pages.
    pub(super) fn copies(&self) -> usize {
        self.copies.len()
    }

    /// The runs of pages of a mapping with content that is not the source's.
    pub(super) fn changed(&self, mapping: usize) -> impl Iterator<Item = (PageRange, Origin)> {
        runs(self.mappings[mapping].origins.iter().copied())
            .filter(|(_, origin)| *origin != Origin::Source)
    }
}
