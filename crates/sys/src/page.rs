//! Pages and ranges of pages: the unit everything in afresh is counted in.
//!
//! A [`PageRange`] counts pages, never bytes; the conversion is explicit, so that the two cannot be
//! confused.

/// Bytes in a page: of every x86-64 kernel, and of the arm64 kernels that afresh works with. Others
/// are refused.
pub const PAGE_SIZE: usize = 4096;

/// Bytes in a huge page, on both processors.
pub const HUGE_SIZE: usize = 2 << 20;

/// Pages in a huge page.
pub const HUGE_PAGES: usize = HUGE_SIZE / PAGE_SIZE;

/// Rounds `bytes` up to a whole number of pages, in bytes.
///
/// Saturates at the largest multiple of the page size, so a hostile length cannot wrap to zero.
#[must_use]
pub const fn page_align_up(bytes: usize) -> usize {
    bytes.saturating_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1)
}

/// A run of consecutive pages, as indices relative to some base address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRange {
    /// Index of the first page.
    pub start: usize,
    /// Number of pages.
    pub len: usize,
}

impl PageRange {
    /// The pages of `ranges`, in order and without overlap.
    #[must_use]
    pub fn merge(mut ranges: Vec<Self>) -> Vec<Self> {
        ranges.sort();
        let mut merged: Vec<Self> = Vec::new();
        for range in ranges {
            match merged.last_mut() {
                Some(last) if range.start <= last.end() => {
                    last.len = last.len.max(range.end() - last.start);
                }
                _ => merged.push(range),
            }
        }
        merged
    }

    /// A range of `len` pages that begins at page `start`.
    #[must_use]
    pub const fn new(start: usize, len: usize) -> Self {
        Self { start, len }
    }

    /// The pages that the byte range `offset .. offset + len` touches.
    #[must_use]
    pub const fn covering(offset: usize, len: usize) -> Self {
        if len == 0 {
            return Self { start: offset / PAGE_SIZE, len: 0 };
        }
        let start = offset / PAGE_SIZE;
        let end = (offset + len).div_ceil(PAGE_SIZE);
        Self { start, len: end - start }
    }

    /// One past the last page.
    #[must_use]
    pub const fn end(self) -> usize {
        self.start + self.len
    }

    /// Whether the range holds no page.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Offset of the first byte.
    #[must_use]
    pub const fn byte_start(self) -> usize {
        self.start * PAGE_SIZE
    }

    /// Length in bytes.
    #[must_use]
    pub const fn byte_len(self) -> usize {
        self.len * PAGE_SIZE
    }

    /// Whether `page` is in the range.
    #[must_use]
    pub const fn contains(self, page: usize) -> bool {
        page >= self.start && page < self.end()
    }

    /// The pages both ranges hold, or `None` when they share none.
    #[must_use]
    pub fn intersect(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        (start < end).then(|| Self::new(start, end - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covering_counts_partial_pages_at_both_ends() {
        assert_eq!(PageRange::covering(4095, 2), PageRange::new(0, 2));
        assert_eq!(PageRange::covering(4096, 4096), PageRange::new(1, 1));
        assert_eq!(PageRange::covering(5000, 0), PageRange::new(1, 0));
    }

    #[test]
    fn aligning_the_largest_length_does_not_wrap() {
        assert_eq!(page_align_up(usize::MAX) % PAGE_SIZE, 0);
        assert!(page_align_up(usize::MAX) > 0);
    }
}
