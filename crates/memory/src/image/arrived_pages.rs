//! The pages of a lazily filled image that have arrived.
//!
//! Promises: a thread that has seen every page also sees that all have arrived, even while another
//! thread still notes the last of them.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use afresh_sys::PageRange;

/// Which pages of a lazily filled image have arrived.
#[derive(Debug)]
pub(super) struct ArrivedPages {
    /// A bit a page.
    bits: Box<[AtomicU64]>,
    /// Pages of `filled` that are not counted as arrived yet.
    left: AtomicUsize,
    /// Threads that note pages now: they may have set bits that `left` does not count yet.
    noting: AtomicUsize,
    /// The pages that the filler answers for.
    filled: Vec<PageRange>,
}

impl ArrivedPages {
    pub(super) fn new(pages: usize, filled: Vec<PageRange>) -> Self {
        Self {
            bits: (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            left: AtomicUsize::new(filled.iter().map(|run| run.len).sum()),
            noting: AtomicUsize::new(0),
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
        let mut page = pages.start;
        while page < pages.end() {
            let first = page % 64;
            let count = (64 - first).min(pages.end() - page);
            let wanted = (u64::MAX >> (64 - count)) << first;
            let word = self.bits.get(page / 64).map_or(0, |word| word.load(Ordering::Acquire));
            if word & wanted != wanted {
                return false;
            }
            page += count;
        }
        true
    }

    /// Whether everything has.
    pub(super) fn all(&self) -> bool {
        // Before `left`: a thread that is no longer counted here has subtracted its pages there.
        let noting = self.noting.load(Ordering::Acquire);
        self.left.load(Ordering::Acquire) == 0
            || noting > 0 && self.filled.iter().all(|run| self.has_all(*run))
    }

    /// The pages that the filler answers for.
    pub(super) fn filled(&self) -> &[PageRange] {
        &self.filled
    }

    /// Notes pages that are in place. Each is noted once.
    pub(super) fn note(&self, pages: PageRange) {
        self.noting.fetch_add(1, Ordering::AcqRel);
        self.mark(pages);
        self.count(pages);
        self.noting.fetch_sub(1, Ordering::AcqRel);
    }

    fn mark(&self, pages: PageRange) {
        for page in pages.start..pages.end() {
            self.bits[page / 64].fetch_or(1 << (page % 64), Ordering::AcqRel);
        }
    }

    fn count(&self, pages: PageRange) {
        let first = self.filled.partition_point(|run| run.end() <= pages.start);
        let of_filler: usize =
            self.filled[first..].iter().map_while(|run| run.intersect(pages)).map(|r| r.len).sum();
        self.left.fetch_sub(of_filler, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_arrived_when_each_of_its_pages_has() {
        let pages = 200;
        let step = if cfg!(miri) { 21 } else { 1 };
        for hole in [0, 1, 63, 64, 65, 127, 128, 150, 199] {
            let arrived = ArrivedPages::new(pages, vec![PageRange::new(0, pages)]);
            arrived.mark(PageRange::new(0, hole));
            arrived.mark(PageRange::new(hole + 1, pages - hole - 1));
            for start in (0..pages).step_by(step) {
                for len in (0..=pages - start).step_by(step) {
                    let expected = !(start..start + len).contains(&hole);
                    let range = PageRange::new(start, len);
                    assert_eq!(arrived.has_all(range), expected, "{range:?} without {hole}");
                }
            }
        }
        // No page past the end has.
        let arrived = ArrivedPages::new(64, vec![PageRange::new(0, 64)]);
        arrived.mark(PageRange::new(0, 64));
        assert!(arrived.has_all(PageRange::new(0, 64)));
        assert!(!arrived.has_all(PageRange::new(0, 65)));
    }

    #[test]
    fn everything_has_arrived_for_a_thread_that_has_seen_every_page() {
        let arrived = ArrivedPages::new(70, vec![PageRange::new(0, 2), PageRange::new(65, 3)]);
        arrived.note(PageRange::new(0, 2));
        assert!(!arrived.all());
        // A thread is between the bits of the last pages and their count.
        arrived.noting.fetch_add(1, Ordering::AcqRel);
        assert!(!arrived.all());
        arrived.mark(PageRange::new(65, 3));
        assert!(arrived.has_all(PageRange::new(65, 3)) && arrived.all());
        arrived.count(PageRange::new(65, 3));
        arrived.noting.fetch_sub(1, Ordering::AcqRel);
        assert!(arrived.all());
    }
}
