//! A set of pages, dense as a bitmap, and the runs it consists of.
//!
//! Promises: membership in one step; runs come in ascending order and never touch. May break it:
//! indices beyond the size given at creation, which are ignored by `contains` and panic nowhere.

/// A half-open range of page indices.
pub(crate) type Run = std::ops::Range<u64>;

/// A set of page indices below a fixed bound.
#[derive(Debug, Clone, Default)]
pub(crate) struct PageSet {
    words: Vec<u64>,
    count: u64,
    /// Words that may be non-zero, as a half-open range: keeps sparse sets cheap to walk.
    used: std::ops::Range<usize>,
}

impl PageSet {
    pub(crate) fn new(pages: u64) -> Self {
        Self {
            words: vec![0; pages.div_ceil(64) as usize],
            count: 0,
            used: 0..0,
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.count
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    #[inline]
    pub(crate) fn contains(&self, page: u64) -> bool {
        self.words
            .get((page / 64) as usize)
            .is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    /// The 64 pages from `first` on, as bits.
    #[inline]
    pub(crate) fn word_at(&self, first: u64) -> u64 {
        let (index, low) = ((first / 64) as usize, first % 64);
        let word = |index: usize| self.words.get(index).copied().unwrap_or(0);
        if low == 0 {
            word(index)
        } else {
            word(index) >> low | word(index + 1) << (64 - low)
        }
    }

    /// Adds a page; true if it was new.
    #[inline]
    pub(crate) fn insert(&mut self, page: u64) -> bool {
        let index = (page / 64) as usize;
        let Some(word) = self.words.get_mut(index) else {
            return false;
        };
        let bit = 1 << (page % 64);
        let new = *word & bit == 0;
        *word |= bit;
        self.count += u64::from(new);
        self.touch(index, index + 1);
        new
    }

    /// Adds the pages `first..end`.
    pub(crate) fn insert_range(&mut self, first: u64, end: u64) {
        let end = end.min(self.words.len() as u64 * 64);
        let mut page = first;
        while page < end {
            let index = (page / 64) as usize;
            let low = page % 64;
            let count = (64 - low).min(end - page);
            let mask = (u64::MAX >> (64 - count)) << low;
            self.count += u64::from((mask & !self.words[index]).count_ones());
            self.words[index] |= mask;
            self.touch(index, index + 1);
            page += count;
        }
    }

    fn touch(&mut self, first: usize, end: usize) {
        if self.used.is_empty() {
            self.used = first..end;
        } else {
            self.used = self.used.start.min(first)..self.used.end.max(end);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.words[self.used.clone()].fill(0);
        self.used = 0..0;
        self.count = 0;
    }

    /// The runs of pages in the set.
    pub(crate) fn runs(&self) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for index in self.used.clone() {
            let mut word = self.words[index];
            let base = index as u64 * 64;
            while word != 0 {
                let low = u64::from(word.trailing_zeros());
                let ones = u64::from((!(word >> low)).trailing_zeros()).min(64 - low);
                let (start, end) = (base + low, base + low + ones);
                match runs.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => runs.push(start..end),
                }
                if low + ones == 64 {
                    break;
                }
                word &= u64::MAX << (low + ones);
            }
        }
        runs
    }

    /// Runs of non-zero bitmap words, each with the index of its first word.
    pub(crate) fn word_runs(&self) -> impl Iterator<Item = (u64, &[u64])> {
        let words = &self.words[self.used.clone()];
        let base = self.used.start as u64;
        let mut at = 0;
        std::iter::from_fn(move || {
            at += words[at..].iter().position(|word| *word != 0)?;
            let start = at;
            at += words[at..].iter().position(|word| *word == 0).unwrap_or(words.len() - at);
            Some((base + start as u64, &words[start..at]))
        })
    }

    /// Adds every page of `other`.
    pub(crate) fn union_with(&mut self, other: &PageSet) {
        for run in other.runs() {
            self.insert_range(run.start, run.end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn the_runs_are_the_set(ranges in proptest::collection::vec((0u64..500, 0u64..140), 0..20)) {
            let mut set = PageSet::new(600);
            let mut model = BTreeSet::new();
            for (start, len) in ranges {
                let end = (start + len).min(600);
                set.insert_range(start, end);
                model.extend(start..end);
            }
            prop_assert_eq!(set.len(), model.len() as u64);
            let listed: Vec<u64> = set.runs().into_iter().flatten().collect();
            prop_assert_eq!(listed, model.iter().copied().collect::<Vec<_>>());
            for pair in set.runs().windows(2) {
                prop_assert!(pair[0].end < pair[1].start);
            }
            set.clear();
            prop_assert!(set.is_empty() && set.runs().is_empty());
        }
    }
}
