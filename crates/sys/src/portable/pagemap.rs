//! No page tables.

use crate::{Call, PageRange, SysError};

/// Always missing.
///
/// # Errors
/// `ENOTTY`, as on a kernel before 6.7.
pub fn written(
    _base: *const u8,
    _pages: usize,
    _found: impl FnMut(PageRange),
) -> Result<(), SysError> {
    Err(SysError::new(Call::PagemapScan, libc::ENOTTY))
}

/// Always missing.
///
/// # Errors
/// `ENOTTY`, as on a kernel before 6.7.
pub fn private(
    _base: *const u8,
    _pages: usize,
    _found: impl FnMut(PageRange),
) -> Result<(), SysError> {
    Err(SysError::new(Call::PagemapScan, libc::ENOTTY))
}
