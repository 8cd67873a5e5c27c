//! Limits of a layout: bytes and mappings, of one process and of all.
//!
//! Promises: a mapping is made only where the limits allow it, and so is a copy of all of them.

use rustix::io::Errno;

use super::{Layout, MAPPINGS, RESERVED};

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

    /// Adds the mappings of other processes and all shared memory to the limit.
    pub(in crate::sentry) fn set_elsewhere(&mut self, bytes: u64, mappings: usize) {
        (self.elsewhere, self.mappings_elsewhere) = (bytes, mappings);
    }

    /// The number of mappings.
    pub(in crate::sentry) fn len(&self) -> usize {
        self.maps.len()
    }

    /// Whether the number of mappings allows another one.
    pub(super) fn has_room(&self) -> bool {
        let all = self.maps.len() + self.mappings_elsewhere;
        self.maps.len() < MAPPINGS && all < MAX_ALL_MAPPINGS
    }

    /// Whether as much as is mapped, and not shared, fits into the budget once more.
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
        if taken.is_some_and(|bytes| bytes <= self.limit) { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// Whether `more` bytes in another mapping fit into the budget.
    pub(in crate::sentry) fn afford(&self, more: u64) -> Result<(), Errno> {
        if self.has_room() { self.afford_bytes(more) } else { Err(Errno::NOMEM) }
    }

    /// Whether `more` bytes may be reserved.
    pub(in crate::sentry) fn afford_reserve(&self, more: u64) -> Result<(), Errno> {
        let within = self.reserved.checked_add(more).is_some_and(|bytes| bytes <= RESERVED);
        if within && self.has_room() { Ok(()) } else { Err(Errno::NOMEM) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_all_processes_are_bounded() {
        let mut layout = Layout::new(u64::MAX);
        for at in 1..4u64 {
            layout.map(Some(at << 32), false, 1, 3, None).unwrap();
        }
        layout.set_elsewhere(0, MAX_ALL_MAPPINGS - 6);
        assert_eq!((layout.afford_copy(), layout.afford(1)), (Ok(()), Ok(())));
        layout.set_elsewhere(0, MAX_ALL_MAPPINGS - 5);
        assert_eq!((layout.afford_copy(), layout.afford(1)), (Err(Errno::NOMEM), Ok(())));
        layout.set_elsewhere(0, MAX_ALL_MAPPINGS - 3);
        let reserve = layout.map(Some(9 << 32), false, 1, 0, None).map(drop);
        assert_eq!((reserve, layout.afford(0)), (Err(Errno::NOMEM), Err(Errno::NOMEM)));
    }
}
