//! In what two states differ.
//!
//! Promises: every page whose bytes differ is listed, and no other. May break it: nothing in safe
//! code.

use afresh_memory::{Image, ImageError, PAGE_SIZE, PageRange};

use crate::Frozen;

/// The difference between two states.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// Number of differing pages.
    pub pages: usize,
    /// Number of differing bytes.
    pub bytes: usize,
    /// Which pages those are, by the number of the memory, in order.
    pub ranges: Vec<(usize, PageRange)>,
    /// Whether the guest's state outside memory differs: globals, tables, sizes.
    pub state: bool,
}

impl Difference {
    /// Whether the states are the same, byte for byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages == 0 && !self.state
    }

    /// Compares two states. Only pages that are not stored in the same place are read.
    pub(crate) fn between<S: PartialEq>(
        one: &Frozen<S>,
        two: &Frozen<S>,
    ) -> Result<Self, ImageError> {
        let sizes = |frozen: &Frozen<S>| -> Vec<usize> {
            frozen.memories.iter().map(Image::pages).collect()
        };
        let state = one.state != two.state || sizes(one) != sizes(two);
        let mut found = Self { state, ..Self::default() };
        let none = Image::zero(0);
        for memory in 0..one.memories.len().max(two.memories.len()) {
            let first = one.memories.get(memory).unwrap_or(&none);
            let second = two.memories.get(memory).unwrap_or(&none);
            for range in first.differing(second) {
                first.resolve(range)?;
                second.resolve(range)?;
                for page in range.start..range.end() {
                    found.page(memory, page, differing_bytes(first, second, page));
                }
            }
        }
        Ok(found)
    }

    fn page(&mut self, memory: usize, page: usize, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.pages += 1;
        self.bytes += bytes;
        match self.ranges.last_mut() {
            Some((last, range)) if *last == memory && range.end() == page => range.len += 1,
            _ => self.ranges.push((memory, PageRange::new(page, 1))),
        }
    }
}

fn differing_bytes(one: &Image, two: &Image, page: usize) -> usize {
    const ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
    let (one, two) = (one.page(page).unwrap_or(&ZEROS), two.page(page).unwrap_or(&ZEROS));
    if one == two { 0 } else { one.iter().zip(two).filter(|(a, b)| a != b).count() }
}
