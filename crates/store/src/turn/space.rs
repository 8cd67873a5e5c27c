//! The result of a chain of turns: the place of each page after the last turn, and the guest's
//! state.
//!
//! Nothing of the pages is read for that. A changed page knows its base and its patches, and is
//! made when it is read.
//!
//! Promises: every place that it names is in the snapshot's memory or in a turn. A chain takes no
//! more memory than the bytes of its turns and the limits of its opener, whatever the turns take
//! over from one another.

use std::ops::Range;
use std::sync::Arc;

use afresh_budget::{Budget, BudgetExceeded};
use afresh_sys::planted::{Bug, is};
use afresh_sys::{PAGE_SIZE, PageRange};

use super::body::{PATCH_OVERHEAD, patch};
use super::cost::{ChainCost, RUN_WORK};
use super::grow::ChargedList;
use super::{Head, Step, Turn, TurnError};
use crate::format::map::{MapRun, Origin, PageMap};
use crate::{Limits, OpenError};

/// Where a run of pages is.
#[derive(Clone, Copy, Debug)]
enum PageSource {
    Zero,
    /// In the snapshot's own memory, from this page on.
    Base(usize),
    /// Made by turns: these pages of [`Space::own`].
    TurnPage(usize),
}

#[derive(Clone, Copy, Debug)]
struct Run {
    first: usize,
    len: usize,
    what: PageSource,
}

/// The bottom of a page.
#[derive(Clone, Copy, Debug)]
enum PageBase {
    Zero,
    Base(usize),
    /// In the program of a turn, from this byte on.
    Whole {
        turn: usize,
        at: usize,
    },
    /// A page that an earlier turn made.
    TurnPage(usize),
}

/// A page that turns made.
#[derive(Clone, Debug)]
struct TurnPage {
    under: PageBase,
    /// The patch on it: a turn, and the runs in its program.
    patch: Option<(usize, Range<usize>)>,
    /// Cost of the patches on this page and on all pages before it in the list.
    patches: u64,
}

/// A memory and a state after a chain of turns.
#[derive(Debug)]
pub(crate) struct Space {
    pages: usize,
    runs: ChargedList<Run>,
    own: ChargedList<TurnPage>,
    bodies: Vec<Arc<Vec<u8>>>,
    state: Vec<u8>,
    cost: ChainCost,
    limits: Limits,
    /// For the runs before and after a turn, and the pages that turns made.
    budget: Budget,
}

impl Space {
    /// A snapshot of `pages` pages with this state, before the first turn, for a reader with these
    /// limits.
    pub(crate) fn new(pages: usize, state: Vec<u8>, limits: &Limits) -> Result<Self, OpenError> {
        // One part for the runs before a turn, one for those after it and the pages.
        let most = usize::try_from(limits.index.saturating_mul(2)).unwrap_or(usize::MAX);
        let budget = Budget::new("indexes of a session", most);
        let mut this = Self {
            pages: 0,
            runs: ChargedList::new(&budget),
            own: ChargedList::new(&budget),
            bodies: Vec::new(),
            state,
            cost: ChainCost::new(),
            limits: *limits,
            budget,
        };
        this.push(pages, PageSource::Base(0))?;
        Ok(this)
    }

    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Cost of the chain so far.
    pub(crate) fn cost(&self) -> ChainCost {
        self.cost
    }

    /// Counts the next turn, before it is decompressed.
    pub(super) fn expect(&mut self, head: &Head) -> Result<(), OpenError> {
        self.cost.count(head);
        self.cost.check(&self.limits)
    }

    pub(crate) fn state(&self) -> &[u8] {
        &self.state
    }

    /// Adds `len` pages at the end.
    fn push(&mut self, len: usize, what: PageSource) -> Result<(), OpenError> {
        let first = self.pages;
        self.pages += len;
        if len == 0 {
            return Ok(());
        }
        self.cost.work += RUN_WORK;
        if let Some(last) = self.runs.last_mut() {
            let follows = match (last.what, what) {
                (PageSource::Zero, PageSource::Zero) => true,
                (PageSource::Base(one), PageSource::Base(two))
                | (PageSource::TurnPage(one), PageSource::TurnPage(two)) => one + last.len == two,
                _ => false,
            };
            if follows {
                last.len += len;
                return Ok(());
            }
        }
        self.runs.push(Run { first, len, what }).map_err(|error| over(&self.limits, error))
    }

    /// Adds a page that turns made, on which `patches` bytes of patches go.
    fn push_own(&mut self, mut own: TurnPage, patches: u64) -> Result<(), OpenError> {
        own.patches = self.own.last().map_or(0, |last| last.patches) + patches;
        self.own.push(own).map_err(|error| over(&self.limits, error))
    }

    /// Cost of the patches on `len` pages that turns made, from `first` on.
    fn patches(&self, first: usize, len: usize) -> u64 {
        let upto = |end: usize| if end == 0 { 0 } else { self.own[end - 1].patches };
        upto(first + len) - upto(first)
    }

    /// The place of page `page` of `runs`.
    fn at(runs: &[Run], page: usize) -> PageSource {
        let index = runs.partition_point(|run| run.first + run.len <= page);
        match runs.get(index) {
            Some(Run { first, what: PageSource::Base(from), .. }) => {
                PageSource::Base(from + page - first)
            }
            Some(Run { first, what: PageSource::TurnPage(from), .. }) => {
                PageSource::TurnPage(from + page - first)
            }
            _ => PageSource::Zero,
        }
    }

    /// Applies a turn that [`Space::expect`] counted.
    pub(super) fn apply(&mut self, turn: &Turn) -> Result<(), OpenError> {
        let number = self.bodies.len();
        let bad = |source| OpenError::Turn { number, source };
        turn.fits(self.pages, self.state.len()).map_err(bad)?;
        self.cost.count_steps(turn);
        self.cost.check(&self.limits)?;
        let state = turn.state(&self.state).map_err(bad)?;
        let before = std::mem::replace(&mut self.runs, ChargedList::new(&self.budget));
        self.pages = 0;
        for step in turn.steps() {
            match step {
                Step::Copy { from, len } => self.take_over(&before, from, len)?,
                Step::Zero { len } => self.push(len, PageSource::Zero)?,
                Step::Patch { from, runs } => {
                    let mut patches = runs.len() as u64 + PATCH_OVERHEAD;
                    let under = match Self::at(&before, from) {
                        PageSource::TurnPage(index) => {
                            patches += self.patches(index, 1);
                            PageBase::TurnPage(index)
                        }
                        PageSource::Base(page) => PageBase::Base(page),
                        PageSource::Zero => PageBase::Zero,
                    };
                    self.push(1, PageSource::TurnPage(self.own.len()))?;
                    let patch = Some((number, runs));
                    self.push_own(TurnPage { under, patch, patches: 0 }, patches)?;
                }
                Step::Whole { at, len } => {
                    self.push(len, PageSource::TurnPage(self.own.len()))?;
                    for n in 0..len {
                        let under = PageBase::Whole { turn: number, at: at + n * PAGE_SIZE };
                        self.push_own(TurnPage { under, patch: None, patches: 0 }, 0)?;
                    }
                }
            }
        }
        if !is(Bug::Turn) {
            self.state = state;
        }
        self.bodies.push(turn.body.clone());
        self.cost.runs = self.runs.len() as u64;
        self.cost.check(&self.limits)
    }

    /// Takes `len` pages over, from page `from` of `before` on. Turns can take the same runs over
    /// again and again.
    fn take_over(&mut self, before: &[Run], from: usize, len: usize) -> Result<(), OpenError> {
        let wanted = PageRange::new(from, len);
        let first = before.partition_point(|run| run.first + run.len <= from);
        for run in &before[first..] {
            let Some(part) = PageRange::new(run.first, run.len).intersect(wanted) else { break };
            let skip = part.start - run.first;
            let what = match run.what {
                PageSource::Zero => PageSource::Zero,
                PageSource::Base(page) => PageSource::Base(page + skip),
                PageSource::TurnPage(index) => PageSource::TurnPage(index + skip),
            };
            self.push(part.len, what)?;
        }
        self.cost.check(&self.limits)
    }

    /// Counts the patches on all pages of the memory after the last turn.
    pub(super) fn finish(&mut self) -> Result<(), OpenError> {
        let patches = self.runs.iter().map(|run| match run.what {
            PageSource::TurnPage(first) => self.patches(first, run.len),
            PageSource::Zero | PageSource::Base(_) => 0,
        });
        self.cost.patches = patches.fold(0, u64::saturating_add);
        self.cost.check(&self.limits)
    }

    /// The place of each page: in the layers below, whose map is `base`, or among the pages that
    /// turns made.
    pub(crate) fn map(&self, base: &PageMap) -> Result<PageMap, OpenError> {
        let most = usize::try_from(self.limits.index).unwrap_or(usize::MAX);
        let mut runs: ChargedList<MapRun> =
            ChargedList::new(&Budget::new("indexes of a session", most));
        let mut push = |run| runs.push(run).map_err(|error| over(&self.limits, error));
        for run in self.runs.iter() {
            let pages = PageRange::new(run.first, run.len);
            match run.what {
                PageSource::Zero => push(MapRun { pages, origin: Origin::Zero })?,
                PageSource::TurnPage(page) => {
                    push(MapRun { pages, origin: Origin::Turn { page } })?
                }
                PageSource::Base(from) => {
                    for below in base.within(PageRange::new(from, run.len)) {
                        let first = run.first + (below.pages.start - from);
                        push(MapRun { pages: PageRange::new(first, below.pages.len), ..below })?;
                    }
                }
            }
        }
        Ok(PageMap::from_runs(self.pages, runs.into_items()))
    }

    /// The pages of the snapshot's memory below the pages that turns made, once for each page that
    /// needs one.
    pub(crate) fn bases(&self) -> impl Iterator<Item = usize> {
        let own = self.runs.iter().filter_map(|run| match run.what {
            PageSource::TurnPage(first) => Some(first..first + run.len),
            PageSource::Zero | PageSource::Base(_) => None,
        });
        own.flatten().filter_map(|page| {
            let mut under = self.own[page].under;
            // The cost of patches bounds the walk.
            while let PageBase::TurnPage(earlier) = under {
                under = self.own[earlier].under;
            }
            match under {
                PageBase::Base(page) => Some(page),
                _ => None,
            }
        })
    }

    /// Writes page `page` of those that turns made to `out`. `base` reads a page below the turns.
    pub(crate) fn read(
        &self,
        page: usize,
        out: &mut [u8; PAGE_SIZE],
        base: impl FnOnce(usize, &mut [u8]) -> Result<(), OpenError>,
    ) -> Result<(), OpenError> {
        let mut own = &self.own[page];
        let mut patches = Vec::new();
        loop {
            patches.extend(&own.patch);
            match own.under {
                PageBase::Zero => out.fill(0),
                PageBase::Base(page) => base(page, out)?,
                PageBase::Whole { turn, at } => {
                    out.copy_from_slice(&self.bodies[turn][at..at + PAGE_SIZE]);
                }
                // Made before this one, so the walk ends.
                PageBase::TurnPage(earlier) => {
                    own = &self.own[earlier];
                    continue;
                }
            }
            break;
        }
        for (turn, runs) in patches.into_iter().rev() {
            patch(&self.bodies[*turn], runs.clone(), out);
        }
        Ok(())
    }
}

/// The error for runs or pages that exceed the limit `index`.
fn over(limits: &Limits, error: BudgetExceeded) -> OpenError {
    let bytes = (error.limit as u64).saturating_add(error.requested as u64);
    OpenError::Limit { what: "the index of a session", bytes, limit: limits.index, name: "index" }
}

/// Refuses a turn that does not follow on `parent`.
pub(super) fn check_parent(turn: &Turn, parent: &[u8; 32]) -> Result<(), TurnError> {
    if turn.parent() == parent { Ok(()) } else { Err(TurnError::Parent) }
}
