//! The kernel's page size, which must be the one that everything here is counted in.
//!
//! arm64 kernels have pages of 4, 16 or 64 KiB. A kernel with larger pages is refused where memory
//! is reserved or a file in memory is made, because mappings and protections of 4 KiB do not exist
//! there.

use crate::{Call, PAGE_SIZE, SysError};

/// Bytes in a page of this kernel.
pub(crate) fn page_size() -> usize {
    // SAFETY: reads a value that the kernel passed to the program.
    (unsafe { libc::getauxval(libc::AT_PAGESZ) }) as usize
}

/// Refuses a kernel with other pages than [`PAGE_SIZE`].
pub(super) fn check_page_size() -> Result<(), SysError> {
    if page_size() == PAGE_SIZE { Ok(()) } else { Err(SysError::invalid(Call::PageSize)) }
}
