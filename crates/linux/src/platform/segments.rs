//! Segments: the mappings of a guest, and their pages in its image.
//!
//! An image counts pages from 0; guest memory is scattered over its address space. Each mapping of
//! a frozen guest is a segment, with separate pages in the image. A page keeps its number from one
//! checkpoint to the next while it is mapped, so checkpoints share unchanged pages. Reserved
//! addresses, which were never accessible, are segments without pages, so that the image does not
//! grow with them.
//!
//! Promises: segments are sorted, inside the guest's address range, and overlap neither in
//! addresses nor in pages; segments from a snapshot are checked for that.

use std::ops::Range;

use afresh_memory::{PAGE_SIZE, PageRange};
use serde::{Deserialize, Serialize};

use super::stub::{GUEST, IMAGE_LEN};

const PAGE: u64 = PAGE_SIZE as u64;
/// The first page of a segment without pages.
const NO_PAGE: u64 = u64::MAX;

/// A mapping for which there is to be a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappedMemory {
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// The protection in the process.
    pub(crate) protection: u64,
    /// Whether it was never accessible in the process, so that it has no content.
    pub(crate) reserved: bool,
}

impl MappedMemory {
    pub(crate) fn range(&self) -> Range<u64> {
        self.start..self.start + self.len
    }
}

/// A mapping of a frozen guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Segment {
    /// First address.
    pub(crate) start: u64,
    /// Length in bytes, whole pages.
    pub(crate) len: u64,
    /// Protection, as `mmap` takes it.
    pub(crate) protection: u64,
    /// The first of its pages in the image, or [`NO_PAGE`].
    pub(crate) page: u64,
}

impl Segment {
    pub(crate) fn range(&self) -> Range<u64> {
        self.start..self.start + self.len
    }

    /// Its pages, none of reserved addresses.
    pub(crate) fn pages(&self) -> PageRange {
        match self.has_pages() {
            true => PageRange::new(self.page as usize, (self.len / PAGE) as usize),
            false => PageRange::new(0, 0),
        }
    }

    /// Whether it has pages in the image.
    pub(crate) fn has_pages(&self) -> bool {
        self.page != NO_PAGE
    }

    pub(crate) fn allows(&self, protection: libc::c_int) -> bool {
        self.protection & protection as u64 != 0
    }

    /// The part in `range`, if any.
    fn within(&self, range: &Range<u64>) -> Option<Segment> {
        let start = self.start.max(range.start);
        let end = (self.start + self.len).min(range.end);
        let page = |skipped: u64| if self.has_pages() { self.page + skipped } else { NO_PAGE };
        (start < end).then(|| Segment {
            start,
            len: end - start,
            page: page((start - self.start) / PAGE),
            ..*self
        })
    }
}

/// The segments of a frozen guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segments {
    /// By address.
    list: Vec<Segment>,
    /// Indices into the list of those with pages, by page.
    by_page: Vec<u32>,
    /// Pages of the image.
    pages: usize,
}

impl Segments {
    fn new(mut list: Vec<Segment>, pages: usize) -> Self {
        list.sort_unstable_by_key(|segment| segment.start);
        let all = 0..list.len() as u32;
        let mut by_page: Vec<u32> = all.filter(|&index| list[index as usize].has_pages()).collect();
        by_page.sort_unstable_by_key(|&index| list[index as usize].page);
        Self { list, by_page, pages }
    }

    /// Segments from a snapshot, for an image of `pages` pages, or their first error.
    pub(crate) fn checked(list: Vec<Segment>, pages: usize) -> Result<Self, &'static str> {
        let limit = IMAGE_LEN / PAGE;
        if pages as u64 > limit {
            return Err("its image is longer than a guest can be");
        }
        for segment in &list {
            let end = segment.start.checked_add(segment.len).filter(|end| *end <= GUEST.end);
            let last = segment.page.checked_add(segment.len / PAGE);
            let placed = match segment.has_pages() {
                true => last.is_some_and(|last| last <= pages as u64),
                false => segment.protection == 0,
            };
            let whole = segment.start.is_multiple_of(PAGE) && segment.len.is_multiple_of(PAGE);
            if segment.len == 0
                || !whole
                || segment.start < GUEST.start
                || end.is_none()
                || !placed
                || segment.protection & !7 != 0
            {
                return Err("a segment is outside of it");
            }
        }
        let this = Self::new(list, pages);
        let apart = this.list.windows(2).all(|two| two[0].range().end <= two[1].start);
        let ordered: Vec<_> = this.in_pages().map(Segment::pages).collect();
        if !apart || !ordered.windows(2).all(|two| two[0].end() <= two[1].start) {
            return Err("its segments overlap");
        }
        Ok(this)
    }

    /// The segments of `mappings` (sorted): memory already mapped here keeps its pages, the rest
    /// gets free ones.
    pub(crate) fn place(&self, mappings: impl IntoIterator<Item = MappedMemory>) -> Self {
        let (mut kept, mut new) = (Vec::new(), Vec::new());
        for MappedMemory { start, len, protection, reserved } in mappings {
            if reserved {
                kept.push(Segment { start, len, protection, page: NO_PAGE });
                continue;
            }
            let mut at = start;
            for part in self.within(start..start + len).filter(Segment::has_pages) {
                if at < part.start {
                    new.push((at, part.start - at, protection));
                }
                at = part.start + part.len;
                kept.push(Segment { protection, ..part });
            }
            if at < start + len {
                new.push((at, start + len - at, protection));
            }
        }
        // Pages without a segment, in order.
        let with_pages = kept.iter().filter(|segment| segment.has_pages());
        let mut taken: Vec<_> = with_pages.map(Segment::pages).collect();
        taken.sort_unstable_by_key(|run| run.start);
        let (mut free, mut end) = (Vec::new(), 0);
        for run in taken {
            if end < run.start {
                free.push(end..run.start);
            }
            end = run.end();
        }
        for (start, len, protection) in new {
            let pages = (len / PAGE) as usize;
            let page = match free.iter_mut().find(|gap| gap.len() >= pages) {
                Some(gap) => {
                    gap.start += pages;
                    gap.start - pages
                }
                None => {
                    end += pages;
                    end - pages
                }
            };
            kept.push(Segment { start, len, protection, page: page as u64 });
        }
        Self::new(kept, end)
    }

    /// Only the parts in `mappings` (sorted), with the same pages.
    pub(crate) fn cut(&self, mappings: impl IntoIterator<Item = MappedMemory>) -> Self {
        let ranges = mappings.into_iter().map(|mapping| mapping.range());
        Self::new(ranges.flat_map(|range| self.within(range)).collect(), self.pages)
    }

    /// All, by address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.list.iter()
    }

    /// All with pages, by page.
    fn in_pages(&self) -> impl Iterator<Item = &Segment> {
        self.by_page.iter().map(|&index| &self.list[index as usize])
    }

    /// Pages of the image.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// The parts of segments in a range of addresses.
    pub(crate) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Segment> + '_ {
        let first = self.list.partition_point(|s| s.start + s.len <= range.start);
        self.list[first..].iter().map_while(move |segment| segment.within(&range))
    }

    /// The parts of segments in a run of pages.
    pub(crate) fn showing(&self, run: PageRange) -> impl Iterator<Item = Segment> + '_ {
        let all = &self.list;
        let first =
            self.by_page.partition_point(|&index| all[index as usize].pages().end() <= run.start);
        self.by_page[first..].iter().map_while(move |&index| {
            let segment = &all[index as usize];
            let part = segment.pages().intersect(run)?;
            let skipped = (part.start - segment.page as usize) as u64 * PAGE;
            let start = segment.start + skipped;
            segment.within(&(start..start + part.byte_len() as u64))
        })
    }

    /// Runs of pages that the guest may write, in order.
    pub(crate) fn writable(&self) -> Vec<PageRange> {
        self.in_pages().filter(|s| s.allows(libc::PROT_WRITE)).map(Segment::pages).collect()
    }

    /// The pages of a set of addresses, in order.
    pub(crate) fn pages_of(&self, ranges: impl Iterator<Item = Range<u64>>) -> Vec<PageRange> {
        let parts = ranges.flat_map(|range| self.within(range)).filter(Segment::has_pages);
        let mut runs: Vec<_> = parts.map(|part| part.pages()).collect();
        runs.sort_unstable_by_key(|run| run.start);
        runs
    }

    /// The segments that the other does not have, just so.
    pub(crate) fn missing_in<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a Segment> {
        self.list.iter().filter(|segment| {
            let found = other.list.binary_search_by_key(&segment.start, |s| s.start);
            found.map_or(true, |index| other.list[index] != **segment)
        })
    }

    /// Runs of pages that the other has segments for, and these have not.
    pub(crate) fn without(&self, other: &Self) -> Vec<PageRange> {
        let mut gone = Vec::new();
        for run in other.in_pages().map(Segment::pages) {
            let mut at = run.start;
            for part in self.showing(run).map(|part| part.pages()) {
                if at < part.start {
                    gone.push(PageRange::new(at, part.start - at));
                }
                at = part.end();
            }
            if at < run.end() {
                gone.push(PageRange::new(at, run.end() - at));
            }
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(start: u64, pages: u64, page: u64) -> Segment {
        Segment { start: GUEST.start + start * PAGE, len: pages * PAGE, protection: 3, page }
    }

    fn mapping(start: u64, pages: u64) -> MappedMemory {
        let (start, len) = (GUEST.start + start * PAGE, pages * PAGE);
        MappedMemory { start, len, protection: 3, reserved: false }
    }

    fn reserved(start: u64, pages: u64) -> MappedMemory {
        MappedMemory { protection: 0, reserved: true, ..mapping(start, pages) }
    }

    #[test]
    fn reserved_addresses_have_no_pages() {
        const TERABYTES: u64 = (16 << 40) / PAGE;
        let first = Segments::default().place([mapping(0, 4), reserved(8, TERABYTES)]);
        assert_eq!((first.pages(), first.iter().count()), (4, 2));
        assert_eq!(first.pages_of(std::iter::once(GUEST)), [PageRange::new(0, 4)]);
        assert_eq!(Segments::checked(first.iter().copied().collect(), 4), Ok(first.clone()));
        // A part of them becomes accessible, in the pages of memory that is unmapped.
        let parts = [reserved(8, 2), mapping(10, 3), reserved(13, TERABYTES - 5)];
        let next = first.place(parts);
        assert_eq!((next.pages(), next.without(&first)), (3, vec![PageRange::new(3, 1)]));
        let shown: Vec<_> = next.showing(PageRange::new(0, 4)).collect();
        assert_eq!(shown, [segment(10, 3, 0)]);
        assert_eq!(next.missing_in(&first).count(), 3);
        // It is reserved anew.
        let last = next.place([reserved(8, TERABYTES)]);
        assert_eq!((last.pages(), last.without(&next)), (0, vec![PageRange::new(0, 3)]));
    }

    #[test]
    fn mappings_that_stay_keep_their_pages_and_new_ones_get_free_pages() {
        let first = Segments::default().place([mapping(0, 4), mapping(10, 2), mapping(20, 3)]);
        assert_eq!(first.pages(), 9);
        // The second goes, the first grows by two, the third loses its middle.
        let next = first.place([mapping(0, 6), mapping(20, 1), mapping(22, 1)]);
        let list: Vec<_> = next.iter().copied().collect();
        let expected = [segment(0, 4, 0), segment(4, 2, 4), segment(20, 1, 6), segment(22, 1, 8)];
        assert_eq!(list, expected);
        assert_eq!(next.pages(), 9);
        assert_eq!(next.without(&first), [PageRange::new(7, 1)]);
        assert_eq!(next.missing_in(&first).count(), 3);
        let shown: Vec<_> = next.showing(PageRange::new(3, 4)).collect();
        assert_eq!(shown, [segment(3, 1, 3), segment(4, 2, 4), segment(20, 1, 6)]);
    }

    #[test]
    fn segments_of_strangers_are_checked() {
        let bad = [
            vec![segment(0, 0, 0)],
            vec![segment(0, 2, 7)],
            vec![segment(0, 2, u64::MAX)],
            vec![segment(0, 2, 0), segment(1, 2, 2)],
            vec![segment(0, 2, 0), segment(4, 2, 1)],
            vec![Segment { start: 0, ..segment(0, 1, 0) }],
            vec![Segment { start: GUEST.end - PAGE, ..segment(0, 2, 0) }],
            vec![Segment { protection: 8, ..segment(0, 1, 0) }],
            vec![Segment { protection: 1, ..segment(0, 1, NO_PAGE) }],
            vec![segment(0, 2, NO_PAGE - 1)],
        ];
        for list in bad {
            assert!(Segments::checked(list.clone(), 8).is_err(), "{list:?}");
        }
        assert!(Segments::checked(vec![segment(4, 2, 0), segment(0, 2, 6)], 8).is_ok());
        assert!(Segments::checked(Vec::new(), usize::MAX).is_err());
    }
}
