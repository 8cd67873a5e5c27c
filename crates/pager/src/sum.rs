//! Digests of states that follow what changes.
//!
//! Promises: equal images with equal states have equal digests, wherever they are and however they
//! came to be; two others with one digest cannot be found. The digest of a state costs what differs
//! from another whose sum is known.

use afresh_memory::{Image, ImageError, PAGE_SIZE};
use afresh_sys::PageRange;

/// Numbers that a page adds to: as many as make LtHash collision resistant.
const LANES: usize = 1024;
const PAGE_CONTEXT: &str = "afresh 2026-11 state digest version 1 page";
const STATE_CONTEXT: &str = "afresh 2026-11 state digest version 1";

/// The sum over the pages of an image that are not zero: LtHash over blake3.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSum(Box<[u16; LANES]>);

impl StateSum {
    /// The sum of all pages. Each is read.
    ///
    /// # Errors
    /// [`ImageError`] when pages are not there.
    pub fn of(image: &Image) -> Result<Self, ImageError> {
        image.complete()?;
        let mut sum = Self(Box::new([0; LANES]));
        image.stored().for_each(|run| sum.run(image, run, false));
        Ok(sum)
    }

    /// The sum of `now`, where this one is of `before`. Reads what may differ.
    ///
    /// # Errors
    /// [`ImageError`] when pages are not there.
    pub fn moved(&self, before: &Image, now: &Image) -> Result<Self, ImageError> {
        let mut sum = self.clone();
        for run in before.differing(now) {
            for (image, taken) in [(before, true), (now, false)] {
                let Some(run) = run.intersect(PageRange::new(0, image.pages())) else { continue };
                image.resolve(run)?;
                sum.run(image, run, taken);
            }
        }
        Ok(sum)
    }

    fn run(&mut self, image: &Image, run: PageRange, taken: bool) {
        for number in run.start..run.end() {
            if let Some(page) = image.page(number) {
                self.page(number, page, taken);
            }
        }
    }

    fn page(&mut self, number: usize, page: &[u8; PAGE_SIZE], taken: bool) {
        // A page of zeros may be stored or not.
        if page.iter().all(|byte| *byte == 0) {
            return;
        }
        let mut hasher = blake3::Hasher::new_derive_key(PAGE_CONTEXT);
        hasher.update(&(number as u64).to_le_bytes());
        hasher.update(page);
        let mut lanes = [0; 2 * LANES];
        hasher.finalize_xof().fill(&mut lanes);
        for (sum, lane) in self.0.iter_mut().zip(lanes.as_chunks::<2>().0) {
            let lane = u16::from_le_bytes(*lane);
            *sum = if taken { sum.wrapping_sub(lane) } else { sum.wrapping_add(lane) };
        }
    }

    /// The digest of a state: an image of this sum with so many pages, and the guest's own state.
    #[must_use]
    pub fn digest(&self, pages: usize, state: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(STATE_CONTEXT);
        hasher.update(&(pages as u64).to_le_bytes());
        for lane in self.0.iter() {
            hasher.update(&lane.to_le_bytes());
        }
        hasher.update(state);
        hasher.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use afresh_memory::ImageBuilder;

    #[test]
    fn the_sum_that_follows_changes_is_that_of_the_whole() {
        let page = |byte: u8| [byte; PAGE_SIZE];
        let image = |pages: usize, content: &[(usize, u8)]| {
            let mut builder = ImageBuilder::new(pages);
            for (number, byte) in content {
                builder.segment(number * PAGE_SIZE, &page(*byte)).unwrap();
            }
            builder.build().unwrap()
        };
        let before = image(20, &[(1, 1), (7, 2), (19, 3)]);
        let sum = StateSum::of(&before).unwrap();
        for after in [
            image(20, &[(1, 1), (7, 9), (19, 3)]),
            image(30, &[(1, 1), (7, 2), (19, 3), (29, 4)]),
            image(8, &[(7, 2)]),
            image(20, &[(7, 1), (1, 2), (19, 3)]),
        ] {
            let moved = sum.moved(&before, &after).unwrap();
            assert_eq!(moved, StateSum::of(&after).unwrap());
            assert_ne!(moved, sum);
        }
        assert_ne!(sum.digest(20, b"a"), sum.digest(20, b"b"));
        assert_ne!(sum.digest(20, b"a"), sum.digest(21, b"a"));
    }
}
