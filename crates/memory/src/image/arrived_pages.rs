//! The pages of a lazily filled image that have arrived.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use afresh_sys::PageRange;

/// Which pages of a lazily filled image have arrived.
#[derive(Debug)]
pub(super) struct ArrivedPages {
    /// A bit a page.
    bits: Box<[AtomicU64]>,
    /// Pages of `filled` that have not.
    left: AtomicUsize,
    /// The pages that the filler answers for.
    filled: Vec<PageRange>,
}

impl ArrivedPages {
    pub(super) fn new(pages: usize, filled: Vec<PageRange>) -> Self {
        Self {
            bits: (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            left: AtomicUsize::new(filled.iter().map(|run| run.len).sum()),
            filled,
        }
    }

    /// Whether `page` has.
    pub(super) fn has(&self, page: usize) -> bool {
        let word = self.bits.get(page / 64).map_or(0, |word| word.load(Ordering::Acquire));
        word & (1 << (page % 64)) != 0
    }

    /// Whether all of `pages` has.
    pub(super) fn has_all(&self, pages: PageRange) -> bool {
        (pages.start..pages.end()).all(|page| self.has(page))
    }

    /// Whether everything has.
    pub(super) fn all(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    /// The pages that the filler answers for.
    pub(super) fn filled(&self) -> &[PageRange] {
        &self.filled
    }

    /// Notes pages that are in place. Each is noted once.
    pub(super) fn note(&self, pages: PageRange) {
        for page in pages.start..pages.end() {
            self.bits[page / 64].fetch_or(1 << (page % 64), Ordering::AcqRel);
        }
        let first = self.filled.partition_point(|run| run.end() <= pages.start);
        let of_filler: usize =
            self.filled[first..].iter().map_while(|run| run.intersect(pages)).map(|r| r.len).sum();
        self.left.fetch_sub(of_filler, Ordering::AcqRel);
    }
}
