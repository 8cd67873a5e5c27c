//! `PAGEMAP_SCAN`: the pages of a range that were written since they were write-protected, and the
//! private pages of a process.
//!
//! For the first the range must be registered with a userfaultfd in asynchronous write-protect mode
//! ([`crate::UffdMode::Async`]). The kernel walks page tables, so a scan costs time in proportion
//! to the populated part of the range: about half a microsecond a MiB.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

use linux_raw_sys::general::{
    PAGE_IS_FILE, PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN, page_region,
    pm_scan_arg,
};

use crate::{Call, PAGE_SIZE, PageRange, PerProcess, SysError, inject};

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;

/// Regions a single call may return. The walk is resumed when it fills them all.
const BATCH: usize = 256;

fn pagemap() -> Result<&'static File, SysError> {
    // The descriptor speaks of the memory of the process that opened it, also when a child uses it.
    static FILE: PerProcess<Result<File, i32>> = PerProcess::new(|| {
        File::open("/proc/self/pagemap").map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))
    });
    FILE.get().as_ref().map_err(|errno| SysError::new(Call::PagemapScan, *errno))
}

/// Calls `found` with each run of written pages in the `pages` pages at `base`, in order; runs are
/// relative to `base`.
///
/// Swapped-out pages count as written when the kernel says so; pages that were never populated do
/// not (a page table that exists reports its empty entries as written, which the present-or-swapped
/// condition filters out).
///
/// # Errors
/// `ENOTTY` before Linux 6.7.
pub fn written(
    base: *const u8,
    pages: usize,
    mut found: impl FnMut(PageRange),
) -> Result<(), SysError> {
    let start = base as u64;
    let range = start..start + (pages * PAGE_SIZE) as u64;
    scan(pagemap()?, range, (u64::from(PAGE_IS_WRITTEN), 0), |run| {
        found(PageRange::new(
            (run.start - start) as usize / PAGE_SIZE,
            (run.end - run.start) as usize / PAGE_SIZE,
        ));
    })
}

/// Calls `found` with each run of private pages in the `pages` pages at `base`, in order. Runs are
/// relative to `base`. In a private mapping of a file these are the pages that were written.
///
/// Write protection of a userfaultfd must never have been on the range: the kernel marks protected
/// pages that were not touched as swapped out.
///
/// # Errors
/// `ENOTTY` before Linux 6.7.
pub fn private(
    base: *const u8,
    pages: usize,
    mut found: impl FnMut(PageRange),
) -> Result<(), SysError> {
    let start = base as u64;
    own_pages(pagemap()?, start..start + (pages * PAGE_SIZE) as u64, |run| {
        found(PageRange::new(
            (run.start - start) as usize / PAGE_SIZE,
            (run.end - run.start) as usize / PAGE_SIZE,
        ));
    })
}

/// Calls `found` with each run of addresses in `range` where the process whose page map `file` is
/// has private pages: neither pages of a file nor the kernel's zero page, which a read leaves in
/// untouched memory.
///
/// # Errors
/// `ENOTTY` before Linux 6.7.
pub fn own_pages(
    file: &File,
    range: Range<u64>,
    found: impl FnMut(Range<u64>),
) -> Result<(), SysError> {
    let others = u64::from(PAGE_IS_FILE | PAGE_IS_PFNZERO);
    scan(file, range, (others, others), found)
}

/// Calls `found` with each run of addresses in `range` where the process whose page map `file` is
/// has pages, in memory or swapped out.
///
/// # Errors
/// `ENOTTY` before Linux 6.7.
#[cfg(feature = "socket")]
pub(super) fn present(
    file: &File,
    range: Range<u64>,
    found: &mut dyn FnMut(Range<u64>),
) -> Result<(), SysError> {
    scan(file, range, (0, 0), found)
}

/// Calls `found` with each run of pages that are in memory, or swapped out, and of all the kinds of
/// `wanted` but the inverted ones.
fn scan(
    file: &File,
    range: Range<u64>,
    (wanted, inverted): (u64, u64),
    mut found: impl FnMut(Range<u64>),
) -> Result<(), SysError> {
    let mut from = range.start;
    while from < range.end {
        inject::gate(Call::PagemapScan)?;
        let mut regions = [page_region { start: 0, end: 0, categories: 0 }; BATCH];
        let mut arg = pm_scan_arg {
            size: size_of::<pm_scan_arg>() as u64,
            flags: 0,
            start: from,
            end: range.end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: BATCH as u64,
            max_pages: 0,
            category_inverted: inverted,
            category_mask: wanted,
            category_anyof_mask: u64::from(PAGE_IS_PRESENT | PAGE_IS_SWAPPED),
            return_mask: wanted,
        };
        // SAFETY: `arg` and the vector it points to live through the call, and their sizes are
        // given.
        let n = unsafe { libc::ioctl(file.as_raw_fd(), PAGEMAP_SCAN, &mut arg) };
        if n < 0 {
            let error = SysError::last(Call::PagemapScan);
            if error.errno == libc::EINTR {
                continue;
            }
            return Err(error);
        }
        let n = (n as usize).min(BATCH);
        for region in &regions[..n] {
            found(region.start..region.end);
        }
        // `walk_end` can be stale once the vector is full, so the end of the last region is where
        // the walk resumes; a call that did not fill the vector has seen everything.
        if n < BATCH {
            break;
        }
        from = regions[n - 1].end;
    }
    Ok(())
}
