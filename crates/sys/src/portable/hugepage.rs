//! No huge pages.

use crate::{Call, Memfd, PageRange, Reservation, SysError};

impl Memfd {
    /// Always fails.
    ///
    /// # Errors
    /// `ENOSYS`.
    pub fn hugetlb(_: &std::ffi::CStr) -> Result<Self, SysError> {
        Err(SysError::new(Call::MemfdCreate, libc::ENOSYS))
    }
}

impl Reservation {
    /// Always fails.
    ///
    /// # Errors
    /// `ENOSYS`.
    pub fn take_pages(&self, _: usize, _: &Reservation, _: PageRange) -> Result<(), SysError> {
        Err(SysError::new(Call::Remap, libc::ENOSYS))
    }
}
