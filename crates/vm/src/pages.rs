//! A set of pages as a bitmap, and the runs it consists of.
//!
//! Promises: membership in one step; runs come in ascending order and never touch; emptying costs
//! time in proportion to the span in use. May break it: indices beyond the bound given at creation,
//! which are ignored.

use afresh_memory::PageRange;

/// A set of page indices below a fixed bound.
#[derive(Debug, Default)]
pub(crate) struct PageSet {
    words: Vec<u64>,
    /// Words that may be non-zero, as a half-open range.
    used: std::ops::Range<usize>,
}

impl PageSet {
    pub(crate) fn new(pages: usize) -> Self {
        Self { words: vec![0; pages.div_ceil(64)], used: 0..0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    #[inline]
    pub(crate) fn contains(&self, page: usize) -> bool {
        self.words.get(page / 64).is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    /// The 64 pages from `first` on, as bits.
    #[inline]
    pub(crate) fn word_at(&self, first: usize) -> u64 {
        let (index, low) = (first / 64, first % 64);
        let word = |index: usize| self.words.get(index).copied().unwrap_or(0);
        if low == 0 { word(index) } else { word(index) >> low | word(index + 1) << (64 - low) }
    }

    #[inline]
    pub(crate) fn insert(&mut self, page: usize) {
        let index = page / 64;
        if let Some(word) = self.words.get_mut(index) {
            *word |= 1 << (page % 64);
            self.touch(index);
        }
    }

    pub(crate) fn insert_range(&mut self, range: PageRange) {
        self.for_words(range, |set, index, mask| {
            set.words[index] |= mask;
            set.touch(index);
        });
    }

    pub(crate) fn remove_range(&mut self, range: PageRange) {
        self.for_words(range, |set, index, mask| set.words[index] &= !mask);
    }

    /// Whether every page of `range` is in the set.
    pub(crate) fn holds(&self, range: PageRange) -> bool {
        let mut page = range.start;
        while page < range.end() {
            let count = (range.end() - page).min(64);
            let mask = u64::MAX >> (64 - count);
            if self.word_at(page) & mask != mask {
                return false;
            }
            page += count;
        }
        true
    }

    fn for_words(&mut self, range: PageRange, mut f: impl FnMut(&mut Self, usize, u64)) {
        let end = range.end().min(self.words.len() * 64);
        let mut page = range.start;
        while page < end {
            let low = page % 64;
            let count = (64 - low).min(end - page);
            f(self, page / 64, (u64::MAX >> (64 - count)) << low);
            page += count;
        }
    }

    #[inline]
    fn touch(&mut self, index: usize) {
        self.used = if self.used.is_empty() {
            index..index + 1
        } else {
            self.used.start.min(index)..self.used.end.max(index + 1)
        };
    }

    pub(crate) fn clear(&mut self) {
        self.words[self.used.clone()].fill(0);
        self.used = 0..0;
    }

    /// Appends the runs of pages in the set.
    pub(crate) fn append_runs(&self, out: &mut Vec<PageRange>) {
        let first = out.len();
        for index in self.used.clone() {
            let mut word = self.words[index];
            while word != 0 {
                let low = word.trailing_zeros() as usize;
                let ones = (!(word >> low)).trailing_zeros() as usize;
                let start = index * 64 + low;
                match out[first..].last_mut() {
                    Some(last) if last.end() == start => last.len += ones,
                    _ => out.push(PageRange::new(start, ones)),
                }
                word &= u64::MAX.checked_shl((low + ones) as u32).unwrap_or(0);
            }
        }
    }

    /// Runs of non-zero bitmap words, each with the index of its first word.
    pub(crate) fn word_runs(&self) -> impl Iterator<Item = (usize, &[u64])> {
        let words = &self.words[self.used.clone()];
        let base = self.used.start;
        let mut at = 0;
        std::iter::from_fn(move || {
            at += words[at..].iter().position(|word| *word != 0)?;
            let start = at;
            at += words[at..].iter().position(|word| *word == 0).unwrap_or(words.len() - at);
            Some((base + start, &words[start..at]))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn the_runs_are_the_set(
            steps in proptest::collection::vec((any::<bool>(), 0usize..500, 0usize..140), 0..20),
        ) {
            let mut set = PageSet::new(600);
            let mut model = BTreeSet::new();
            for (add, start, len) in steps {
                let end = (start + len).min(600);
                let range = PageRange::new(start, end - start);
                if add {
                    set.insert_range(range);
                    model.extend(start..end);
                } else {
                    set.remove_range(range);
                    model.retain(|page| !(start..end).contains(page));
                }
                prop_assert_eq!(set.holds(range), (start..end).all(|page| model.contains(&page)));
            }
            let mut runs = Vec::new();
            set.append_runs(&mut runs);
            let listed: Vec<usize> = runs.iter().flat_map(|run| run.start..run.end()).collect();
            prop_assert_eq!(listed, model.iter().copied().collect::<Vec<_>>());
            for pair in runs.windows(2) {
                prop_assert!(pair[0].end() < pair[1].start);
            }
            for page in 0..600 {
                prop_assert_eq!(set.contains(page), model.contains(&page));
            }
            set.clear();
            prop_assert!(set.is_empty());
        }
    }
}
