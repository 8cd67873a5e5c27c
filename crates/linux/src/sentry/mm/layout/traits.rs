//! Rules of single mappings: seals (`mseal`), files that were opened for reading, memory without
//! the right to read, and stacks that grow by themselves (`MAP_GROWSDOWN`).
//!
//! Promises: a sealed mapping stays as it is until its process runs another program or ends. May
//! break it: a change of the layout that does not look at [`Layout::check_seals`].

use std::ops::Range;

use rustix::io::Errno;

use super::{Layout, Mapping, PAGE};
use crate::platform::GUEST;
use crate::sentry::mm::stub_calls::{Change, map_call};

/// Free addresses below a mapping that grows.
pub(super) const GUARD_GAP: u64 = 256 * PAGE;

/// The rules of a mapping. A snapshot has those of all mappings behind its older parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MappingTraits {
    /// It is not unmapped, moved, replaced or protected otherwise.
    pub(crate) sealed: bool,
    /// It shows a file that was opened for reading, and is never writable.
    pub(crate) read_only: bool,
    /// It is writable and was not asked to be readable. The processor gives both.
    pub(crate) unreadable: bool,
    /// It grows towards lower addresses.
    pub(crate) grows: bool,
}

/// The rules of the mappings of a memory that have any, by their first address, in a snapshot.
pub(in crate::sentry) type PackedTraits = Vec<(u64, u8)>;

impl MappingTraits {
    fn bits(self) -> u8 {
        let all = [self.sealed, self.read_only, self.unreadable, self.grows];
        all.iter().rev().fold(0, |bits, has| bits << 1 | u8::from(*has))
    }

    fn from_bits(bits: u8) -> Option<Self> {
        let has = |bit: u8| bits & 1 << bit != 0;
        let traits = Self { sealed: has(0), read_only: has(1), unreadable: has(2), grows: has(3) };
        (bits != 0 && bits < 16).then_some(traits)
    }
}

impl Mapping {
    /// Whether its rules are some that a mapping like it can have.
    pub(super) fn has_sound_traits(&self) -> bool {
        let writes = self.protection & libc::PROT_WRITE as u64 != 0;
        (!self.traits.grows || self.is_anonymous())
            && (!self.traits.read_only || self.share.is_some() && !writes)
    }
}

impl Layout {
    /// Refuses a change of memory that is sealed.
    pub(in crate::sentry) fn check_seals(&self, range: &Range<u64>) -> Result<(), Errno> {
        let sealed = !range.is_empty() && self.mappings_in(range).any(|(_, m)| m.traits.sealed);
        if sealed { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Seals the mappings in a range, which has no gap.
    pub(in crate::sentry) fn seal(&mut self, range: &Range<u64>) -> Result<(), Errno> {
        if !self.allows(range, 0) {
            return Err(Errno::NOMEM);
        }
        let parts = self.parts(range);
        self.check_room(self.growth(range, parts.len()))?;
        for (part, m) in parts {
            let (end, traits) = (part.end, MappingTraits { sealed: true, ..m.traits });
            self.place(part, Mapping { end, traits, ..m });
        }
        Ok(())
    }

    /// Gives the mapping that was just made at a range its rules.
    pub(in crate::sentry) fn set_traits(&mut self, range: &Range<u64>, traits: MappingTraits) {
        if traits == MappingTraits::default() {
            return;
        }
        for (part, m) in self.parts(range) {
            let end = part.end;
            self.place(part, Mapping { end, traits, ..m });
        }
    }

    /// Whether some mapping grows.
    pub(in crate::sentry) fn has_growing(&self) -> bool {
        self.growing
    }

    /// Lets the mapping behind an address that nothing maps grow down to it. It has at most `limit`
    /// bytes then. `None` where it does not.
    pub(in crate::sentry) fn grow_down(&mut self, address: u64, limit: u64) -> Option<Change> {
        let start = address / PAGE * PAGE;
        if start < GUEST.start || self.mapping_at(address).is_some() {
            return None;
        }
        let (behind, mapping) = self.all_from(start).next().map(|(range, m)| (range, *m))?;
        let len = behind.start - start;
        let is_near = self.maps.range(..start).next_back().is_some_and(|(_, m)| {
            let is_stack = m.traits.grows || m.protection == 0;
            !is_stack && start - m.end < GUARD_GAP
        });
        if !mapping.traits.grows || is_near || behind.end - start > limit {
            return None;
        }
        self.afford(len, mapping.reserved).ok()?;
        self.place(start..behind.start, Mapping { end: behind.start, ..mapping });
        let order = map_call(start, len, mapping.host_protection());
        Some(Change { before: vec![order], ..Change::default() })
    }

    /// The rules of the mappings that have any.
    pub(in crate::sentry) fn packed_traits(&self) -> PackedTraits {
        let bits = self.maps.iter().map(|(&start, m)| (start, m.traits.bits()));
        bits.filter(|(_, bits)| *bits != 0).collect()
    }

    /// Sets the rules of a layout from a snapshot. Returns whether a guest could have made them.
    pub(in crate::sentry) fn unpack_traits(&mut self, packed: PackedTraits) -> bool {
        packed.into_iter().all(|(start, bits)| {
            let (Some(traits), Some(mapping)) =
                (MappingTraits::from_bits(bits), self.maps.get_mut(&start))
            else {
                return false;
            };
            mapping.traits = traits;
            self.growing |= traits.grows;
            mapping.has_sound_traits()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x1000_0000;

    fn new() -> Layout {
        let mut layout = Layout::new(1 << 30);
        layout.map(Some(BASE), false, 8 * PAGE, 1, None).unwrap();
        layout
    }

    #[test]
    fn a_sealed_mapping_stays_as_it_is() {
        let mut layout = new();
        let middle = BASE + 2 * PAGE..BASE + 3 * PAGE;
        layout.seal(&middle).unwrap();
        assert_eq!(layout.seal(&(BASE..BASE + 9 * PAGE)), Err(Errno::NOMEM));
        let before = layout.clone();
        let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        let len = 8 * PAGE;
        for refused in [
            layout.protect(BASE, len, 0).map(drop),
            layout.unmap(BASE, len).map(drop),
            layout.advise(BASE, len, libc::MADV_DONTNEED as u64).map(drop),
            layout.map(Some(BASE), false, len, 3, None).map(drop),
            layout.map_sparse(Some(BASE), false, len, 3).map(drop),
            layout.remap_by(&[BASE, len, 2 * PAGE, flags, BASE + (1 << 20), 0]).map(drop),
            layout.remap_by(&[BASE, len, PAGE, 0, 0, 0]).map(drop),
        ] {
            assert_eq!(refused, Err(Errno::PERM));
        }
        assert_eq!(layout, before, "a failure changes nothing");
        // Its neighbours change, and a lock is no change.
        layout.set_locked(&middle, true).unwrap();
        layout.protect(BASE, 2 * PAGE, 3).map(drop).unwrap();
        layout.unmap(BASE + 3 * PAGE, 5 * PAGE).map(drop).unwrap();
        assert_eq!(layout.unlocked().check_seals(&middle), Err(Errno::PERM), "a child has it");
    }

    #[test]
    fn the_heap_does_not_shrink_below_a_seal() {
        let mut layout = Layout::new(1 << 30);
        layout.start_heap(BASE);
        assert_eq!(layout.set_brk(BASE + 4 * PAGE).0, BASE + 4 * PAGE);
        layout.seal(&(BASE + PAGE..BASE + 2 * PAGE)).unwrap();
        assert_eq!(layout.set_brk(BASE).0, BASE + 4 * PAGE);
        assert_eq!(layout.set_brk(BASE + 2 * PAGE).0, BASE + 2 * PAGE);
    }

    #[test]
    fn a_stack_grows_down_to_its_limit_and_to_the_gap_above_a_neighbour() {
        let mut layout = new();
        let traits = MappingTraits { grows: true, ..MappingTraits::default() };
        let top = BASE + (4 << 20);
        layout.map(Some(top - PAGE), false, PAGE, 3, None).unwrap();
        layout.set_traits(&(top - PAGE..top), traits);
        assert!(layout.grow_down(top - 9 * PAGE, 8 * PAGE).is_none(), "its limit");
        let change = layout.grow_down(top - 9 * PAGE + 5, 1 << 30).unwrap();
        assert_eq!(change.before[0][1..3], [top - 9 * PAGE, 8 * PAGE]);
        assert_eq!((layout.len(), layout.bytes()), (2, 17 * PAGE));
        let gap = BASE + 8 * PAGE + GUARD_GAP;
        assert!(layout.grow_down(gap - 1, 1 << 30).is_none());
        layout.grow_down(gap, 1 << 30).unwrap();
        assert!(layout.grow_down(top, 1 << 30).is_none(), "nothing is behind it");
        assert_eq!(layout.check(), Ok(()));
    }

    #[test]
    fn rules_of_a_snapshot_are_those_of_mappings_that_can_have_them() {
        let mut layout = new();
        layout.seal(&(BASE..BASE + PAGE)).unwrap();
        let packed = layout.packed_traits();
        assert_eq!(packed, [(BASE, 1)]);
        let mut other = new();
        other.place(
            BASE..BASE + PAGE,
            Mapping { end: BASE + PAGE, locked: true, ..*other.maps.get(&BASE).unwrap() },
        );
        assert!(other.unpack_traits(packed));
        for bad in [(BASE + 9 * PAGE, 1), (BASE, 0), (BASE, 16), (BASE, 2)] {
            assert!(!new().unpack_traits(vec![bad]), "{bad:?}");
        }
        assert!(new().unpack_traits(vec![(BASE, 8)]));
    }
}
