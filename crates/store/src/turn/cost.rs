//! The cost of a chain of turns for its reader, and the limit that its writers keep.
//!
//! Promises: a chain that a writer accepted stays within the default limits of every reader.
//! Writers know a chain by upper bounds, readers exactly.

use super::{Head, Turn};
use crate::{Limits, OpenError};

/// Default limit of each field of [`ChainCost`], which writers keep.
pub(crate) const MAX_CHAIN: u64 = Limits::DEFAULT_TURNS;
/// Cost of every turn. It limits a chain to 4096 turns, and the patches of a page to as many.
pub(super) const TURN_WORK: u64 = 256 << 10;
/// Cost of a run of pages in a turn, and of a step that makes a part of the state.
pub(super) const RUN_WORK: u64 = 4;
/// Cost of a lookup of one page in the memory before. A binary search in millions of runs misses
/// the processor's caches at nearly every probe, and costs about a hundred times a run in order.
pub(super) const LOOKUP_WORK: u64 = 256;

/// The cost of a chain of turns for its reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChainCost {
    /// Bytes of all states that its turns make.
    pub(crate) states: u64,
    /// Bytes of the programs of its turns.
    pub(crate) bodies: u64,
    /// [`TURN_WORK`] for each turn, [`LOOKUP_WORK`] for each lookup, and [`RUN_WORK`] for each run
    /// of pages that a turn makes and for each step of the state.
    pub(crate) work: u64,
    /// Bytes of patches that all pages of the memory need together.
    pub(crate) patches: u64,
    /// Runs of pages that the memory consists of.
    pub(crate) runs: u64,
}

impl ChainCost {
    /// The cost of a snapshot without turns.
    pub(crate) fn new() -> Self {
        Self { runs: 1, ..Self::default() }
    }

    /// An upper bound of the cost after `turn`. Disjoint ranges in ascending order overlap at most
    /// as many runs as there are runs and ranges.
    pub(super) fn after(&self, turn: &Turn) -> Self {
        let Turn { head, shape, .. } = turn;
        let runs = self.runs.saturating_mul(shape.passes).saturating_add(shape.steps);
        let work = steps_work(turn).saturating_add(runs.saturating_mul(RUN_WORK));
        Self {
            states: self.states + head.state,
            bodies: self.bodies + head.body,
            work: self.work.saturating_add(TURN_WORK).saturating_add(work),
            patches: self.patches.saturating_mul(shape.passes).saturating_add(shape.patches),
            runs,
        }
    }

    /// Counts the states and the program of a turn, before they are read.
    pub(super) fn count(&mut self, head: &Head) {
        self.states += head.state;
        self.bodies += head.body;
        self.work += TURN_WORK;
    }

    /// Counts the steps of a turn, before they are applied.
    pub(super) fn count_steps(&mut self, turn: &Turn) {
        self.work = self.work.saturating_add(steps_work(turn));
    }

    /// The largest of its fields, with a name.
    pub(crate) fn largest(&self) -> (&'static str, u64) {
        let fields = [
            ("the states of session turns", self.states),
            ("the programs of session turns", self.bodies),
            ("the work of session turns", self.work),
            ("the patches of session turns", self.patches),
        ];
        fields.into_iter().max_by_key(|(_, bytes)| *bytes).unwrap_or_default()
    }

    /// Refuses a chain that costs more than `limits` allow.
    pub(crate) fn check(&self, limits: &Limits) -> Result<(), OpenError> {
        let (what, bytes) = self.largest();
        limits.check_turns(what, bytes)?;
        // Programs are kept, as pages are.
        limits.check_content(self.bodies)
    }
}

/// The work of the steps of `turn`, without the runs that they make.
fn steps_work(turn: &Turn) -> u64 {
    turn.shape.lookups * LOOKUP_WORK + turn.shape.state_steps * RUN_WORK
}
