//! Memory that a process has locked (`mlock`). All memory of a guest is resident, so that locks are
//! counted, shown, and refuse to be discarded, but change nothing else.

use std::ops::Range;

use rustix::io::Errno;

use super::{Layout, Mapping};

/// The locks of a memory, in a snapshot: the mappings that are locked, by their first address, and
/// whether new ones are.
pub(in crate::sentry) type PackedLocks = (Vec<u64>, bool);

impl Layout {
    /// Bytes of locked mappings.
    pub(in crate::sentry) fn locked_bytes(&self) -> u64 {
        self.locked
    }

    /// Bytes in a range that are locked.
    pub(in crate::sentry) fn locked_within(&self, range: &Range<u64>) -> u64 {
        match self.locked {
            0 => 0,
            _ => {
                let parts = self.parts(range).into_iter().filter(|(_, m)| m.locked);
                parts.map(|(part, _)| part.end - part.start).sum()
            }
        }
    }

    /// Whether new mappings are locked.
    pub(in crate::sentry) fn locks_new(&self) -> bool {
        self.locks_new
    }

    pub(in crate::sentry) fn set_locks_new(&mut self, on: bool) {
        self.locks_new = on;
    }

    /// Locks or unlocks the mappings in a range, up to the first gap, which is an error.
    pub(in crate::sentry) fn set_locked(
        &mut self,
        range: &Range<u64>,
        locked: bool,
    ) -> Result<(), Errno> {
        let parts = self.parts(range);
        self.check_room(self.growth(range, parts.len()))?;
        let mut at = range.start;
        for (part, m) in parts {
            if part.start != at {
                return Err(Errno::NOMEM);
            }
            at = part.end;
            if m.locked != locked {
                self.place(part, Mapping { end: at, locked, ..m });
            }
        }
        if at == range.end { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// Locks or unlocks every mapping.
    pub(in crate::sentry) fn set_all_locked(&mut self, locked: bool) {
        if !locked && self.locked == 0 {
            return;
        }
        let all: Vec<_> = self.maps.iter().map(|(&start, &m)| (start..m.end, m)).collect();
        for (part, m) in all.into_iter().filter(|(_, m)| m.locked != locked) {
            let end = part.end;
            self.place(part, Mapping { end, locked, ..m });
        }
    }

    /// A copy for a child, which inherits no locks.
    pub(in crate::sentry) fn unlocked(&self) -> Self {
        let mut copy = self.clone();
        copy.set_all_locked(false);
        copy.locks_new = false;
        copy
    }

    /// The locks, if there are any.
    pub(in crate::sentry) fn packed_locks(&self) -> Option<PackedLocks> {
        let locked = self.maps.iter().filter(|(_, m)| m.locked).map(|(&start, _)| start);
        (self.locked > 0 || self.locks_new).then(|| (locked.collect(), self.locks_new))
    }

    /// Sets the locks of a layout from a snapshot. Returns whether all mappings exist.
    pub(in crate::sentry) fn unpack_locks(&mut self, (starts, locks_new): PackedLocks) -> bool {
        self.locks_new = locks_new;
        starts.into_iter().all(|start| match self.maps.get_mut(&start) {
            Some(mapping) if !mapping.locked => {
                mapping.locked = true;
                self.locked += mapping.end - start;
                true
            }
            _ => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sentry::mm::layout::PAGE;

    const BASE: u64 = 0x10_0000;

    fn new() -> Layout {
        let mut layout = Layout::new(1 << 30);
        layout.map(Some(BASE), false, 8 * PAGE, 3, None).unwrap();
        layout
    }

    #[test]
    fn an_empty_range_inside_a_mapping_changes_nothing() {
        let mut layout = new();
        let before = layout.clone();
        let at = BASE + PAGE;
        layout.set_locked(&(at..at), true).unwrap();
        assert_eq!((&layout, layout.growth(&(at..at), 0)), (&before, 0));
        layout.protect(at, 0, 1).unwrap();
        layout.unmap(BASE, 2 * PAGE).unwrap();
        // The rest is still known: a reset unmaps it.
        assert!(layout.touches(&(at + PAGE..BASE + 8 * PAGE)));
        assert_eq!(layout.bytes(), 6 * PAGE);
    }

    #[test]
    fn locks_are_counted_through_every_change_and_merge_where_they_end() {
        let mut layout = new();
        let range = BASE + PAGE..BASE + 3 * PAGE;
        layout.set_locked(&range, true).unwrap();
        assert_eq!((layout.len(), layout.locked_bytes()), (3, 2 * PAGE));
        assert_eq!(layout.locked_within(&(BASE..BASE + 2 * PAGE)), PAGE);
        // Protection keeps a lock, and a new mapping has none.
        layout.protect(BASE, 8 * PAGE, 1).unwrap();
        assert_eq!(layout.locked_bytes(), 2 * PAGE);
        layout.map(Some(BASE + PAGE), false, PAGE, 1, None).unwrap();
        assert_eq!(layout.locked_bytes(), PAGE);
        let flags = libc::MREMAP_MAYMOVE as u64;
        layout.remap_by(&[BASE + 2 * PAGE, PAGE, 2 * PAGE, flags, 0, 0]).unwrap();
        assert_eq!(layout.locked_bytes(), 2 * PAGE);
        let copy = layout.unlocked();
        assert_eq!((copy.locked_bytes(), copy.check(), layout.check()), (0, Ok(()), Ok(())));
        layout.set_all_locked(true);
        assert_eq!(layout.locked_bytes(), layout.bytes());
        layout.set_all_locked(false);
        assert_eq!(layout, copy);
        layout.unmap(BASE, 8 * PAGE).unwrap();
        assert_eq!(layout.locked_bytes(), 0);
    }

    #[test]
    fn a_gap_ends_a_lock_and_packed_locks_are_of_mappings_that_exist() {
        let mut layout = new();
        layout.unmap(BASE + 4 * PAGE, PAGE).unwrap();
        assert_eq!(layout.set_locked(&(BASE..BASE + 8 * PAGE), true), Err(Errno::NOMEM));
        assert_eq!(layout.locked_bytes(), 4 * PAGE);
        let packed = layout.packed_locks().unwrap();
        assert_eq!(packed, (vec![BASE], false));
        let mut other = layout.unlocked();
        assert!(other.unpack_locks(packed.clone()));
        assert_eq!((&other, other.packed_locks()), (&layout, Some(packed.clone())));
        assert!(!other.unpack_locks(packed), "it is locked already");
        assert!(!other.unpack_locks((vec![BASE + PAGE], false)));
    }
}
