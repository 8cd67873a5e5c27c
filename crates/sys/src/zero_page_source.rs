//! Sources of private zero memory, other than the kernel's faults.

use crate::{PageRange, Reservation, SysError};

/// A source of private zero memory that is resident already, in huge pages of [`crate::HUGE_SIZE`].
///
/// Code that needs fresh memory queries a source first, and leaves the rest to the kernel's faults.
/// A source never blocks.
///
/// # Safety
/// Memory that [`ZeroPageSource::supply`] reports as moved is used without another check: a slot
/// gives it to a guest as zero memory. An implementation must leave there exactly the promised
/// memory until `memory` releases it, change no mapping outside the given range, and keep no access
/// to the moved pages.
pub unsafe trait ZeroPageSource: Send + Sync + std::fmt::Debug {
    /// Moves resident memory to the beginning of `range`, which must consist of whole huge pages of
    /// address space and be accessible private anonymous memory that was never touched. Returns how
    /// many pages were moved: whole huge pages, possibly none. They are private, anonymous, zero
    /// and writable, and belong to `memory` alone from then on; the rest of the range is as it was.
    ///
    /// # Errors
    /// When the kernel refused so that the range is in an unknown state.
    fn supply(&self, memory: &Reservation, range: PageRange) -> Result<usize, SysError>;

    /// Reports on pages supplied earlier: `used` were used, and `wasted` were released because
    /// nearly all of their huge pages stayed untouched.
    fn report_use(&self, used: usize, wasted: usize) {
        let _ = (used, wasted);
    }
}
