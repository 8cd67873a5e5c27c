//! Sparse memory: large private mappings with `MAP_NORESERVE`, such as the shadow of
//! AddressSanitizer, whose addresses may exceed the memory limit by far.
//!
//! In the process they are without access. The first access to a page faults, and then a block
//! around it becomes accessible, which is memory like any other: it counts towards the limit, is in
//! the image, and stays accessible.
//!
//! Promises: sparse memory takes memory only for its blocks; a block that does not fit into the
//! limit is not opened.

use std::ops::Range;

use rustix::io::Errno;

use super::{GUEST, Layout, Mapping, PAGE};
use crate::sentry::mm::stub_calls::{Change, StubCall, protect_call};

/// Minimum bytes of a sparse mapping. Shorter ones count with all of their bytes.
const MIN_SPARSE: u64 = 64 << 20;
/// Bytes of the first block in a place.
const MIN_BLOCK: u64 = 64 << 10;
/// Maximum bytes of a block. Blocks grow with adjacent accessible memory.
const MAX_BLOCK: u64 = 4 << 20;

impl Mapping {
    /// Whether parts of it become accessible when they are touched.
    pub(in crate::sentry) fn is_sparse(&self) -> bool {
        self.reserved && self.protection != 0
    }

    /// Whether it is private memory that never was of a file.
    pub(super) fn is_anonymous(&self) -> bool {
        !self.file && self.share.is_none() && self.origin.is_none()
    }

    /// The protection in the process.
    pub(in crate::sentry) fn host_protection(&self) -> u64 {
        if self.reserved { 0 } else { self.protection }
    }
}

impl Layout {
    /// Whether a mapping with `MAP_NORESERVE` is sparse.
    pub(in crate::sentry) fn is_sparse_length(len: u64) -> bool {
        len >= MIN_SPARSE
    }

    /// Maps sparse memory; `at` is where, if that is fixed.
    pub(in crate::sentry) fn map_sparse(
        &mut self,
        at: Option<u64>,
        low: bool,
        len: u64,
        protection: u64,
    ) -> Result<(u64, Change), Errno> {
        // Until it is touched it only reserves its addresses. It is unlike reserved neighbours.
        let planned = self.plan(at, low, len, 0, false)?;
        self.check_room(self.growth(&planned, 1))?;
        let (start, change) = self.map(Some(planned.start), low, len, 0, None)?;
        if protection != 0 {
            let end = start + len.next_multiple_of(PAGE);
            self.place(start..end, Mapping::anonymous(end, protection, true));
        }
        Ok((start, change))
    }

    /// Whether it has reserved addresses. Sparse memory is among them.
    pub(crate) fn has_reserved(&self) -> bool {
        self.reserved > 0
    }

    /// Whether some of its memory is sparse.
    pub(crate) fn has_sparse(&self) -> bool {
        self.has_reserved() && self.maps.values().any(Mapping::is_sparse)
    }

    /// The sparse mapping of an address, if it is in one.
    pub(in crate::sentry) fn sparse_at(&self, address: u64) -> Option<(Range<u64>, Mapping)> {
        let found = self.mapping_at(address).filter(|(_, m)| m.is_sparse());
        found.map(|(range, &mapping)| (range, mapping))
    }

    /// Whether memory in `range` is sparse.
    pub(in crate::sentry) fn is_sparse_in(&self, range: &Range<u64>) -> bool {
        self.has_reserved() && self.mappings_in(range).any(|(_, m)| m.is_sparse())
    }

    /// The number of mappings in `range`.
    pub(in crate::sentry) fn count_in(&self, range: &Range<u64>) -> usize {
        self.mappings_in(range).count()
    }

    /// Makes the block of `address` accessible, where memory is sparse. `None` where it is not.
    fn open_block(&mut self, address: u64) -> Result<Option<(Range<u64>, StubCall)>, Errno> {
        let Some((range, mapping)) = self.sparse_at(address) else { return Ok(None) };
        let mut block = Self::block(&range, address, self.accessible_near(&range, address));
        let new = |block: &Range<u64>| Mapping { end: block.end, reserved: false, ..mapping };
        let least = Self::block(&range, address, 0);
        if self.afford(block.end - block.start, false).is_err() {
            block = least;
        }
        self.afford(block.end - block.start, false)?;
        self.check_change(&[&block], self.growth(&block, 1), |layout| {
            layout.place(block.clone(), new(&block));
        })?;
        self.place(block.clone(), new(&block));
        let order = protect_call(block.start, block.end - block.start, mapping.protection);
        Ok(Some((block, order)))
    }

    /// The block of an address in the sparse mapping at `range`, near accessible memory of so many
    /// bytes.
    fn block(range: &Range<u64>, address: u64, near: u64) -> Range<u64> {
        let len = near.clamp(MIN_BLOCK, MAX_BLOCK).next_power_of_two();
        let start = address - address % len;
        start.max(range.start)..(start + len).min(range.end)
    }

    /// Bytes of the longer accessible mapping at an end of the sparse mapping at `range`, of those
    /// that are longer than the way from `address` to them.
    fn accessible_near(&self, range: &Range<u64>, address: u64) -> u64 {
        let before = range.start.checked_sub(1).and_then(|at| self.mapping_at(at));
        let ends =
            [(before, address - range.start), (self.mapping_at(range.end), range.end - address)];
        let near = ends.into_iter().filter_map(|(found, way)| {
            let (found, mapping) = found?;
            let len = found.end - found.start;
            (mapping.is_anonymous() && !mapping.reserved && way < len.min(MAX_BLOCK)).then_some(len)
        });
        near.max().unwrap_or(0)
    }

    /// Makes the sparse parts of `range` accessible, one block after the other, as far as the limit
    /// has room for them.
    pub(in crate::sentry) fn open_sparse(&mut self, range: Range<u64>) -> Change {
        let mut change = Change::default();
        let (mut at, end) = (range.start.max(GUEST.start), range.end.min(GUEST.end));
        while at < end {
            match self.open_block(at) {
                Ok(Some((block, order))) => {
                    change.before.push(order);
                    at = block.end;
                }
                Ok(None) => match self.parts(&(at..end)).iter().find(|(_, m)| m.is_sparse()) {
                    Some((part, _)) => at = part.start,
                    None => break,
                },
                Err(_) => break,
            }
        }
        change
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERABYTE: u64 = 1 << 40;

    /// A layout with sparse memory of 8 TiB at its address.
    fn new(limit: u64) -> (Layout, u64) {
        let mut layout = Layout::new(limit);
        let (start, change) = layout.map_sparse(None, false, 8 * TERABYTE, 3).unwrap();
        assert_eq!(change.before[0][1..4], [start, 8 * TERABYTE, 0], "without access");
        assert_eq!((layout.bytes(), layout.check()), (0, Ok(())));
        (layout, start)
    }

    #[test]
    fn touched_blocks_of_sparse_memory_count_and_grow() {
        let (mut layout, start) = new(1 << 30);
        let (at, mut orders) = (start + TERABYTE, 0);
        let mut touched = at;
        while touched < at + (256 << 20) {
            let change = layout.open_sparse(touched..touched + 1);
            let [[_, from, len, protection, ..]] = change.before[..] else { panic!("{change:?}") };
            assert!(from == touched && protection == 3 && len <= MAX_BLOCK);
            touched = from + len;
            orders += 1;
        }
        assert!(orders < 80, "{orders} blocks");
        assert_eq!((layout.bytes(), layout.len()), (256 << 20, 3));
        // Far from it blocks are small.
        let before = layout.clone();
        let far = layout.open_sparse(touched + TERABYTE..touched + TERABYTE + 1);
        assert_eq!((far.before.len(), layout.bytes()), (1, (256 << 20) + MIN_BLOCK));
        layout = before;
        assert!(layout.open_sparse(at..touched).is_empty());
        assert_eq!(layout.sparse_at(at), None);
        assert_eq!(layout.check(), Ok(()));
    }

    #[test]
    fn a_block_beyond_the_limit_is_not_opened() {
        let (mut layout, start) = new(3 * MIN_BLOCK);
        let places = |layout: &mut Layout, from: u64| {
            layout.open_sparse(start + from..start + from + TERABYTE).before.len()
        };
        assert_eq!((places(&mut layout, 0), layout.bytes()), (3, 3 * MIN_BLOCK));
        let before = layout.clone();
        assert_eq!(places(&mut layout, TERABYTE), 0);
        assert!(layout == before && layout.sparse_at(start + TERABYTE).is_some());
        // All of it is free for other memory once it is unmapped.
        layout.unmap(start, 8 * TERABYTE).map(drop).unwrap();
        layout.map(None, false, 3 * MIN_BLOCK, 3, None).map(drop).unwrap();
    }

    #[test]
    fn the_protection_of_sparse_memory_changes_without_an_order() {
        let (mut layout, start) = new(1 << 30);
        let opened = layout.open_sparse(start + TERABYTE..start + TERABYTE + 1);
        assert_eq!(opened.before.len(), 1);
        let change = layout.protect(start, 8 * TERABYTE, 1).unwrap();
        assert_eq!(change.before.len(), 1, "that of the block");
        assert_eq!(change.before[0][1..4], [start + TERABYTE, MIN_BLOCK, 1]);
        assert_eq!(layout.bytes(), MIN_BLOCK);
        let advised = layout.advise(start, 8 * TERABYTE, libc::MADV_DONTNEED as u64).unwrap();
        assert_eq!(advised.before.len(), 1);
        // Without access it is reserved like other addresses, and counts once it has access.
        layout.protect(start, 8 * TERABYTE, 0).map(drop).unwrap();
        assert_eq!(layout.protect(start, TERABYTE, 3).map(drop), Err(Errno::NOMEM));
        assert_eq!(layout.check(), Ok(()));
    }

    #[test]
    fn only_private_memory_without_a_file_is_sparse_in_a_snapshot() {
        let (mut layout, start) = new(1 << 30);
        assert_eq!(layout.check(), Ok(()));
        let mapping = layout.maps.get_mut(&start).unwrap();
        mapping.file = true;
        assert!(layout.check().is_err());
    }

    #[test]
    fn addresses_are_reserved_without_a_bound_but_theirs() {
        let mut layout = Layout::new(1 << 20);
        for _ in 0..12 {
            layout.map(None, false, 8 * TERABYTE, 0, None).map(drop).unwrap();
        }
        assert_eq!((layout.bytes(), layout.check()), (0, Ok(())));
        assert_eq!(layout.map(None, false, 64 * TERABYTE, 0, None).map(drop), Err(Errno::NOMEM));
    }
}
