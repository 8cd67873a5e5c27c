//! Moving a mapping over another one.
//!
//! `mremap` with `MREMAP_FIXED` unmaps its destination first, and can fail after that: when a limit
//! of the process is reached, say. The addresses would then be free for any other mapping of the
//! process, though a reservation owns them, so they are reserved again at once.

use crate::{Call, MoveError, PageRange, Reservation, SysError, inject};

impl Reservation {
    /// Moves the pages of `from` in `source`, which must be one mapping, to `to` here, in one step
    /// for all threads. The source keeps an empty mapping (`MREMAP_DONTUNMAP`, Linux 5.7).
    pub(super) fn move_here(
        &self,
        to: PageRange,
        source: &Reservation,
        from: PageRange,
    ) -> Result<(), MoveError> {
        let kept = |error| MoveError { error, lost: false };
        inject::gate(Call::Remap).map_err(kept)?;
        self.check(to, Call::Remap).map_err(kept)?;
        source.check(from, Call::Remap).map_err(kept)?;
        if to.len != from.len || to.is_empty() {
            return Err(kept(SysError::invalid(Call::Remap)));
        }
        // SAFETY: both ranges are inside reservations that the borrowed values own; the caller
        // gives the destination up, and the kernel refuses ranges that overlap.
        let raw = unsafe {
            libc::mremap(
                source.page_ptr(from.start).cast(),
                from.byte_len(),
                to.byte_len(),
                libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP,
                self.page_ptr(to.start).cast::<libc::c_void>(),
            )
        };
        if raw == libc::MAP_FAILED {
            let error = SysError::last(Call::Remap);
            return Err(MoveError { error, lost: self.reserve_again(to) });
        }
        // The mapping came with the source's flags.
        self.refuse_merging(to).map_err(kept)
    }

    /// Reserves `range` if it is not mapped; whether it was not. Where the kernel refuses that too,
    /// the reservation does not own its addresses any more: it changes and releases nothing from
    /// then on.
    fn reserve_again(&self, range: PageRange) -> bool {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let at = self.page_ptr(range.start).cast();
        // SAFETY: the flag refuses to replace any mapping.
        let raw = unsafe {
            let flags = flags | libc::MAP_FIXED_NOREPLACE;
            libc::mmap(at, range.byte_len(), libc::PROT_NONE, flags, -1, 0)
        };
        if raw != libc::MAP_FAILED {
            return true;
        }
        let mapped = SysError::last(Call::Map).errno == libc::EEXIST;
        if !mapped {
            self.tear();
        }
        !mapped
    }
}
