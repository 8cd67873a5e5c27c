//! Counters of a pool. They are not synchronised, and may be a moment old.

use std::collections::BTreeMap;

use afresh_memory::ResetReport;

/// The cost of a reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetCost {
    /// Pages of memory that were copied back, cleared, or thrown away.
    pub pages: usize,
    /// Whether its user had made its memory grow.
    pub grown: bool,
    /// Whether pages were thrown away instead of copied.
    pub discarded: bool,
    /// Whether state other than memory could not be reset in place, and was made anew.
    pub replaced: bool,
}

impl From<ResetReport> for ResetCost {
    #[inline]
    fn from(report: ResetReport) -> Self {
        Self {
            pages: report.restored,
            grown: report.shrunk > 0,
            discarded: report.discarded,
            replaced: false,
        }
    }
}

/// The costs of the resets in a pool, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetStats {
    /// The number of resets for each bound in [`ResetStats::BOUNDS`]: those that copied at most
    /// that many pages back, and more than the previous bound; the last one counts resets above
    /// every bound.
    pub by_pages: [u64; ResetStats::BOUNDS.len() + 1],
    /// Pages, over all.
    pub pages: u64,
    /// Resets after a growth of memory.
    pub grown: u64,
    /// Resets that discarded pages.
    pub discarded: u64,
    /// Resets that made an item anew.
    pub replaced: u64,
}

impl ResetStats {
    /// Bounds of the counts, in pages copied back.
    pub const BOUNDS: [u64; 9] = [0, 1, 4, 16, 64, 256, 1024, 4096, 16_384];

    /// The number of resets.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.by_pages.iter().sum()
    }

    /// Counts one more.
    #[inline]
    pub(crate) fn add(&mut self, reset: &ResetCost) {
        // Bounds are powers of four, so that the place is found without a search.
        let place = match reset.pages {
            0 => 0,
            pages => 1 + (usize::BITS - (pages - 1).leading_zeros()).div_ceil(2) as usize,
        };
        self.by_pages[place.min(Self::BOUNDS.len())] += 1;
        self.pages += reset.pages as u64;
        self.grown += u64::from(reset.grown);
        self.discarded += u64::from(reset.discarded);
        self.replaced += u64::from(reset.replaced);
    }

    /// The difference from `earlier`, a value from the same pool.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut by_pages = self.by_pages;
        for (count, before) in by_pages.iter_mut().zip(earlier.by_pages) {
            *count = count.saturating_sub(before);
        }
        Self {
            by_pages,
            pages: self.pages.saturating_sub(earlier.pages),
            grown: self.grown.saturating_sub(earlier.grown),
            discarded: self.discarded.saturating_sub(earlier.discarded),
            replaced: self.replaced.saturating_sub(earlier.replaced),
        }
    }

    /// Adds the counts of the other.
    pub fn join(&mut self, other: &Self) {
        self.by_pages.iter_mut().zip(other.by_pages).for_each(|(sum, more)| *sum += more);
        self.pages += other.pages;
        self.grown += other.grown;
        self.discarded += other.discarded;
        self.replaced += other.replaced;
    }
}

/// Counters of a pool, summed over its shards; a snapshot that may be a moment old.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Items alive, idle and in use.
    pub alive: usize,
    /// Items idle.
    pub idle: usize,
    /// Items made.
    pub created: u64,
    /// Items in use.
    pub in_use: usize,
    /// Hand-outs that came back and were made pristine.
    pub returned: u64,
    /// The costs of making them pristine.
    pub resets: ResetStats,
    /// Items dropped because recycling failed.
    pub quarantined: u64,
    /// The same, by reason: see [`Recycle::reason`](crate::Recycle::reason).
    pub quarantines: BTreeMap<&'static str, u64>,
    /// Why the last one failed, in words.
    pub last_failure: Option<String>,
    /// Items dropped because their user panicked.
    pub abandoned: u64,
    /// Items leased beyond the limit.
    pub on_demand: u64,
    /// Times an item was trimmed to stay within the memory budget.
    pub trimmed: u64,
    /// Idle items dropped so that the process stays within its budget.
    pub evicted: u64,
    /// Bytes of private memory that idle items keep.
    pub resident_bytes: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_is_counted_under_the_least_bound_that_holds_it() {
        for pages in (0..70_000).chain([usize::MAX]) {
            let mut resets = ResetStats::default();
            resets.add(&ResetCost { pages, ..ResetCost::default() });
            let expected = ResetStats::BOUNDS.iter().position(|bound| pages as u64 <= *bound);
            let found = resets.by_pages.iter().position(|count| *count == 1);
            assert_eq!(found, Some(expected.unwrap_or(ResetStats::BOUNDS.len())), "{pages}");
        }
    }
}
