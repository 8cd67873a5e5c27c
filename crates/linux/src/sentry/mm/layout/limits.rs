//! Limits of a layout: bytes and mappings, of one process and of all.
//!
//! Promises: a change is made only if its result is within the limits, rests of mappings that it
//! cuts included, and so is a copy of all of them. So [`Layout::check`] accepts every layout that a
//! guest has made.

use std::ops::Range;

use rustix::io::Errno;

use super::{Layout, MAPPINGS};
use crate::sentry::mm::memory_peak::note_mapped;

/// Maximum mappings of all processes. Those that only reserve addresses have no other bound.
pub(in crate::sentry) const MAX_ALL_MAPPINGS: usize = 1 << 19;

impl Layout {
    /// Bytes that may be mapped.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(in crate::sentry) fn set_limit(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Bytes that are mapped, here and in other processes.
    pub(in crate::sentry) fn bytes_everywhere(&self) -> u64 {
        self.own_bytes().saturating_add(self.elsewhere)
    }

    /// Bytes that are mapped.
    pub(in crate::sentry) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are mapped and not shared.
    pub(in crate::sentry) fn own_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.shared)
    }

    /// Bytes that are mapped and shared.
    pub(in crate::sentry) fn shared_bytes(&self) -> u64 {
        self.shared
    }

    /// Bytes that are no longer counted if a range is unmapped, or those that are only reserved.
    /// Shared memory is counted once for all of its mappings, so that of one frees none.
    pub(super) fn freed(&self, range: &Range<u64>, reserved: bool) -> u64 {
        let parts = self.parts(range).into_iter();
        let freed = parts.filter(|(_, m)| m.reserved == reserved && m.share.is_none());
        freed.map(|(part, _)| part.end - part.start).sum()
    }

    /// Adds the mappings of other processes and all shared memory to the limit.
    pub(in crate::sentry) fn set_elsewhere(&mut self, bytes: u64, mappings: usize) {
        (self.elsewhere, self.mappings_elsewhere) = (bytes, mappings);
        note_mapped(self.bytes_everywhere());
    }

    /// The number of mappings.
    pub(in crate::sentry) fn len(&self) -> usize {
        self.maps.len()
    }

    /// The number of further mappings if `range` has `pieces` in place of its present mappings.
    /// Pieces that merge with a neighbour count as well.
    pub(in crate::sentry) fn growth(&self, range: &Range<u64>, pieces: usize) -> isize {
        if range.is_empty() {
            return 0;
        }
        let mut growth = pieces as isize;
        let mapped = self.maps.range(..range.end).rev().take_while(|(_, m)| m.end > range.start);
        for (&start, m) in mapped {
            let rests = isize::from(start < range.start) + isize::from(m.end > range.end);
            growth += rests - 1;
        }
        growth
    }

    /// Refuses a change that makes too many mappings of this process or of all.
    pub(in crate::sentry) fn check_room(&self, growth: isize) -> Result<(), Errno> {
        let len = self.maps.len().saturating_add_signed(growth);
        let fits = len <= MAPPINGS && len + self.mappings_elsewhere <= MAX_ALL_MAPPINGS;
        if fits || growth <= 0 { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// Refuses a change at `ranges` after which there are too many mappings, of this process or of
    /// all. It adds at most `growth` of them. Only if these do not fit, mappings that it merges are
    /// counted: on a copy of those nearby.
    pub(in crate::sentry) fn check_change(
        &self,
        ranges: &[&Range<u64>],
        growth: isize,
        change: impl FnOnce(&mut Self),
    ) -> Result<(), Errno> {
        self.check_room(growth).or_else(|_| {
            let near = ranges.iter().flat_map(|range| {
                let before = self.maps.range(..=range.end).rev();
                before.take_while(|(_, m)| m.end >= range.start)
            });
            let mut near = Self { maps: near.map(|(&start, &m)| (start, m)).collect(), ..*self };
            let before = near.maps.len() as isize;
            change(&mut near);
            self.check_room(near.maps.len() as isize - before)
        })
    }

    /// Whether as much as is mapped, and not shared, fits into the budget a second time.
    pub(in crate::sentry) fn afford_copy(&self) -> Result<(), Errno> {
        let all = 2 * self.maps.len() + self.mappings_elsewhere;
        if all <= MAX_ALL_MAPPINGS {
            self.afford_bytes(self.own_bytes())
        } else {
            Err(Errno::NOMEM)
        }
    }

    /// Whether `more` bytes fit into the budget.
    fn afford_bytes(&self, more: u64) -> Result<(), Errno> {
        let taken = self.bytes_everywhere().checked_add(more);
        // Under a limit that was lowered, changes without more bytes are possible.
        let fits = more == 0 || taken.is_some_and(|bytes| bytes <= self.limit);
        if fits { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// Refuses `more` bytes beyond the budget. Those that are only reserved are free.
    pub(in crate::sentry) fn afford(&self, more: u64, reserved: bool) -> Result<(), Errno> {
        if reserved { Ok(()) } else { self.afford_bytes(more) }
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Time, Tree};

    use super::*;
    use crate::sentry::mm::file_backing::FileBacking;
    use crate::sentry::mm::layout::PAGE;

    const BASE: u64 = 0x10_0000;

    #[test]
    fn mappings_of_all_processes_are_bounded() {
        let mut layout = Layout::new(u64::MAX);
        for at in 1..4u64 {
            layout.map(Some(at << 32), false, 1, 3, None).unwrap();
        }
        layout.set_elsewhere(0, MAX_ALL_MAPPINGS - 6);
        assert_eq!((layout.afford_copy(), layout.check_room(1)), (Ok(()), Ok(())));
        layout.set_elsewhere(0, MAX_ALL_MAPPINGS - 5);
        assert_eq!((layout.afford_copy(), layout.check_room(1)), (Err(Errno::NOMEM), Ok(())));
        layout.set_elsewhere(0, MAX_ALL_MAPPINGS - 3);
        let reserve = layout.map(Some(9 << 32), false, 1, 0, None).map(drop);
        assert_eq!((reserve, layout.check_room(1)), (Err(Errno::NOMEM), Err(Errno::NOMEM)));
    }

    /// A layout with as many mappings as a process may have, of 3 pages each and with gaps.
    fn full() -> Layout {
        let mut layout = Layout::new(1 << 32);
        for at in 0..MAPPINGS as u64 {
            layout.map(Some(BASE + at * 4 * PAGE), false, 3 * PAGE, 3, None).unwrap();
        }
        layout
    }

    #[test]
    fn a_change_that_cuts_a_mapping_counts_its_rests() {
        let middle = BASE + PAGE;
        type Change<'a> = &'a dyn Fn(&mut Layout) -> Result<(), Errno>;
        let one_more: [Change<'_>; 2] =
            [&|layout| layout.unmap(middle, PAGE).map(drop), &|layout| {
                layout.protect(BASE, PAGE, 1).map(drop)
            }];
        let two_more: [Change<'_>; 3] = [
            &|layout| layout.map(Some(middle), false, PAGE, 1, None).map(drop),
            &|layout| layout.map(Some(middle), false, PAGE, 0, None).map(drop),
            &|layout| layout.protect(middle, PAGE, 0).map(drop),
        ];
        let changes = one_more.map(|change| (change, 1)).into_iter();
        let full = full();
        for (change, more) in changes.chain(two_more.map(|change| (change, 2))) {
            let mut layout = full.clone();
            for freed in 0..=more {
                let before = layout.clone();
                let fits = freed == more;
                assert_eq!(change(&mut layout).is_ok(), fits, "{more} with room for {freed}");
                assert!(fits || layout == before, "a failure changes nothing");
                assert_eq!(layout.check(), Ok(()));
                let _ = layout.unmap(BASE + 4 * PAGE * (9 + freed), 3 * PAGE).unwrap();
            }
        }
        // Changes that cut nothing are possible all the same.
        let mut layout = full;
        layout.protect(BASE, 3 * PAGE, 1).map(drop).unwrap();
        layout.map(Some(BASE), false, 3 * PAGE, 3, None).map(drop).unwrap();
        assert_eq!((layout.len(), layout.check()), (MAPPINGS, Ok(())));
    }

    #[test]
    fn changes_that_merge_mappings_are_made_at_the_limit() {
        let mut layout = full();
        let read = |layout: &mut Layout, at| layout.map(Some(at), false, PAGE, 1, None).map(drop);
        let write = |layout: &mut Layout, at| layout.map(Some(at), false, PAGE, 3, None).map(drop);
        let gap = BASE + 3 * PAGE;
        assert_eq!(read(&mut layout, gap), Err(Errno::NOMEM), "one more");
        write(&mut layout, gap).unwrap();
        assert_eq!(layout.len(), MAPPINGS - 1, "its neighbours and it are one");
        let heap = 1 << 40;
        layout.start_heap(heap);
        assert_eq!(layout.set_brk(heap + PAGE).0, heap + PAGE);
        assert_eq!(layout.set_brk(heap + 2 * PAGE).0, heap + 2 * PAGE);
        assert_eq!(layout.len(), MAPPINGS);
        let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) as u64;
        let from = BASE + 9 * 4 * PAGE;
        layout.remap_by(&[from, 3 * PAGE, 3 * PAGE, flags, heap + 2 * PAGE, 0]).unwrap();
        assert_eq!(layout.len(), MAPPINGS);
        // A part of a mapping becomes like its neighbour.
        let _ = layout.unmap(from, 3 * PAGE).unwrap();
        let at = BASE + 20 * 4 * PAGE;
        read(&mut layout, at + 3 * PAGE).unwrap();
        assert_eq!((layout.len(), layout.protect(at, PAGE, 1).is_ok()), (MAPPINGS, false));
        layout.protect(at + 2 * PAGE, PAGE, 1).map(drop).unwrap();
        assert_eq!((layout.len(), layout.check()), (MAPPINGS, Ok(())));
    }

    #[test]
    fn a_lowered_limit_forbids_only_growth() {
        let mut layout = Layout::new(8 * PAGE);
        let map =
            |layout: &mut Layout, at, len| layout.map(Some(at), false, len, 3, None).map(drop);
        map(&mut layout, BASE, 4 * PAGE).unwrap();
        layout.set_limit(2 * PAGE);
        assert_eq!(layout.check(), Ok(()));
        layout.protect(BASE, PAGE, 1).map(drop).unwrap();
        map(&mut layout, BASE, 2 * PAGE).unwrap();
        assert_eq!(map(&mut layout, BASE + 3 * PAGE, 2 * PAGE), Err(Errno::NOMEM));
        layout.unmap(BASE, 3 * PAGE).map(drop).unwrap();
        map(&mut layout, BASE, PAGE).unwrap();
    }

    #[test]
    fn memory_in_place_of_shared_memory_is_charged() {
        let mut tree = Tree::new(Budget::default());
        let node = tree.create_unnamed(0o600, Time::default()).unwrap();
        let mut layout = Layout::new(4 * PAGE);
        let map = |layout: &mut Layout, len| layout.map(Some(BASE), false, len, 3, None).map(drop);
        map(&mut layout, 3 * PAGE).unwrap();
        layout.share(BASE..BASE + 3 * PAGE, FileBacking::new(node, BASE, 0));
        // The guest has it, however many mappings show it.
        layout.set_elsewhere(3 * PAGE, 0);
        assert_eq!(map(&mut layout, 2 * PAGE), Err(Errno::NOMEM));
        map(&mut layout, PAGE).unwrap();
        assert_eq!(layout.bytes_everywhere(), layout.limit());
        // Private memory frees its own bytes.
        map(&mut layout, PAGE).unwrap();
    }

    /// After random changes near the limit the layout is one that a snapshot may have.
    #[test]
    fn no_change_exceeds_the_number_of_mappings() {
        const MAX_OWN_MAPPINGS: usize = 24;
        let mut random = 11u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        let (mut layout, mut full) = (Layout::new(1 << 32), 0);
        layout.set_elsewhere(0, MAX_ALL_MAPPINGS - MAX_OWN_MAPPINGS);
        layout.start_heap(BASE);
        for _ in 0..20_000 {
            let (start, len) = (next(96), 1 + next(6));
            let (at, bytes) = (BASE + start * PAGE, len * PAGE);
            let before = layout.clone();
            let done = match next(6) {
                0 => layout.map(Some(at), false, bytes, next(4), None).is_ok(),
                1 => layout.unmap(at, bytes).is_ok(),
                2 => layout.protect(at, bytes, next(4)).is_ok(),
                3 => layout.set_brk(at).0 == at,
                _ => {
                    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
                    let keeps = next(2) * libc::MREMAP_DONTUNMAP as u64;
                    let to = BASE + next(96) * PAGE;
                    layout.remap_by(&[at, bytes, bytes, flags | keeps, to, 0]).is_ok()
                }
            };
            assert!(done || layout == before, "a failure changes nothing");
            assert!(layout.len() <= MAX_OWN_MAPPINGS && layout.check() == Ok(()));
            full += usize::from(layout.len() == MAX_OWN_MAPPINGS);
        }
        assert!(full > 100, "the limit was met {full} times");
    }
}
