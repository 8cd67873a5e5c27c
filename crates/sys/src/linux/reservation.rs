//! Reserved address space and the mappings placed inside it.
//!
//! A [`Reservation`] owns a range of addresses; everything mapped in it is replaced or released
//! through it, never outside it. All offsets are pages relative to its base. It does not track the
//! mappings: the slot does.
//!
//! Private memory is never merged with equal pages (KSM): every mapping opts out when it is made.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::page_size::check_page_size;
use super::{fork, merges_memory};
use crate::planted::{self, Bug};
use crate::{Call, Memfd, PAGE_SIZE, PageRange, SysError, inject};

/// Page protection of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Any access faults.
    None,
    /// Reads only.
    Read,
    /// Reads and writes.
    ReadWrite,
}

impl Protection {
    fn bits(self) -> libc::c_int {
        match self {
            Protection::None => libc::PROT_NONE,
            Protection::Read => libc::PROT_READ,
            Protection::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// Advice to the kernel about a range (`madvise`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// Throw private pages away: anonymous ones read as zero again, file ones as the file.
    Discard,
    /// Free the pages of a shared file for every process: holes stay.
    Remove,
    /// Fault every page in for reading.
    PopulateRead,
    /// Fault every page in for writing (breaks copy-on-write).
    PopulateWrite,
    /// Prefer huge pages.
    HugePage,
    /// Never use huge pages.
    NoHugePage,
    /// Make huge pages of the present pages.
    Collapse,
    /// Do not inherit the range across `fork`.
    DontFork,
    /// Inherit it again, once for each time that it was not.
    DoFork,
    /// Leave the range out of core dumps. The kernel reads a range to dump it, and gives a hole of
    /// a shared file a page of zeros then, which other processes see.
    DontDump,
}

const MADV_POPULATE_READ: libc::c_int = 22;
const MADV_POPULATE_WRITE: libc::c_int = 23;
const MADV_DONTNEED_LOCKED: libc::c_int = 24;
const MADV_COLLAPSE: libc::c_int = 25;

impl Advice {
    fn bits(self) -> libc::c_int {
        match self {
            Advice::Discard => libc::MADV_DONTNEED,
            Advice::Remove => libc::MADV_REMOVE,
            Advice::PopulateRead => MADV_POPULATE_READ,
            Advice::PopulateWrite => MADV_POPULATE_WRITE,
            Advice::HugePage => libc::MADV_HUGEPAGE,
            Advice::NoHugePage => libc::MADV_NOHUGEPAGE,
            Advice::Collapse => MADV_COLLAPSE,
            Advice::DontFork => libc::MADV_DONTFORK,
            Advice::DoFork => libc::MADV_DOFORK,
            Advice::DontDump => libc::MADV_DONTDUMP,
        }
    }
}

/// An owned range of address space; released when dropped.
///
/// In a child of a fork that did not inherit all of it, every change fails with `ESRCH`, and
/// nothing is released: the kernel may have given the missing addresses to other mappings of the
/// child.
#[derive(Debug)]
pub struct Reservation {
    base: NonNull<u8>,
    pages: usize,
    /// Whether the range is released with this value.
    owned: bool,
    /// Whether mappings must opt out of merging: found out when it is reserved, so that a mapping
    /// costs no further call.
    merges: bool,
    /// Parts that forked children do not inherit.
    kept: AtomicUsize,
    /// Whether a part of the range was lost.
    torn: AtomicBool,
    /// The process that reserved it.
    generation: u32,
}

// SAFETY: the type owns a range of addresses, which mean the same in every thread; every method
// that changes a mapping is a system call, which the kernel serialises. Access to the memory itself
// is through raw pointers, whose users answer for races.
unsafe impl Send for Reservation {}
// SAFETY: as above; `&self` methods only make system calls.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `pages` pages of inaccessible address space; no memory is used.
    ///
    /// # Errors
    /// `ENOMEM` when the address space or the number of mappings is exhausted; [`Call::PageSize`]
    /// on a kernel with other pages than [`PAGE_SIZE`].
    pub fn new(pages: usize) -> Result<Self, SysError> {
        Self::aligned(pages, PAGE_SIZE)
    }

    /// Reserves `pages` pages whose base is a multiple of `align` bytes (a power of two of at least
    /// a page), as huge pages need.
    ///
    /// # Errors
    /// As for [`Reservation::new`].
    pub fn aligned(pages: usize, align: usize) -> Result<Self, SysError> {
        check_page_size()?;
        debug_assert!(align.is_power_of_two() && align >= PAGE_SIZE);
        let bytes =
            pages.max(1).checked_mul(PAGE_SIZE).ok_or(SysError::new(Call::Map, libc::ENOMEM))?;
        let slack = align - PAGE_SIZE;
        let total = bytes.checked_add(slack).ok_or(SysError::new(Call::Map, libc::ENOMEM))?;
        inject::gate(Call::Map)?;
        // SAFETY: a new private anonymous mapping at an address that the kernel chooses disturbs
        // nothing.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                total,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(SysError::last(Call::Map));
        }
        let start = raw as usize;
        let base = start.next_multiple_of(align);
        for (from, len) in [(start, base - start), (base + bytes, start + total - base - bytes)] {
            if len > 0 {
                // SAFETY: the slack is inside the mapping just made, and is not used yet.
                unsafe { libc::munmap(from as *mut _, len) };
            }
        }
        let base = NonNull::new(base as *mut u8).ok_or(SysError::new(Call::Map, libc::ENOMEM))?;
        let this = Self::new_at(base, pages.max(1), true);
        this.refuse_merging(PageRange::new(0, this.pages))?;
        Ok(this)
    }

    /// Wraps the mappings of `pages` pages from `base` on, which another owner reserved and will
    /// release.
    ///
    /// # Safety
    /// The range must be mapped, belong to the caller, and stay reserved until the value is
    /// dropped. Until then only this value may change its mappings.
    #[must_use]
    pub unsafe fn of_others(base: NonNull<u8>, pages: usize) -> Self {
        Self::new_at(base, pages, false)
    }

    fn new_at(base: NonNull<u8>, pages: usize, owned: bool) -> Self {
        let (kept, torn) = (AtomicUsize::new(0), AtomicBool::new(false));
        let merges = merges_memory() && !planted::is(Bug::Merging);
        Self { base, pages, owned, merges, kept, torn, generation: fork::generation() }
    }

    /// Notes that a part of the range was lost.
    pub(super) fn tear(&self) {
        self.torn.store(true, Ordering::Relaxed);
    }

    /// Notes that children do not get a part of the range, until it is released.
    pub(super) fn keep(&self) {
        self.kept.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether other mappings may be at its addresses: a part was lost, or this is a child of the
    /// process that reserved the range, and did not get all of it.
    fn is_shared(&self) -> bool {
        self.torn.load(Ordering::Relaxed)
            || self.kept.load(Ordering::Relaxed) > 0 && self.generation != fork::generation()
    }

    /// The first address.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Number of pages reserved.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Address of page `page`, which may be one past the end.
    ///
    /// # Panics
    /// If `page` is outside the reservation: a bug in the caller that must not become a wild
    /// pointer.
    #[must_use]
    pub fn page_ptr(&self, page: usize) -> *mut u8 {
        assert!(page <= self.pages, "page {page} outside a reservation of {}", self.pages);
        // SAFETY: just checked to be inside (or one past) the mapping this value owns.
        unsafe { self.base.as_ptr().add(page * PAGE_SIZE) }
    }

    pub(super) fn check(&self, range: PageRange, call: Call) -> Result<(), SysError> {
        if self.is_shared() {
            return Err(SysError::new(call, libc::ESRCH));
        }
        if range.start.checked_add(range.len).is_some_and(|end| end <= self.pages) {
            Ok(())
        } else {
            Err(SysError::new(call, libc::EINVAL))
        }
    }

    pub(super) fn place(
        &self,
        range: PageRange,
        protection: Protection,
        flags: libc::c_int,
        fd: libc::c_int,
        offset: usize,
    ) -> Result<(), SysError> {
        inject::gate(Call::Map)?;
        self.check(range, Call::Map)?;
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: MAP_FIXED replaces only addresses inside the reservation, which this value owns;
        // `check` has bounded the range.
        let raw = unsafe {
            libc::mmap(
                self.page_ptr(range.start).cast(),
                range.byte_len(),
                protection.bits(),
                flags | libc::MAP_FIXED,
                fd,
                offset as libc::off_t,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(SysError::last(Call::Map));
        }
        // Shared memory is never merged.
        if flags & libc::MAP_PRIVATE != 0 { self.refuse_merging(range) } else { Ok(()) }
    }

    /// Keeps the kernel from merging pages of `range`, where all memory of the process is merged.
    pub(super) fn refuse_merging(&self, range: PageRange) -> Result<(), SysError> {
        if !self.merges {
            return Ok(());
        }
        inject::gate(Call::Advise)?;
        // SAFETY: this value owns the range, and the advice changes no byte.
        let refused = unsafe {
            libc::madvise(
                self.page_ptr(range.start).cast(),
                range.byte_len(),
                libc::MADV_UNMERGEABLE,
            )
        };
        if refused == 0 { Ok(()) } else { Err(SysError::last(Call::Advise)) }
    }

    /// Replaces `range` by fresh private zero memory.
    ///
    /// # Errors
    /// `ENOMEM` when the number of mappings is exhausted.
    pub fn map_anonymous(&self, range: PageRange, protection: Protection) -> Result<(), SysError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        self.place(range, protection, flags, -1, 0)
    }

    /// Replaces `range` by a private (copy-on-write) view of `file` from `file_page` on.
    ///
    /// # Errors
    /// `ENOMEM` when the number of mappings is exhausted.
    pub fn map_private(
        &self,
        range: PageRange,
        protection: Protection,
        file: &Memfd,
        file_page: usize,
    ) -> Result<(), SysError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        self.place(range, protection, flags, file.as_fd().as_raw_fd(), file_page * PAGE_SIZE)
    }

    /// Replaces `range` by a shared view of `file` from `file_page` on.
    ///
    /// # Errors
    /// `EPERM` for a writable view of a sealed file.
    pub fn map_shared(
        &self,
        range: PageRange,
        protection: Protection,
        file: &Memfd,
        file_page: usize,
    ) -> Result<(), SysError> {
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        self.place(range, protection, flags, file.as_fd().as_raw_fd(), file_page * PAGE_SIZE)
    }

    /// Changes the protection of `range`.
    ///
    /// # Errors
    /// `ENOMEM` when splitting a mapping would exceed `vm.max_map_count`.
    pub fn protect(&self, range: PageRange, protection: Protection) -> Result<(), SysError> {
        inject::gate(Call::Protect)?;
        self.check(range, Call::Protect)?;
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is inside the reservation, which this value owns.
        let rc = unsafe {
            libc::mprotect(self.page_ptr(range.start).cast(), range.byte_len(), protection.bits())
        };
        if rc != 0 { Err(SysError::last(Call::Protect)) } else { Ok(()) }
    }

    /// Advises the kernel about `range`.
    ///
    /// # Errors
    /// Any error of `madvise`; `EAGAIN` is retried a bounded number of times.
    pub fn advise(&self, range: PageRange, advice: Advice) -> Result<(), SysError> {
        self.check(range, Call::Advise)?;
        if range.is_empty() {
            return Ok(());
        }
        if advice == Advice::DontFork {
            self.kept.fetch_add(1, Ordering::Relaxed);
        }
        for attempt in 0.. {
            inject::gate(Call::Advise)?;
            let advise = |bits| {
                // SAFETY: this value owns the range. Discarding changes bytes only as the caller
                // requested.
                let rc = unsafe {
                    libc::madvise(self.page_ptr(range.start).cast(), range.byte_len(), bits)
                };
                if rc == 0 { Ok(()) } else { Err(SysError::last(Call::Advise)) }
            };
            let error = match advise(advice.bits()) {
                // Memory that `mlockall` has locked.
                Err(error) if error.errno == libc::EINVAL && advice == Advice::Discard => {
                    match advise(MADV_DONTNEED_LOCKED) {
                        Ok(()) => break,
                        Err(_) => error,
                    }
                }
                Ok(()) => break,
                Err(error) => error,
            };
            if error.errno != libc::EAGAIN || attempt == 100 {
                return Err(error);
            }
        }
        if advice == Advice::DoFork {
            self.kept.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The number of resident pages in `range`, by `mincore`. A page of a file counts when the file
    /// has it in memory, mapped here or not.
    #[must_use]
    pub fn resident_pages(&self, range: PageRange) -> usize {
        if self.check(range, Call::Map).is_err() || range.is_empty() {
            return 0;
        }
        let mut vector = vec![0u8; range.len];
        // SAFETY: the range is inside the reservation and the vector has one byte a page.
        let rc = unsafe {
            libc::mincore(self.page_ptr(range.start).cast(), range.byte_len(), vector.as_mut_ptr())
        };
        if rc != 0 { 0 } else { vector.iter().filter(|b| **b & 1 != 0).count() }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.owned || self.is_shared() {
            return;
        }
        // SAFETY: this value owns exactly this range and is going away; its users hold borrows of
        // it or of a type that owns it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.pages * PAGE_SIZE) };
    }
}
