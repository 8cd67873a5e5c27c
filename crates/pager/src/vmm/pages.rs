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

use super::Served;
use super::handshake::Mapping;

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Page {
    Missing,
    /// Somebody reads it.
    Filling,
    Present,
    /// The VMM has discarded it: it is zero.
    Removed,
}

/// The state of a page.
#[derive(Clone, Copy, Debug)]
struct PageState {
    page: Page,
    /// A fault on it is in the queue.
    asked: bool,
    /// A fault on it waits for the thread that fills it.
    awaited: bool,
}

/// How far streaming is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ahead {
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
    /// Faults, oldest first, each page once.
    faults: VecDeque<(usize, usize)>,
    ahead: Ahead,
    pub(super) served: Served,
}

impl Pages {
    pub(super) fn new(mappings: &[Mapping], working_set: bool) -> Self {
        let missing = PageState { page: Page::Missing, asked: false, awaited: false };
        Self {
            known: mappings.iter().map(|mapping| vec![missing; mapping.pages]).collect(),
            faults: VecDeque::new(),
            ahead: if working_set { Ahead::Set } else { Ahead::From(0, 0) },
            served: Served::default(),
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
            known.page = state;
            // Filling a page wakes its waiters.
            known.awaited &= state != Page::Present;
        }
    }

    /// The state of a page that a fault was on. If a thread fills it, the fault waits for that.
    pub(super) fn look(&mut self, mapping: usize, page: usize) -> Page {
        let known = &mut self.known[mapping][page];
        known.awaited |= known.page == Page::Filling;
        known.page
    }

    /// Pages are not filled by the thread that had claimed them: faults that waited for that are
    /// asked again.
    pub(super) fn ask_again(&mut self, mapping: usize, pages: PageRange) {
        for page in pages.start..pages.end() {
            let known = &mut self.known[mapping][page];
            if std::mem::take(&mut known.awaited) && !known.asked {
                known.asked = true;
                self.faults.push_back((mapping, page));
            }
        }
    }

    /// Pages that are neither there nor known to be zero.
    pub(super) fn not_present(&self) -> usize {
        self.known.iter().flatten().filter(|known| known.page != Page::Present).count()
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
    pub(super) fn ask(&mut self, mapping: usize, page: usize) {
        self.served.faults += 1;
        let known = &mut self.known[mapping][page];
        if !known.asked {
            known.asked = true;
            self.faults.push_back((mapping, page));
        }
    }

    /// Notes that a range was discarded, or is mapped no more, and what its pages are then.
    pub(super) fn lose(&mut self, mappings: &[Mapping], start: usize, end: usize, state: Page) {
        self.served.removals += 1;
        for (number, mapping) in mappings.iter().enumerate() {
            let (from, to) = (start.max(mapping.base), end.min(mapping.end()));
            if from < to {
                let first = (from - mapping.base) / PAGE_SIZE;
                let pages = PageRange::new(first, (to - mapping.base) / PAGE_SIZE - first);
                self.set(number, pages, state);
            }
        }
    }

    /// The next task of a thread: faults first. `batch` is how many pages are streamed at a time,
    /// if the thread streams.
    pub(super) fn next(&mut self, mappings: &[Mapping], batch: Option<usize>) -> Option<Job> {
        if let Some((mapping, page)) = self.faults.pop_front() {
            self.known[mapping][page].asked = false;
            return Some(Job::Fault(mapping, page));
        }
        let batch = batch?;
        match self.ahead {
            Ahead::Set => {
                self.ahead = Ahead::ReadsSet;
                Some(Job::WorkingSet)
            }
            Ahead::ReadsSet => None,
            Ahead::From(number, start) => {
                let mapping = mappings.get(number)?;
                let len = batch.max(mapping.unit).min(mapping.pages - start);
                self.ahead = if start + len < mapping.pages {
                    Ahead::From(number, start + len)
                } else {
                    Ahead::From(number + 1, 0)
                };
                Some(Job::Stream(number, PageRange::new(start, len)))
            }
        }
    }

    /// The working set is in place.
    pub(super) fn set_is_there(&mut self) {
        self.ahead = Ahead::From(0, 0);
    }
}
