//! Adaptation of a slot: when it stops learning a write set, when it samples the set again, and
//! when it releases memory from growth.
//!
//! If a guest writes other pages in every run, its write set grows and faults without a benefit,
//! and discarding pages is cheaper. Each reset that learned pages compares its cost, by the host's
//! calibrated prices, with the cost of discarding. After a streak of losses the slot discards for a
//! while, then tries again, with longer pauses each time it fails.
//!
//! After a phase of heavy work a part of the set is copied without a benefit. A *sample* compares
//! the whole set with the image; while nothing moves, samples become rare. In between *looks*
//! compare a few pages each. Looks are paid for by copying: one page for each [`PAGES_A_LOOK`] that
//! were copied, so a large set is looked at in every reset and notices at once, and a small one
//! costs next to nothing. A look that finds fewer written pages than expected brings the next
//! sample forward.

use crate::CostModel;

/// Losing resets in a row before a slot gives up learning.
const MAX_LOSING_RESETS: u32 = 8;
/// Resets to discard for, at first and at most.
const FIRST_PAUSE: u32 = 64;
const MAX_PAUSE: u32 = 8192;
/// Resets between two samples of the write set, at first and at most.
const FIRST_SAMPLE: u32 = 11;
const MAX_SAMPLE: u32 = 1024;
/// The maximum while much of the set is in use and found unchanged: shedding that page by page, and
/// learning it again, costs as much as copying it for some thousand resets.
const USED_SAMPLE: u32 = 4 * FIRST_SAMPLE;
/// Pages copied for each page that is looked at.
const PAGES_A_LOOK: i64 = 128;
/// The minimum count of a reset, so that small sets are sampled every 32 resets.
const LEAST_A_RESET: i64 = 4;
/// Pages looked at before they count, where not all of the set is expected to be written.
const BELIEVED: usize = 16;
/// Resets without growth before memory from growth is released: first value and maximum.
const FIRST_GROWTH: u64 = 64;
const MAX_GROWTH: u64 = 8192;

/// The action of the next restoration of the write set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextAction {
    /// Copy.
    Copy,
    /// Sample this many pages, then copy.
    Look(usize),
    /// Compare every page, and evict.
    Sample,
}

/// Counters of one slot.
#[derive(Debug)]
pub(crate) struct Adaptation {
    losses: u32,
    /// Resets left to discard.
    pause_left: u32,
    next_pause: u32,
    sample_left: u32,
    sample_every: u32,
    /// Pages left to copy before some are looked at.
    copies_left: i64,
    /// Pages looked at and not yet weighed, and how many of them were written.
    looked: usize,
    found_written: usize,
    /// Share of the set that the last sample found written, in 1/256.
    written_share: u32,
    /// The slot's count of resets when a run last grew it, and how many more keep the memory.
    grown_at: u64,
    keep_growth: u64,
}

impl Default for Adaptation {
    fn default() -> Self {
        Self {
            losses: 0,
            pause_left: 0,
            next_pause: FIRST_PAUSE,
            sample_left: FIRST_SAMPLE,
            sample_every: FIRST_SAMPLE,
            copies_left: PAGES_A_LOOK,
            looked: 0,
            found_written: 0,
            written_share: 256,
            grown_at: 0,
            keep_growth: FIRST_GROWTH,
        }
    }
}

impl Adaptation {
    /// Whether the slot discards for now.
    #[inline]
    pub(crate) fn discarding(&self) -> bool {
        self.pause_left > 0
    }

    /// Counts a reset by discarding; `true` when the pause is over.
    pub(crate) fn discarded(&mut self) -> bool {
        self.pause_left -= 1;
        self.pause_left == 0
    }

    /// Counts a reset of a write set of `set` pages, where `learned` were new; `true` when the slot
    /// should discard from now on.
    #[inline]
    pub(crate) fn record_learned(&mut self, set: usize, learned: usize) -> bool {
        if learned == 0 {
            self.losses = 0;
            return false;
        }
        self.weigh(set, learned)
    }

    #[cold]
    fn weigh(&mut self, set: usize, learned: usize) -> bool {
        let cost = CostModel::host();
        // A crowd that was only touched may be evicted in the reset that learned of it.
        let learned = learned.min(set);
        let written = learned + (set - learned) * self.written_share as usize / 256;
        if cost.write_set(set, learned) <= cost.discard(written) {
            self.losses = 0;
            return false;
        }
        self.losses += 1;
        if self.losses < MAX_LOSING_RESETS {
            return false;
        }
        self.losses = 0;
        self.pause_left = self.next_pause;
        self.next_pause = (self.next_pause * 2).min(MAX_PAUSE);
        true
    }

    /// The action of this reset for a set of `set` pages.
    #[inline]
    pub(crate) fn next(&mut self, set: usize) -> NextAction {
        self.sample_left = self.sample_left.saturating_sub(1);
        self.copies_left -= (set as i64).max(LEAST_A_RESET);
        if self.sample_left == 0 {
            NextAction::Sample
        } else if self.copies_left <= 0 {
            self.look()
        } else {
            NextAction::Copy
        }
    }

    #[cold]
    fn look(&mut self) -> NextAction {
        let pages = 1 + self.copies_left.unsigned_abs() / PAGES_A_LOOK.unsigned_abs();
        self.copies_left = PAGES_A_LOOK;
        NextAction::Look(pages as usize)
    }

    /// Records the result of a look; when it contradicts the last sample, the next reset samples.
    pub(crate) fn record_comparison(&mut self, pages: usize, written: usize) {
        self.looked += pages;
        self.found_written += written;
        let expected = self.looked * self.written_share as usize / 256;
        let less = if self.written_share == 256 {
            self.found_written < expected
        } else {
            self.looked >= BELIEVED && self.found_written * 2 < expected
        };
        if self.looked >= BELIEVED {
            (self.looked, self.found_written) = (0, 0);
        }
        if less {
            self.sample_every = FIRST_SAMPLE;
            self.sample_left = 1;
        }
    }

    /// Records the result of a sample and plans the next one: soon while pages are about to leave
    /// the set (`idle` of them were found unchanged twice or more), later while nothing moves, but
    /// not much later while many stay only because they come back (`used`).
    pub(crate) fn sampled(
        &mut self,
        set: usize,
        changed: usize,
        evicted: usize,
        idle: usize,
        used: usize,
    ) {
        self.written_share = (changed * 256).checked_div(set).unwrap_or(256) as u32;
        let still = evicted == 0 && idle * 4 <= set;
        let most = if used * 4 > set { USED_SAMPLE } else { MAX_SAMPLE };
        self.sample_every = if still { (self.sample_every * 2).min(most) } else { FIRST_SAMPLE };
        self.sample_left = self.sample_every;
        (self.looked, self.found_written) = (0, 0);
        self.copies_left = PAGES_A_LOOK;
    }

    /// Notes that the run before reset `resets` had grown the slot.
    pub(crate) fn grew(&mut self, resets: u64) {
        self.grown_at = resets;
    }

    /// Whether memory that earlier runs grew into has been idle for long enough at reset `resets`.
    /// Each release doubles the next wait.
    pub(crate) fn growth_idle(&mut self, resets: u64) -> bool {
        let idle = resets.saturating_sub(self.grown_at) >= self.keep_growth;
        if idle {
            self.keep_growth = (self.keep_growth * 2).min(MAX_GROWTH);
        }
        idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs resets of a set, with `written` in 256 pages written each time, until a sample is due.
    fn resets_to_sample(adapt: &mut Adaptation, set: usize, written: usize) -> u32 {
        for reset in 1.. {
            match adapt.next(set) {
                NextAction::Copy => {}
                NextAction::Look(pages) => adapt.record_comparison(pages, pages * written / 256),
                NextAction::Sample => return reset,
            }
        }
        unreachable!("a sample always comes")
    }

    #[test]
    fn a_set_that_stays_written_is_sampled_ever_more_rarely_and_looked_at_for_a_hundredth() {
        let mut adapt = Adaptation::default();
        for _ in 0..12 {
            resets_to_sample(&mut adapt, 64, 256);
            adapt.sampled(64, 64, 0, 0, 0);
        }
        assert_eq!(resets_to_sample(&mut adapt, 64, 256), MAX_SAMPLE);
    }

    #[test]
    fn a_stable_write_set_is_sampled_rarely_within_a_bound() {
        let mut adapt = Adaptation::default();
        for _ in 0..12 {
            resets_to_sample(&mut adapt, 512, 128);
            adapt.sampled(512, 256, 0, 0, 256);
        }
        assert_eq!(resets_to_sample(&mut adapt, 512, 128), USED_SAMPLE);
        adapt.sampled(512, 128, 0, 256, 128);
        assert_eq!(
            resets_to_sample(&mut adapt, 512, 64),
            FIRST_SAMPLE,
            "others are on their way out"
        );
    }

    #[test]
    fn a_phase_change_is_noticed_at_once_in_a_large_set_and_within_a_third_of_a_hundred_in_any() {
        for (set, limit) in [(20_000, 2), (512, 2), (64, 4), (8, 17), (1, 33)] {
            let mut adapt = Adaptation { sample_every: MAX_SAMPLE, ..Adaptation::default() };
            adapt.sampled(set, set, 0, 0, 0);
            let resets = resets_to_sample(&mut adapt, set, 0);
            assert!(resets <= limit, "{set} pages: {resets} resets");
            adapt.sampled(set, 0, 0, 0, 0);
            assert!(adapt.sample_every <= 2 * FIRST_SAMPLE, "and the next samples come soon");
        }
    }

    #[test]
    fn pages_learned_and_evicted_at_once_never_exceed_the_set() {
        let mut adapt = Adaptation::default();
        adapt.sampled(64, 32, 0, 0, 0);
        for learned in [1, 5, 1000] {
            for _ in 0..2 * MAX_LOSING_RESETS {
                adapt.record_learned(4, learned);
            }
        }
    }

    #[test]
    fn growth_that_comes_back_is_kept_longer_each_time() {
        let mut adapt = Adaptation::default();
        adapt.grew(10);
        assert!(!adapt.growth_idle(10 + FIRST_GROWTH - 1));
        assert!(adapt.growth_idle(10 + FIRST_GROWTH));
        adapt.grew(200);
        assert!(!adapt.growth_idle(200 + FIRST_GROWTH));
        assert!(adapt.growth_idle(200 + 2 * FIRST_GROWTH));
    }
}
