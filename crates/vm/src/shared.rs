//! Memory that the host and any number of guests see at once.
//!
//! Promises: it is mapped for as long as anyone refers to it, and only copied from and to, never
//! borrowed. May break it: expecting it to be reset; it is not part of any image.

use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A shared region, to be given to [`SandboxBuilder::shared`](crate::SandboxBuilder::shared).
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is only accessed by copies; tearing is the documented worst case.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `len` bytes of zeros; rounded up to whole pages.
    ///
    /// # Errors
    /// What `memfd_create`, `ftruncate` or `mmap` say.
    pub fn new(len: usize) -> Result<Self, Errno> {
        let len = len.max(1).next_multiple_of(crate::PAGE as usize);
        let file = memfd_create("afresh-shared", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, len as u64)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base, len })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: there is at least one page.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn pointer(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.len);
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Copies out `out.len()` bytes from `offset`; false where they do not fit.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        if offset.checked_add(out.len()).is_none_or(|end| end > self.len) {
            return false;
        }
        // SAFETY: the range was checked; guests may write meanwhile, which can only tear the copy.
        unsafe {
            std::ptr::copy_nonoverlapping(self.pointer(offset), out.as_mut_ptr(), out.len());
        }
        true
    }

    /// Copies `bytes` in at `offset`; false where they do not fit.
    #[must_use]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.len) {
            return false;
        }
        // SAFETY: as in `read`.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer(offset), bytes.len());
        }
        true
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: nobody refers to the mapping any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
