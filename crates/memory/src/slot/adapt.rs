//! When learning does not pay: the switch between the write set and discarding.
//!
//! A guest that writes other pages on every run makes a write set grow and fault for nothing; throwing
//! pages away is cheaper then. Each reset compares what it cost, by the host's calibrated prices, with
//! what discarding would have cost; after a streak of losses the slot discards for a while, then
//! tries again, with longer pauses each time it fails.

use crate::CostModel;

/// Losing resets in a row before a slot gives up learning.
const PATIENCE: u32 = 8;
/// Resets to discard for, at first and at most.
const FIRST_PAUSE: u32 = 64;
const MAX_PAUSE: u32 = 8192;
/// Resets between two samples of the write set, at first and at most.
const FIRST_SAMPLE: u32 = 32;
const MAX_SAMPLE: u32 = 1024;

/// Counters of one slot.
#[derive(Debug)]
pub(super) struct Adapt {
    losses: u32,
    /// Resets left to discard.
    pause_left: u32,
    next_pause: u32,
    sample_left: u32,
    sample_every: u32,
    /// Share of the set that the last sample found written, in 1/256.
    written_share: u32,
}

impl Default for Adapt {
    fn default() -> Self {
        Self {
            losses: 0,
            pause_left: 0,
            next_pause: FIRST_PAUSE,
            sample_left: FIRST_SAMPLE,
            sample_every: FIRST_SAMPLE,
            written_share: 256,
        }
    }
}

impl Adapt {
    /// Whether the slot discards for now.
    #[inline]
    pub(super) fn discarding(&self) -> bool {
        self.pause_left > 0
    }

    /// Counts a reset by discarding; `true` when the pause is over.
    pub(super) fn discarded(&mut self) -> bool {
        self.pause_left -= 1;
        self.pause_left == 0
    }

    /// Counts a reset of a write set of `set` pages of which `learned` were new; `true` when the slot
    /// should discard from now on.
    #[inline]
    pub(super) fn learned(&mut self, set: usize, learned: usize) -> bool {
        if learned == 0 {
            self.losses = 0;
            return false;
        }
        self.judge(set, learned)
    }

    #[cold]
    fn judge(&mut self, set: usize, learned: usize) -> bool {
        let cost = CostModel::host();
        let written = learned + (set - learned) * self.written_share as usize / 256;
        if cost.write_set(set, learned) <= cost.discard(written) {
            self.losses = 0;
            return false;
        }
        self.losses += 1;
        if self.losses < PATIENCE {
            return false;
        }
        self.losses = 0;
        self.pause_left = self.next_pause;
        self.next_pause = (self.next_pause * 2).min(MAX_PAUSE);
        true
    }

    /// Whether this reset should sample the set.
    #[inline]
    pub(super) fn sample_due(&mut self) -> bool {
        self.sample_left -= 1;
        self.sample_left == 0
    }

    /// Notes what a sample found and plans the next one: soon while the set still sheds pages, later
    /// once it is tight.
    pub(super) fn sampled(&mut self, set: usize, changed: usize, shed: usize) {
        self.written_share = (changed * 256).checked_div(set).unwrap_or(256) as u32;
        let tight = shed == 0 && changed == set;
        self.sample_every =
            if tight { (self.sample_every * 2).min(MAX_SAMPLE) } else { FIRST_SAMPLE };
        self.sample_left = self.sample_every;
    }
}
