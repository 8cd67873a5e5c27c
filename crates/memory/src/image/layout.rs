//! The layout of a backing: the place of each run of pages in its file.
//!
//! Runs are stored one after the other. Between some of them is a hole, as long as the gap between
//! the runs in the image, so that both are mapped as one. A hole takes no memory until a guest
//! reads it through such a mapping. Then the kernel adds a page of zeros to the file. It is freed
//! with the image.
//!
//! Promises: places are in the order of the runs and do not overlap. Where the gaps allow it, a
//! slot needs at most [`MAX_RUNS`] mappings for a backing, or [`MAX_LONG_RUNS`] with long gaps. The
//! holes take memory in proportion to the runs ([`max_zeros`]), unless a slot would need more than
//! [`MAX_SPARSE_RUNS`] mappings.

use std::sync::Arc;

use afresh_sys::{Memfd, PAGE_SIZE, PageRange, SysError};

use super::{Backing, Extent};

/// Maximum mappings that a slot should need for one backing.
const MAX_RUNS: usize = 256;
/// The same where only long gaps are left to bridge.
const MAX_LONG_RUNS: usize = 2 * MAX_RUNS;
/// Gaps of up to this many pages are always bridged.
const SMALL_GAP: usize = 16;
/// Gaps of more pages are long: 128 MiB. The page tables of a slot that watches the hole take more
/// than a mapping.
const LONG_GAP: usize = 32 << 10;
/// Mappings of an image from which on gaps are bridged beyond [`max_zeros`]. A process can have
/// 65,530 mappings by default, and its guests share them.
pub(super) const MAX_SPARSE_RUNS: usize = 16 * MAX_RUNS;
/// Pages of zeros in bridged gaps, apart from [`ZEROS_PER_PAGE`] and small gaps.
const MAX_ZEROS: usize = 1024;
/// The same for each page of the runs.
const ZEROS_PER_PAGE: usize = 4;

/// Maximum pages of zeros that gaps between `pages` pages may take. Small gaps do not count,
/// because they are in proportion to the runs.
fn max_zeros(pages: usize) -> usize {
    pages.saturating_mul(ZEROS_PER_PAGE).saturating_add(MAX_ZEROS)
}

/// Which of the gaps between `runs` are bridged: small ones, and as many others as leave at most
/// [`MAX_RUNS`] mappings, the shortest first. Of long gaps only as many are bridged as leave
/// [`MAX_LONG_RUNS`] mappings. Together they have at most [`max_zeros`] pages, unless more than
/// `max_sparse` mappings would be left.
///
/// A gap for which `can_bridge` is false is never bridged, because its ends are two mappings in any
/// case. Where these gaps alone need more mappings, no other gap is bridged: its hole would reserve
/// addresses and not meet the limit.
pub(super) fn bridged_gaps(
    runs: &[PageRange],
    can_bridge: impl Fn(PageRange) -> bool,
    max_sparse: usize,
) -> Vec<bool> {
    let gap = |pair: &[PageRange]| PageRange::new(pair[0].end(), pair[1].start - pair[0].end());
    let mut bridged = vec![false; runs.len().saturating_sub(1)];
    let mut others = Vec::new();
    let mut apart = 0;
    for (at, gap) in runs.windows(2).map(gap).enumerate() {
        if gap.len > 0 && !can_bridge(gap) {
            apart += 1;
        } else if gap.len <= SMALL_GAP {
            bridged[at] = true;
        } else {
            others.push((gap.len, at));
        }
    }
    let excess = |limit: usize| match apart < MAX_RUNS {
        true => (apart + others.len()).saturating_sub(limit - 1),
        false => 0,
    };
    let (excess, long_excess, sparse_excess) =
        (excess(MAX_RUNS), excess(MAX_LONG_RUNS), excess(max_sparse));
    others.sort_unstable();
    let short = others.partition_point(|(len, _)| *len <= LONG_GAP);
    let count = excess.min(short.max(long_excess));
    let mut left = max_zeros(runs.iter().map(|run| run.len).sum());
    let in_proportion = others.iter().take_while(|(len, _)| {
        let fits = *len <= left;
        left = left.saturating_sub(*len);
        fits
    });
    let count = count.min(in_proportion.count().max(sparse_excess));
    others.iter().take(count).for_each(|(_, at)| bridged[*at] = true);
    bridged
}

/// Runs of pages, and the place of each in a backing.
pub(super) struct BackingLayout<'a> {
    runs: &'a [PageRange],
    places: Vec<PageRange>,
}

impl<'a> BackingLayout<'a> {
    /// Places for `runs`, which are in order and do not overlap. `can_bridge` as for
    /// [`bridged_gaps`].
    pub(super) fn new(runs: &'a [PageRange], can_bridge: impl Fn(PageRange) -> bool) -> Self {
        let bridged = bridged_gaps(runs, can_bridge, MAX_SPARSE_RUNS);
        let mut places = Vec::with_capacity(runs.len());
        let mut at = 0;
        for (number, run) in runs.iter().enumerate() {
            if number > 0 && bridged[number - 1] {
                at += run.start - runs[number - 1].end();
            }
            places.push(PageRange::new(at, run.len));
            at += run.len;
        }
        Self { runs, places }
    }

    pub(super) fn places(&self) -> &[PageRange] {
        &self.places
    }

    /// The runs as parts of `backing`.
    pub(super) fn extents(&self, backing: &Arc<Backing>) -> Vec<Extent> {
        let extent = |(run, place): (&PageRange, &PageRange)| Extent {
            range: *run,
            backing: backing.clone(),
            at: place.start,
        };
        self.runs.iter().zip(&self.places).map(extent).collect()
    }

    /// Runs that follow one another in the backing, and the page there at which they begin.
    pub(super) fn groups(&self) -> impl Iterator<Item = (&[PageRange], usize)> {
        let mut from = 0;
        std::iter::from_fn(move || {
            let first = self.places.get(from)?.start;
            let follow = self.places[from..].windows(2).take_while(|w| w[0].end() == w[1].start);
            let to = from + 1 + follow.count();
            let runs = &self.runs[from..to];
            from = to;
            Some((runs, first))
        })
    }

    /// Writes `bytes`, the content of `parts` of the runs, to the backing that begins at page
    /// `start` of `file`. Parts that follow one another there are one write.
    pub(super) fn write(
        &self,
        file: &Memfd,
        start: usize,
        parts: &[PageRange],
        bytes: &[u8],
    ) -> Result<(), SysError> {
        let place = |part: &PageRange| {
            let at = self.runs.partition_point(|run| run.end() <= part.start);
            self.places[at].start + part.start - self.runs[at].start
        };
        let mut rest = bytes;
        let mut parts = parts.iter().peekable();
        while let Some(part) = parts.next() {
            let first = place(part);
            let mut end = first + part.len;
            while let Some(next) = parts.next_if(|next| place(next) == end) {
                end += next.len;
            }
            let (now, later) = rest.split_at((end - first) * PAGE_SIZE);
            file.write_at(now, (start + first) * PAGE_SIZE)?;
            rest = later;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs of one page, `stride` pages from one another.
    fn scattered(count: usize, stride: usize) -> Vec<PageRange> {
        (0..count).map(|n| PageRange::new(7 + n * stride, 1)).collect()
    }

    #[test]
    fn equal_gaps_are_bridged_only_as_far_as_the_mappings_need_it() {
        for (count, excess) in [(256, 0), (257, 1), (300, 44)] {
            let runs = scattered(count, 20);
            let bridged = bridged_gaps(&runs, |_| true, MAX_SPARSE_RUNS);
            assert_eq!(bridged.iter().filter(|bridged| **bridged).count(), excess);
            let layout = BackingLayout::new(&runs, |_| true);
            let end = layout.places().last().unwrap().end();
            assert_eq!(end, count + excess * 19);
        }
    }

    #[test]
    fn the_shortest_gaps_are_bridged_first() {
        let mut runs = scattered(300, 50);
        // A run with a shorter gap before it than the others, and one with a small gap.
        runs[100].start -= 10;
        runs[200].start -= 40;
        let bridged = bridged_gaps(&runs, |_| true, MAX_SPARSE_RUNS);
        assert!(bridged[99] && bridged[199]);
        assert_eq!(bridged.iter().filter(|bridged| **bridged).count(), 44);
    }

    #[test]
    fn gaps_with_pages_of_another_backing_are_not_bridged() {
        let runs = scattered(300, 3);
        let layout = BackingLayout::new(&runs, |gap| gap.start > 500);
        let bridged = bridged_gaps(&runs, |gap| gap.start > 500, MAX_SPARSE_RUNS);
        for (pair, bridged) in runs.windows(2).zip(bridged) {
            assert_eq!(bridged, pair[0].end() > 500);
        }
        let (first, at) = layout.groups().next().unwrap();
        assert_eq!((first.len(), at), (166, 0));
        let runs: Vec<_> = layout.groups().flat_map(|(runs, _)| runs).copied().collect();
        assert_eq!(runs, layout.runs);
    }

    #[test]
    fn gaps_are_not_bridged_where_the_limit_is_missed_anyway_or_they_are_long() {
        for (apart, len, is_bridged) in [
            (MAX_RUNS - 2, LONG_GAP, false),
            (MAX_RUNS - 1, LONG_GAP, true),
            (MAX_RUNS - 1, 1_000_000, false),
            (MAX_RUNS - 5, 1_000_000, false),
            (300, LONG_GAP, false),
        ] {
            let mut runs = scattered(apart + 1, 4);
            let end = runs.last().unwrap().end();
            // A gap of that length, and a small one. The last run has pages enough for the gap.
            let last = PageRange::new(end + len + 4, len);
            runs.extend([PageRange::new(end + len, 1), last]);
            let can_bridge = |gap: PageRange| gap.start >= end;
            let bridged = bridged_gaps(&runs, can_bridge, MAX_SPARSE_RUNS);
            assert!(!bridged[..apart].contains(&true), "{apart} gaps");
            assert_eq!(bridged[apart..], [is_bridged, true], "{apart} gaps");
            let pages = BackingLayout::new(&runs, can_bridge).places().last().unwrap().end();
            let hole = if is_bridged { len } else { 0 };
            assert_eq!(pages, runs.len() - 1 + last.len + 3 + hole, "{apart} gaps");
        }
    }

    #[test]
    fn long_gaps_are_bridged_as_far_as_twice_the_mappings_need_it() {
        for (count, excess) in [(300, 0), (MAX_LONG_RUNS, 0), (600, 600 - MAX_LONG_RUNS)] {
            let mut runs = scattered(count, 10 * LONG_GAP);
            // Pages enough for any of the gaps.
            runs.last_mut().unwrap().len = count * 10 * LONG_GAP;
            let bridged = bridged_gaps(&runs, |_| true, MAX_SPARSE_RUNS);
            assert_eq!(bridged.iter().filter(|bridged| **bridged).count(), excess, "{count}");
            // A gap that is not long is bridged first.
            runs[100].start -= 9 * LONG_GAP;
            let bridged = bridged_gaps(&runs, |_| true, MAX_SPARSE_RUNS);
            assert!(bridged[99], "{count}");
            assert_eq!(
                bridged.iter().filter(|bridged| **bridged).count(),
                excess.max(1),
                "{count}"
            );
        }
    }

    #[test]
    fn zeros_between_runs_are_in_proportion_to_the_pages_of_the_runs() {
        for (count, stride) in [(300, 1000), (600, 25_000), (600, 10 * LONG_GAP), (4096, 1000)] {
            let runs = scattered(count, stride);
            let end = BackingLayout::new(&runs, |_| true).places().last().unwrap().end();
            assert!(end <= count + max_zeros(count), "{count} pages, one in {stride}");
        }
        // Small gaps are bridged in any case.
        assert!(!bridged_gaps(&scattered(600, 10), |_| true, usize::MAX).contains(&false));
    }

    #[test]
    fn more_zeros_are_taken_only_where_an_image_would_need_too_many_mappings() {
        let runs = scattered(MAX_SPARSE_RUNS + 100, 1000);
        let count = |max_sparse| {
            let bridged = bridged_gaps(&runs, |_| true, max_sparse);
            bridged.iter().filter(|bridged| **bridged).count()
        };
        assert_eq!(count(MAX_SPARSE_RUNS), 100);
        assert_eq!(count(usize::MAX), max_zeros(runs.len()) / 999);
    }

    // It reads the file through a descriptor.
    #[cfg(not(any(miri, afresh_portable)))]
    #[test]
    fn parts_of_runs_are_written_to_their_places() {
        use std::os::fd::AsFd;
        use std::os::unix::fs::FileExt;

        const START: usize = 3;
        let runs = [PageRange::new(2, 3), PageRange::new(9, 2), PageRange::new(100, 4)];
        let layout = BackingLayout::new(&runs, |gap| gap.start < 9);
        let parts = [
            PageRange::new(2, 1),
            PageRange::new(3, 2),
            PageRange::new(10, 1),
            PageRange::new(100, 2),
            PageRange::new(103, 1),
        ];
        let pages = parts.iter().flat_map(|part| part.start..part.end());
        let bytes: Vec<u8> = pages.flat_map(|page| [page as u8; PAGE_SIZE]).collect();
        let file = Memfd::new(c"layout").unwrap();
        layout.write(&file, START, &parts, &bytes).unwrap();
        let file = std::fs::File::from(file.as_fd().try_clone_to_owned().unwrap());
        // Four pages between the first two runs are a hole, and the third follows the second.
        let places = [(2, 0), (3, 1), (4, 2), (10, 8), (100, 9), (101, 10), (103, 12)];
        let mut page = [0; PAGE_SIZE];
        for at in 0..13 {
            let expected = places.iter().find(|place| place.1 == at).map_or(0, |place| place.0);
            file.read_exact_at(&mut page, ((START + at) * PAGE_SIZE) as u64).unwrap();
            assert_eq!(page, [expected; PAGE_SIZE], "page {at}");
        }
    }
}
