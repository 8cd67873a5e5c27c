//! Where private zero memory may come from, other than the kernel's faults.

use crate::{PageRange, Reservation, SysError};

/// A stock of private zero memory that is resident already, in huge pages of [`crate::HUGE_SIZE`].
///
/// Whoever needs fresh memory asks a stock first, and leaves what it does not get to the kernel's
/// faults. A stock never makes anybody wait.
///
/// # Safety
/// What [`ZeroPageSource::supply`] says it has moved is used without being looked at or touched again: a slot gives it to a
/// guest as zero memory. An implementation must leave there exactly what the method promises, for as long as
/// `memory` keeps it, change no mapping outside the range it was given, and keep no way to the pages it moved.
pub unsafe trait ZeroPageSource: Send + Sync + std::fmt::Debug {
    /// Moves resident memory to the beginning of `range`, which must consist of whole huge pages of address
    /// space and be accessible private anonymous memory that nobody has touched. Returns how many
    /// pages were moved: whole huge pages, possibly none. They are private, anonymous, zero and writable, and
    /// belong to `memory` alone from then on; the rest of the range is as it was.
    ///
    /// # Errors
    /// When the kernel refused so that the range is in an unknown state.
    fn supply(&self, memory: &Reservation, range: PageRange) -> Result<usize, SysError>;

    /// What became of pages supplied earlier: so many were `used`, and so many given back because nearly
    /// nothing of their huge pages was.
    fn report_use(&self, used: usize, wasted: usize) {
        let _ = (used, wasted);
    }
}
