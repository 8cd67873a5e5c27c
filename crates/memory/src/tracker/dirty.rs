//! A set of dirty pages that fault handlers fill and a reset empties.
//!
//! Two levels of bits: one a page, and one a word of pages, so that emptying costs time in proportion
//! to what is in the set, not to the slot's capacity; and a flag that makes the common case, an empty
//! set, one load. Marking is lock-free and allocates nothing, so it may run in a signal handler, in
//! several threads at once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use afresh_sys::PageRange;

const BITS: usize = u64::BITS as usize;

/// Pages marked dirty, by index.
#[derive(Debug)]
pub struct DirtyPages {
    any: AtomicBool,
    /// Bit w is set when `words[w]` may hold a bit.
    summary: Box<[AtomicU64]>,
    words: Box<[AtomicU64]>,
    pages: usize,
}

fn zeroed(len: usize) -> Box<[AtomicU64]> {
    // `vec![0; n]` asks the allocator for zeroed memory, which for a large slot is not touched until
    // it is used; building atomics one by one would touch all of it.
    let mut zeros = std::mem::ManuallyDrop::new(vec![0u64; len].into_boxed_slice());
    let raw: *mut [u64] = &mut **zeros;
    // SAFETY: AtomicU64 has the size, alignment and bit validity of u64, and ownership moves over.
    unsafe { Box::from_raw(raw as *mut [AtomicU64]) }
}

impl DirtyPages {
    /// An empty set for pages `0 .. pages`.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        let words = pages.div_ceil(BITS);
        Self {
            any: AtomicBool::new(false),
            summary: zeroed(words.div_ceil(BITS)),
            words: zeroed(words),
            pages,
        }
    }

    /// Marks the pages of `range` that the set can hold.
    pub fn mark(&self, range: PageRange) {
        let end = range.end().min(self.pages);
        let mut page = range.start;
        while page < end {
            let (word, bit) = (page / BITS, page % BITS);
            let len = (BITS - bit).min(end - page);
            self.words[word].fetch_or((u64::MAX >> (BITS - len)) << bit, Ordering::Relaxed);
            self.summary[word / BITS].fetch_or(1 << (word % BITS), Ordering::Relaxed);
            page += len;
        }
        self.any.store(true, Ordering::Release);
    }

    /// Whether `page` is in the set.
    #[must_use]
    pub fn contains(&self, page: usize) -> bool {
        page < self.pages
            && self.words[page / BITS].load(Ordering::Relaxed) & (1 << (page % BITS)) != 0
    }

    /// The longest run of the set around `page`, which is in it; at most `limit` pages to each side.
    #[must_use]
    pub fn run_around(&self, page: usize, limit: usize) -> PageRange {
        let (mut start, mut end) = (page, page + 1);
        while start > 0 && page - start < limit && self.contains(start - 1) {
            start -= 1;
        }
        while end - page <= limit && self.contains(end) {
            end += 1;
        }
        PageRange::new(start, end - start)
    }

    /// Takes the pages of `range` out of the set.
    pub fn clear(&self, range: PageRange) {
        for page in range.start..range.end().min(self.pages) {
            self.words[page / BITS].fetch_and(!(1 << (page % BITS)), Ordering::Relaxed);
        }
    }

    /// Whether the set is empty.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Appends the set's pages as runs, in order, and empties it.
    pub fn drain(&self, out: &mut Vec<PageRange>) {
        if !self.any.swap(false, Ordering::AcqRel) {
            return;
        }
        for (s, summary) in self.summary.iter().enumerate() {
            let mut words = summary.load(Ordering::Relaxed);
            if words == 0 {
                continue;
            }
            words = summary.swap(0, Ordering::Relaxed);
            while words != 0 {
                let w = s * BITS + words.trailing_zeros() as usize;
                words &= words - 1;
                let mut bits = self.words[w].swap(0, Ordering::Relaxed);
                while bits != 0 {
                    let start = bits.trailing_zeros() as usize;
                    let len = (bits >> start).trailing_ones() as usize;
                    push_run(out, PageRange::new(w * BITS + start, len));
                    bits &= if start + len == BITS { 0 } else { u64::MAX << (start + len) };
                }
            }
        }
    }
}

/// Appends a run, joining it to the last one when they touch.
pub(crate) fn push_run(out: &mut Vec<PageRange>, run: PageRange) {
    match out.last_mut() {
        Some(last) if last.end() == run.start => last.len += run.len,
        _ => out.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draining_returns_exactly_what_was_marked_in_order_and_empties_the_set() {
        let set = DirtyPages::new(10_000);
        for range in [(9_999, 1), (63, 2), (0, 1), (128, 64), (5000, 3), (9_998, 5)] {
            set.mark(PageRange::new(range.0, range.1));
        }
        let mut out = Vec::new();
        set.drain(&mut out);
        let expected = [(0, 1), (63, 2), (128, 64), (5000, 3), (9_998, 2)];
        assert_eq!(out, expected.map(|(s, l)| PageRange::new(s, l)));
        assert!(set.is_empty());
        out.clear();
        set.drain(&mut out);
        assert!(out.is_empty());
    }

    #[test]
    fn marks_of_many_threads_are_all_there() {
        let set = DirtyPages::new(4096);
        std::thread::scope(|scope| {
            for t in 0..4 {
                let set = &set;
                scope.spawn(move || {
                    for page in (t..4096).step_by(4) {
                        set.mark(PageRange::new(page, 1));
                    }
                });
            }
        });
        let mut out = Vec::new();
        set.drain(&mut out);
        assert_eq!(out, [PageRange::new(0, 4096)]);
    }
}
