//! A set of dirty pages that fault handlers fill and a reset empties.
//!
//! Two levels of bits: one a page, and one a word of pages, so that emptying costs time in
//! proportion to the entries of the set, not to the slot's capacity. A flag makes the common case,
//! an empty set, one load. Marking is lock-free and allocates nothing, so it may run in a signal
//! handler, in several threads at once.
//!
//! Memory ordering: the levels are stored from the pages up and loaded from the flag down, each
//! store of an upper level a release and each load of one an acquire. A thread that finds a bit of
//! an upper level thus finds the page below it. A page that is marked while the set is emptied is
//! in this list or in the next one.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use afresh_sys::{PAGE_SIZE, PageRange, Protection, Reservation};

const BITS: usize = u64::BITS as usize;

/// Pages marked dirty, by index.
#[derive(Debug)]
pub struct DirtyPages {
    any: AtomicBool,
    /// Bit w is set when `words[w]` may hold a bit.
    summary: Box<[AtomicU64]>,
    words: Words,
    pages: usize,
}

/// A word for every 64 pages. A slot of 4 GiB needs 128 KiB, mostly unused, so a large array is a
/// separate mapping. The allocator would return memory with earlier uses, and make all of it
/// resident by zeroing it.
#[derive(Debug)]
enum Words {
    Small(Box<[AtomicU64]>),
    Large(Reservation, usize),
}

/// Words from which on an array is large.
const LARGE_WORDS: usize = 4 * PAGE_SIZE / size_of::<AtomicU64>();

fn zeroed(len: usize) -> Box<[AtomicU64]> {
    (0..len).map(|_| AtomicU64::new(0)).collect()
}

impl Words {
    fn zeroed(len: usize) -> Self {
        let pages = PageRange::new(0, (len * size_of::<AtomicU64>()).div_ceil(PAGE_SIZE));
        if len >= LARGE_WORDS
            && let Ok(memory) = Reservation::new(pages.len)
            && memory.protect(pages, Protection::ReadWrite).is_ok()
        {
            return Self::Large(memory, len);
        }
        Self::Small(zeroed(len))
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        match self {
            Words::Small(words) => words,
            // SAFETY: `zeroed` made the first `len` words of the reservation accessible. They hold
            // zeros, a valid value, until these references write others. It is aligned to pages,
            // belongs to `self`, and nothing else knows where it is.
            Words::Large(memory, len) => unsafe {
                std::slice::from_raw_parts(memory.base().cast::<AtomicU64>().as_ptr(), *len)
            },
        }
    }
}

impl DirtyPages {
    /// An empty set for pages `0 .. pages`.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        let words = pages.div_ceil(BITS);
        Self {
            any: AtomicBool::new(false),
            summary: zeroed(words.div_ceil(BITS)),
            words: Words::zeroed(words),
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
            self.summary[word / BITS].fetch_or(1 << (word % BITS), Ordering::Release);
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

    /// The longest run of the set around `page`, which is in it; at most `limit` pages to each
    /// side.
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

    /// Removes the pages of `range` from the set.
    pub fn clear(&self, range: PageRange) {
        let end = range.end().min(self.pages);
        let mut page = range.start;
        while page < end {
            let (word, bit) = (page / BITS, page % BITS);
            let len = (BITS - bit).min(end - page);
            self.words[word].fetch_and(!((u64::MAX >> (BITS - len)) << bit), Ordering::Relaxed);
            page += len;
        }
    }

    /// The number of runs in the set that hold a page of `range` or a neighbour of it.
    pub(crate) fn runs_touching(&self, range: PageRange) -> usize {
        let end = range.end().saturating_add(1).min(self.pages);
        let mut page = range.start.saturating_sub(1);
        let (mut count, mut inside) = (0, false);
        while page < end {
            let (word, bit) = (page / BITS, page % BITS);
            let len = (BITS - bit).min(end - page);
            let bits = self.words[word].load(Ordering::Relaxed) >> bit & u64::MAX >> (BITS - len);
            count += (bits & !(bits << 1 | u64::from(inside))).count_ones() as usize;
            inside = bits >> (len - 1) & 1 != 0;
            page += len;
        }
        count
    }

    /// Appends the set's pages as runs, in order; the set stays as it is.
    pub(crate) fn append(&self, out: &mut Vec<PageRange>) {
        for (s, summary) in self.summary.iter().enumerate() {
            let mut words = summary.load(Ordering::Acquire);
            while words != 0 {
                let w = s * BITS + words.trailing_zeros() as usize;
                words &= words - 1;
                push_bits(out, w, self.words[w].load(Ordering::Relaxed));
            }
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
            words = summary.swap(0, Ordering::Acquire);
            while words != 0 {
                let w = s * BITS + words.trailing_zeros() as usize;
                words &= words - 1;
                push_bits(out, w, self.words[w].swap(0, Ordering::Relaxed));
            }
        }
    }
}

/// Appends the pages whose bits are set in word `w`.
fn push_bits(out: &mut Vec<PageRange>, w: usize, mut bits: u64) {
    while bits != 0 {
        let start = bits.trailing_zeros() as usize;
        let len = (bits >> start).trailing_ones() as usize;
        push_run(out, PageRange::new(w * BITS + start, len));
        bits &= if start + len == BITS { 0 } else { u64::MAX << (start + len) };
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
    fn a_set_for_a_large_slot_takes_memory_where_it_is_used() {
        let set = DirtyPages::new(1 << 20);
        let Words::Large(memory, len) = &set.words else { panic!("{set:?}") };
        assert_eq!(*len, (1 << 20) / BITS);
        set.mark(PageRange::new((1 << 20) - 3, 3));
        set.mark(PageRange::new(7, 1));
        if !cfg!(miri) {
            let resident = memory.resident_pages(PageRange::new(0, memory.pages()));
            assert!(resident <= 2, "{resident} pages");
        }
        let mut out = Vec::new();
        set.drain(&mut out);
        assert_eq!(out, [PageRange::new(7, 1), PageRange::new((1 << 20) - 3, 3)]);
    }

    #[test]
    fn runs_are_counted_with_their_neighbours_across_words() {
        let set = DirtyPages::new(200);
        for range in [(0, 1), (3, 2), (62, 4), (199, 1)] {
            set.mark(PageRange::new(range.0, range.1));
        }
        let touching = |start, len| set.runs_touching(PageRange::new(start, len));
        assert_eq!(touching(0, 200), 4);
        assert_eq!((touching(1, 1), touching(2, 1), touching(1, 2)), (1, 1, 2));
        assert_eq!((touching(63, 1), touching(66, 1), touching(67, 1)), (1, 1, 0));
        assert_eq!((touching(198, 1), touching(197, 1)), (1, 0));
        set.clear(PageRange::new(4, 60));
        let mut out = Vec::new();
        set.append(&mut out);
        let expected = [(0, 1), (3, 1), (64, 2), (199, 1)];
        assert_eq!(out, expected.map(|(s, l)| PageRange::new(s, l)));
        assert!(!set.is_empty());
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
