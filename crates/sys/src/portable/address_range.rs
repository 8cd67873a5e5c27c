//! Address space from the system, readable and writable where it is used, and zero at first.
//!
//! Promises: pages that nothing has touched take no memory, except under Miri. `zero` gives large
//! ranges back to the system. May break it: a range that a caller leaves before it has ended.

use std::io;
use std::ptr::NonNull;

use crate::{Call, PAGE_SIZE, SysError};

/// Bytes from which on memory is given back instead of being overwritten.
#[cfg(not(miri))]
const MIN_RETURN: usize = 64 << 10;

/// An owned range of addresses.
#[derive(Debug)]
pub(super) struct AddressRange {
    /// The first byte that the system gave.
    start: NonNull<u8>,
    /// Bytes that the system gave.
    len: usize,
    /// Bytes before the first aligned one.
    skipped: usize,
}

impl AddressRange {
    /// `bytes` bytes from a multiple of `align` on.
    pub(super) fn new(bytes: usize, align: usize) -> Result<Self, SysError> {
        let nomem = SysError::new(Call::Map, libc::ENOMEM);
        let len = bytes.checked_add(align - PAGE_SIZE).ok_or(nomem)?;
        let start = NonNull::new(system::reserve(len)).ok_or(nomem)?;
        let skipped = (start.as_ptr() as usize).next_multiple_of(align) - start.as_ptr() as usize;
        Ok(Self { start, len, skipped })
    }

    /// The first aligned address.
    pub(super) fn base(&self) -> NonNull<u8> {
        // SAFETY: inside the range, which has room for the bytes that are skipped.
        unsafe { self.start.add(self.skipped) }
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // SAFETY: reserved by `new`, with this length, and owned.
        unsafe { system::release(self.start.as_ptr(), self.len) };
    }
}

/// Makes memory usable.
///
/// # Safety
/// The pages must be in an [`AddressRange`].
pub(super) unsafe fn commit(at: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: by the caller's promise.
    unsafe { system::commit(at, len) }
}

/// Makes memory usable and zero.
///
/// # Safety
/// As [`commit`]. Nothing else may use the pages meanwhile.
pub(super) unsafe fn zero(at: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: by the caller's promise.
    unsafe { system::zero(at, len) }
}

#[cfg(miri)]
mod system {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::io;

    use crate::{HUGE_SIZE, PAGE_SIZE};

    fn layout(len: usize) -> Option<Layout> {
        let align = if len >= HUGE_SIZE { HUGE_SIZE } else { PAGE_SIZE };
        Layout::from_size_align(len, align).ok()
    }

    pub(super) fn reserve(len: usize) -> *mut u8 {
        // SAFETY: no range is empty.
        layout(len).map_or(std::ptr::null_mut(), |layout| unsafe { alloc_zeroed(layout) })
    }

    pub(super) unsafe fn release(at: *mut u8, len: usize) {
        if let Some(layout) = layout(len) {
            // SAFETY: by the caller's promise reserved with this length.
            unsafe { dealloc(at, layout) };
        }
    }

    pub(super) unsafe fn commit(_: *mut u8, _: usize) -> io::Result<()> {
        Ok(())
    }

    pub(super) unsafe fn zero(at: *mut u8, len: usize) -> io::Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { at.write_bytes(0, len) };
        Ok(())
    }
}

#[cfg(all(unix, not(miri)))]
mod system {
    use std::io;

    const ACCESS: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
    const KIND: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;

    pub(super) fn reserve(len: usize) -> *mut u8 {
        // SAFETY: a new mapping where the system chooses disturbs nothing.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, ACCESS, KIND, -1, 0) };
        if at == libc::MAP_FAILED { std::ptr::null_mut() } else { at.cast() }
    }

    pub(super) unsafe fn release(at: *mut u8, len: usize) {
        // SAFETY: by the caller's promise a mapping of this length without users.
        unsafe { libc::munmap(at.cast(), len) };
    }

    pub(super) unsafe fn commit(_: *mut u8, _: usize) -> io::Result<()> {
        Ok(())
    }

    /// Pages of this system, which may be larger than ours.
    fn page_size() -> usize {
        // SAFETY: only reads a constant of the system.
        usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(super::MIN_RETURN)
    }

    pub(super) unsafe fn zero(at: *mut u8, len: usize) -> io::Result<()> {
        let (start, end) = (at as usize, at as usize + len);
        let page = page_size();
        let (first, last) = (start.next_multiple_of(page), end / page * page);
        if len < super::MIN_RETURN || first >= last {
            // SAFETY: by the caller's promise writable, and without other users.
            unsafe { at.write_bytes(0, len) };
            return Ok(());
        }
        // SAFETY: as above: both edges are in the range.
        unsafe {
            at.write_bytes(0, first - start);
            at.add(last - start).write_bytes(0, end - last);
        }
        // SAFETY: whole pages of the range, which are replaced by zeros as the caller asked.
        let new = unsafe {
            let inside = at.add(first - start);
            libc::mmap(inside.cast(), last - first, ACCESS, KIND | libc::MAP_FIXED, -1, 0)
        };
        if new == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

#[cfg(all(windows, not(miri)))]
mod system {
    use std::ffi::c_void;
    use std::io;

    const COMMIT: u32 = 0x1000;
    const RESERVE: u32 = 0x2000;
    const DECOMMIT: u32 = 0x4000;
    const RELEASE: u32 = 0x8000;
    const READ_WRITE: u32 = 0x04;

    #[link(name = "kernel32")]
    unsafe extern "system" {
        fn VirtualAlloc(at: *mut c_void, len: usize, kind: u32, protection: u32) -> *mut c_void;
        fn VirtualFree(at: *mut c_void, len: usize, kind: u32) -> i32;
    }

    pub(super) fn reserve(len: usize) -> *mut u8 {
        // SAFETY: a new range where the system chooses disturbs nothing.
        unsafe { VirtualAlloc(std::ptr::null_mut(), len, RESERVE, READ_WRITE) }.cast()
    }

    pub(super) unsafe fn release(at: *mut u8, _: usize) {
        // SAFETY: by the caller's promise the start of a range without users.
        unsafe { VirtualFree(at.cast(), 0, RELEASE) };
    }

    pub(super) unsafe fn commit(at: *mut u8, len: usize) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: pages of a reserved range. Those that are in use keep their content.
        let done = unsafe { VirtualAlloc(at.cast(), len, COMMIT, READ_WRITE) };
        if done.is_null() { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub(super) unsafe fn zero(at: *mut u8, len: usize) -> io::Result<()> {
        if len >= super::MIN_RETURN {
            // SAFETY: by the caller's promise pages without other users; they come back as zeros.
            unsafe { VirtualFree(at.cast(), len, DECOMMIT) };
            // SAFETY: by the caller's promise.
            return unsafe { commit(at, len) };
        }
        // SAFETY: by the caller's promise; the pages are usable once they are committed.
        unsafe {
            commit(at, len)?;
            at.write_bytes(0, len);
        }
        Ok(())
    }
}
