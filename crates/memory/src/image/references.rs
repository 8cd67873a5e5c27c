//! The number of images that refer to each page of a backing.
//!
//! A dropped state gives back the pages that no other state refers to, although others of the same
//! file stay.
//!
//! Promises: a page whose count falls to zero is referred to by no image, and never will be again:
//! extents are copied only from images that are alive. Code outside of this crate that maps or
//! reads pages holds their image.
//!
//! May break it: an [`super::Extent`] that outlives the image that it was taken from.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use afresh_sys::PageRange;
use afresh_sys::planted::{Bug, is};

use crate::tracker::push_run;

#[derive(Debug, Default)]
struct Counts {
    /// A count from each page on, up to the next key. Before the first key it is zero.
    steps: BTreeMap<usize, u32>,
    /// Extents of images.
    extents: usize,
}

/// Counts of references to the pages of one backing.
#[derive(Debug, Default)]
pub(super) struct References(Mutex<Counts>);

impl References {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an extent of an image.
    pub(super) fn add(&self, range: PageRange) {
        let mut counts = self.lock();
        counts.extents += 1;
        drop(counts.change(range, |count| count + 1));
        counts.join(range);
    }

    /// Removes an extent. Returns the pages that no extent contains any more.
    pub(super) fn remove(&self, range: PageRange) -> Vec<PageRange> {
        let mut counts = self.lock();
        counts.extents -= 1;
        let unused = u32::from(is(Bug::Reclaim));
        let mut freed = Vec::new();
        let mut steps = counts.change(range, |count| count - 1).peekable();
        while let Some((from, count)) = steps.next() {
            let to = steps.peek().map_or(range.end(), |(next, _)| *next);
            if count <= unused {
                push_run(&mut freed, PageRange::new(from, to - from));
            }
        }
        drop(steps);
        counts.join(range);
        freed
    }

    /// Whether no image has an extent of the backing: then the backing is dropped whole.
    pub(super) fn are_none(&self) -> bool {
        self.lock().extents == 0
    }
}

impl Counts {
    fn at(&self, page: usize) -> u32 {
        self.steps.range(..=page).next_back().map_or(0, |(_, count)| *count)
    }

    /// Changes the counts of `range`, and returns them, each with the page from which on it holds.
    fn change(
        &mut self,
        range: PageRange,
        to: impl Fn(u32) -> u32,
    ) -> impl Iterator<Item = (usize, u32)> + '_ {
        for edge in [range.start, range.end()] {
            let count = self.at(edge);
            self.steps.entry(edge).or_insert(count);
        }
        self.steps.range_mut(range.start..range.end()).for_each(|(_, count)| *count = to(*count));
        self.steps.range(range.start..range.end()).map(|(from, count)| (*from, *count))
    }

    /// Removes the edges of `range` that separate equal counts.
    fn join(&mut self, range: PageRange) {
        for edge in [range.start, range.end()] {
            let before = edge.checked_sub(1).map_or(0, |page| self.at(page));
            if self.steps.get(&edge) == Some(&before) {
                self.steps.remove(&edge);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = 40;

    #[test]
    fn counts_agree_with_an_array() {
        let (references, mut model) = (References::default(), [0; PAGES]);
        let mut extents = Vec::new();
        let mut random = 7_u64;
        let mut draw = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % below
        };
        for _ in 0..if cfg!(miri) { 50 } else { 4000 } {
            if extents.is_empty() || draw(20) < 10 {
                let start = draw(PAGES);
                let range = PageRange::new(start, 1 + draw(PAGES - start));
                references.add(range);
                model[range.start..range.end()].iter_mut().for_each(|count| *count += 1);
                extents.push(range);
            } else {
                let range: PageRange = extents.swap_remove(draw(extents.len()));
                let mut freed = Vec::new();
                for (page, count) in model.iter_mut().enumerate() {
                    if range.contains(page) {
                        *count -= 1;
                        if *count == 0 {
                            push_run(&mut freed, PageRange::new(page, 1));
                        }
                    }
                }
                assert_eq!(references.remove(range), freed);
            }
            assert_eq!(references.are_none(), extents.is_empty());
            let counts = references.lock();
            (0..PAGES).for_each(|page| assert_eq!(counts.at(page), model[page]));
            assert!(counts.steps.len() <= PAGES + 1);
        }
        extents.into_iter().for_each(|range| drop(references.remove(range)));
        assert!(references.lock().steps.is_empty());
    }
}
