//! Huge pages and moved pages: operations for a pool of frames, in addition to plain maps.
//!
//! [`Memfd::hugetlb`] draws on the administrator's reserved huge pages and fails without them;
//! everything else works without privilege. [`Reservation::take_pages`] moves page tables, not
//! bytes.

use std::os::fd::{FromRawFd, OwnedFd};

use crate::{Call, Memfd, PageRange, Reservation, SysError, inject};

impl Memfd {
    /// Creates a file of reserved 2 MiB pages; its length and holes must be multiples of that.
    ///
    /// # Errors
    /// `ENOSYS` or `EINVAL` on a kernel without hugetlb. A host with no page reserved fails later,
    /// when the file is populated.
    pub fn hugetlb(name: &std::ffi::CStr) -> Result<Self, SysError> {
        inject::gate(Call::MemfdCreate)?;
        let flags = libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB;
        // SAFETY: `name` is a valid NUL-terminated string for the length of the call.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        if fd < 0 {
            return Err(SysError::last(Call::MemfdCreate));
        }
        // SAFETY: the kernel just returned this descriptor, and this is its only owner.
        Ok(Self::from_owned(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}

impl Reservation {
    /// Moves the anonymous pages of `range` in `from` to page `at` here; `from` keeps its mapping,
    /// which reads as zero afterwards (`MREMAP_DONTUNMAP`, Linux 5.7).
    ///
    /// # Errors
    /// `EINVAL` when the source is not one private anonymous mapping, or a range is outside. The
    /// destination is as it was then, or inaccessible.
    pub fn take_pages(
        &self,
        at: usize,
        from: &Reservation,
        range: PageRange,
    ) -> Result<(), SysError> {
        let to = PageRange::new(at, range.len);
        self.move_here(to, from, range).map_err(|failed| failed.error)
    }
}
