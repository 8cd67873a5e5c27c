//! What a chain of turns makes of a snapshot: where each page is after the last of them, and the guest's state.
//!
//! Nothing of the pages is read for that. A page that turns changed knows what lies under it and which patches go
//! on it, and is made when it is read.
//!
//! What it promises: every place that it names lies in the snapshot's memory or in a turn. A chain costs no more
//! memory than its turns have bytes and than the limits of whoever opens it allow, whatever the turns take over
//! from one another.

use std::ops::Range;
use std::sync::Arc;

use afresh_sys::planted::{Bug, is};
use afresh_sys::{PAGE_SIZE, PageRange};

use super::{Step, Turn, TurnError, body, field};
use crate::map::{MapRun, Origin, PageMap};
use crate::{Limits, OpenError};

/// Bytes of states that turns make one after the other, in all: what reading a chain costs.
const MAX_STATES: usize = 1 << 30;

/// Where a run of pages is.
#[derive(Clone, Copy, Debug)]
enum What {
    Zero,
    /// In the snapshot's own memory, from this page on.
    Base(usize),
    /// Made by turns: these pages of [`Space::own`].
    Own(usize),
}

#[derive(Clone, Copy, Debug)]
struct Run {
    first: usize,
    len: usize,
    what: What,
}

/// What a page lies on.
#[derive(Clone, Copy, Debug)]
enum Under {
    Zero,
    Base(usize),
    /// In the program of a turn, from this byte on.
    Whole {
        turn: usize,
        at: usize,
    },
    /// A page that an earlier turn made.
    Own(usize),
}

/// A page that turns made.
#[derive(Clone, Debug)]
struct Own {
    under: Under,
    /// What goes on it: a turn, and the runs in its program.
    patch: Option<(usize, Range<usize>)>,
}

/// A memory and a state after a chain of turns.
#[derive(Debug)]
pub(crate) struct Space {
    pages: usize,
    runs: Vec<Run>,
    own: Vec<Own>,
    bodies: Vec<Arc<[u8]>>,
    state: Vec<u8>,
    /// Bytes of states made so far.
    states: usize,
}

impl Space {
    /// A snapshot of `pages` pages with this state, before the first turn.
    pub(crate) fn new(pages: usize, state: Vec<u8>) -> Self {
        let mut this = Self {
            pages: 0,
            runs: Vec::new(),
            own: Vec::new(),
            bodies: Vec::new(),
            state,
            states: 0,
        };
        this.push(pages, What::Base(0));
        this
    }

    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    pub(crate) fn state(&self) -> &[u8] {
        &self.state
    }

    /// Adds `len` pages at the end.
    fn push(&mut self, len: usize, what: What) {
        let first = self.pages;
        self.pages += len;
        if len == 0 {
            return;
        }
        if let Some(last) = self.runs.last_mut() {
            let follows = match (last.what, what) {
                (What::Zero, What::Zero) => true,
                (What::Base(one), What::Base(two)) | (What::Own(one), What::Own(two)) => {
                    one + last.len == two
                }
                _ => false,
            };
            if follows {
                last.len += len;
                return;
            }
        }
        self.runs.push(Run { first, len, what });
    }

    /// What page `page` of `runs` is.
    fn at(runs: &[Run], page: usize) -> What {
        let index = runs.partition_point(|run| run.first + run.len <= page);
        match runs.get(index) {
            Some(Run { first, what: What::Base(from), .. }) => What::Base(from + page - first),
            Some(Run { first, what: What::Own(from), .. }) => What::Own(from + page - first),
            _ => What::Zero,
        }
    }

    /// Goes on by a turn.
    pub(crate) fn apply(&mut self, turn: &Turn, limits: &Limits) -> Result<(), OpenError> {
        let bad = |source| OpenError::Turn { number: self.bodies.len(), source };
        turn.fits(self.pages, self.state.len()).map_err(bad)?;
        let state = turn.state(&self.state).map_err(bad)?;
        self.states += state.len();
        if self.states > MAX_STATES {
            return Err(bad(field("state", state.len() as u64)));
        }
        let number = self.bodies.len();
        let before = std::mem::take(&mut self.runs);
        self.pages = 0;
        for step in turn.steps.iter() {
            match step {
                Step::Copy { from, len } => self.take_over(&before, *from, *len),
                Step::Zero { len } => self.push(*len, What::Zero),
                Step::Patch { from, runs } => {
                    let under = match Self::at(&before, *from) {
                        What::Own(index) => Under::Own(index),
                        What::Base(page) => Under::Base(page),
                        What::Zero => Under::Zero,
                    };
                    self.push(1, What::Own(self.own.len()));
                    self.own.push(Own { under, patch: Some((number, runs.clone())) });
                }
                Step::Whole { at, len } => {
                    self.push(*len, What::Own(self.own.len()));
                    self.own.extend((0..*len).map(|n| Own {
                        under: Under::Whole { turn: number, at: at + n * PAGE_SIZE },
                        patch: None,
                    }));
                }
            }
            self.check_size(limits)?;
        }
        if !is(Bug::Turn) {
            self.state = state;
        }
        self.bodies.push(turn.body.clone());
        Ok(())
    }

    /// Takes `len` pages over, from page `from` of `before` on.
    fn take_over(&mut self, before: &[Run], from: usize, len: usize) {
        let wanted = PageRange::new(from, len);
        let first = before.partition_point(|run| run.first + run.len <= from);
        for run in &before[first..] {
            let Some(part) = PageRange::new(run.first, run.len).intersect(wanted) else { break };
            let skip = part.start - run.first;
            let what = match run.what {
                What::Zero => What::Zero,
                What::Base(page) => What::Base(page + skip),
                What::Own(index) => What::Own(index + skip),
            };
            self.push(part.len, what);
        }
    }

    /// Turns can take the same runs over again and again.
    fn check_size(&self, limits: &Limits) -> Result<(), OpenError> {
        let bytes = self.runs.len() * size_of::<Run>() + self.own.len() * size_of::<Own>();
        limits.check_index(bytes as u64)
    }

    /// Where each page is, in the layers below, of which `base` is the map, or among the pages of its own.
    pub(crate) fn map(&self, base: &PageMap, limits: &Limits) -> Result<PageMap, OpenError> {
        let mut runs: Vec<MapRun> = Vec::new();
        for run in &self.runs {
            let pages = PageRange::new(run.first, run.len);
            match run.what {
                What::Zero => runs.push(MapRun { pages, origin: Origin::Zero }),
                What::Own(page) => runs.push(MapRun { pages, origin: Origin::Turn { page } }),
                What::Base(from) => {
                    runs.extend(base.within(PageRange::new(from, run.len)).map(|below| MapRun {
                        pages: PageRange::new(
                            run.first + (below.pages.start - from),
                            below.pages.len,
                        ),
                        ..below
                    }));
                }
            }
            limits.check_index((runs.len() * size_of::<MapRun>()) as u64)?;
        }
        Ok(PageMap::from_runs(self.pages, runs))
    }

    /// Writes page `page` of its own to `out`. `base` reads a page of the snapshot's memory.
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
                Under::Zero => out.fill(0),
                Under::Base(page) => base(page, out)?,
                Under::Whole { turn, at } => {
                    out.copy_from_slice(&self.bodies[turn][at..at + PAGE_SIZE]);
                }
                // Made before this one, so the walk ends.
                Under::Own(earlier) => {
                    own = &self.own[earlier];
                    continue;
                }
            }
            break;
        }
        for (turn, runs) in patches.into_iter().rev() {
            body::patch(&self.bodies[*turn], runs.clone(), out);
        }
        Ok(())
    }
}

/// Refuses a turn that does not follow on `parent`.
pub(super) fn check_parent(turn: &Turn, parent: &[u8; 32]) -> Result<(), TurnError> {
    if turn.parent() == parent { Ok(()) } else { Err(TurnError::Parent) }
}
