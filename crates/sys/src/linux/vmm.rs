//! What a userfaultfd needs beyond filling when a VMM and its pager are two processes: remove events, and
//! poisoned pages.

use linux_raw_sys::general::{
    UFFD_FEATURE_EVENT_REMOVE, UFFD_FEATURE_POISON, uffdio_poison, uffdio_range,
};

use crate::{Call, SysError, Uffd, UffdMode, inject};

/// `_IOWR(0xAA, 8, struct uffdio_poison)`.
const UFFDIO_POISON: u32 = 0xc020_aa08;

impl Uffd {
    /// Opens a descriptor as a VMM does that hands it to a pager: events, discarded ranges among them, and
    /// pages that can be poisoned.
    ///
    /// # Errors
    /// As [`Uffd::open`]; `EINVAL` before Linux 6.6.
    pub fn open_for_pager() -> Result<Self, SysError> {
        let more = u64::from(UFFD_FEATURE_EVENT_REMOVE) | u64::from(UFFD_FEATURE_POISON);
        Self::open_with(UffdMode::Events, more)
    }

    /// Marks missing pages as unreadable: touching one raises SIGBUS, now and ever after. Wakes whoever
    /// waits. Returns the bytes marked.
    ///
    /// # Errors
    /// `EINVAL` when the descriptor was opened without poisoning, `EEXIST` when a page is there.
    pub fn poison(&self, start: *const u8, len: usize) -> Result<usize, SysError> {
        inject::gate(Call::UffdFill)?;
        let mut argument = uffdio_poison {
            range: uffdio_range { start: start as u64, len: len as u64 },
            mode: 0,
            updated: 0,
        };
        let result = self.ioctl(Call::UffdFill, UFFDIO_POISON, &mut argument);
        match result {
            Err(_) if argument.updated > 0 => Ok(argument.updated as usize),
            other => other.map(|()| argument.updated.max(0) as usize),
        }
    }
}
