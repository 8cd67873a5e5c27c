//! Tracks writes of the guest to pages in the image's mappings.
//!
//! A page is write-protected until it is written first; that write stops the guest until the sentry
//! has noted the page and lifted the protection. Pages stay open until they are protected again, so
//! that in the steady state nothing faults. The kernel refuses its own writes to a protected page
//! on the sentry's behalf, so those are noted beforehand.
//!
//! The initial memory of a process needs none of that at first: a written page is a private copy,
//! which the page map shows. So a process that makes one call pays for no fault but the kernel's
//! own, and is watched from its first reset on.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use afresh_sys::{Interest, PAGE_SIZE, SysError, Uffd, UffdEvent, UffdMode};
use linux_raw_sys::general::{
    UFFD_API, UFFD_FEATURE_MISSING_SHMEM, UFFD_FEATURE_PAGEFAULT_FLAG_WP,
    UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED, uffdio_api,
};
use linux_raw_sys::ioctl::UFFDIO_API;

use super::PlatformError;
use super::process::Process;
use crate::ranges::Ranges;

const PAGE: u64 = PAGE_SIZE as u64;

/// The watched ranges of a process, and the written pages.
#[derive(Debug)]
pub(crate) struct WriteTracker {
    uffd: Uffd,
    /// Ranges that are registered; protected but for those that are open.
    watched: Ranges,
    open: Ranges,
    /// Ranges that show an image, have done so since they were mapped, and are not registered yet.
    fresh: Ranges,
    /// Ranges that show an image with missing content, and report faults there.
    coming: Ranges,
    /// Pages that were opened since the last drain, each once.
    written: Vec<u64>,
}

impl WriteTracker {
    /// Takes over the userfaultfd that the guest's process opened on itself.
    pub(crate) fn new(descriptor: OwnedFd) -> Result<Self, PlatformError> {
        let features = UFFD_FEATURE_PAGEFAULT_FLAG_WP
            | UFFD_FEATURE_MISSING_SHMEM
            | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
            | UFFD_FEATURE_WP_UNPOPULATED;
        let mut api =
            uffdio_api { api: u64::from(UFFD_API), features: u64::from(features), ioctls: 0 };
        // SAFETY: the request takes this structure, which lives through the call.
        let rc =
            unsafe { libc::ioctl(descriptor.as_raw_fd(), UFFDIO_API as libc::Ioctl, &raw mut api) };
        if rc < 0 {
            return Err(PlatformError::missing(
                "userfaultfd with write protection of files",
                std::io::Error::last_os_error(),
                "it needs Linux 6.4 or newer",
            ));
        }
        Ok(Self {
            uffd: Uffd::from_fd(descriptor, UffdMode::Events),
            watched: Ranges::default(),
            open: Ranges::default(),
            fresh: Ranges::default(),
            coming: Ranges::default(),
            written: Vec::new(),
        })
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// Watches `range`, which must just have been mapped, from the first question for writes on.
    pub(crate) fn begin(&mut self, range: Range<u64>) {
        self.fresh.insert(range);
    }

    /// Ranges that were mapped since the start and are not watched yet.
    pub(crate) fn fresh(&self) -> Vec<Range<u64>> {
        self.fresh.iter().collect()
    }

    /// Watches such a range, whose pages in `copied` are private copies: they were written.
    pub(crate) fn settle(
        &mut self,
        range: Range<u64>,
        copied: Vec<Range<u64>>,
    ) -> Result<(), PlatformError> {
        self.fresh.remove(range.clone());
        self.watch(range)?;
        copied.into_iter().try_for_each(|pages| self.note(pages))
    }

    /// Watches `range`, which must just have been mapped.
    pub(crate) fn watch(&mut self, range: Range<u64>) -> Result<(), PlatformError> {
        let mut from = range.start;
        let coming = self.coming.within(range.clone());
        for coming in coming.into_iter().chain(std::iter::once(range.end..range.end)) {
            self.register(from..coming.start, Interest::WRITES)?;
            // A registration takes the place of the one before.
            self.register(coming.clone(), Interest { missing: true, ..Interest::WRITES })?;
            from = coming.end;
        }
        self.watched.insert(range.clone());
        self.protect(range)
    }

    fn register(&self, range: Range<u64>, interest: Interest) -> Result<(), PlatformError> {
        let (start, len) = pointer(&range);
        if len == 0 {
            return Ok(());
        }
        self.uffd.register(start, len, interest).map_err(refused)
    }

    /// Has missing pages of `ranges` reported, which must just have been mapped. Adjacent mappings
    /// are one registration: it spans all of them.
    pub(super) fn await_content(
        &mut self,
        ranges: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<(), PlatformError> {
        let mut joined = Ranges::default();
        ranges.into_iter().for_each(|range| joined.insert(range));
        joined.iter().try_for_each(|range| {
            self.coming.insert(range.clone());
            self.register(range, Interest::MISSING)
        })
    }

    /// Notes that nothing is missing any more.
    pub(super) fn is_filled(&mut self) {
        self.coming = Ranges::default();
    }

    /// Wakes threads that wait for pages of `range`.
    pub(super) fn wake(&self, range: &Range<u64>) -> Result<(), PlatformError> {
        let (start, len) = pointer(range);
        self.uffd.wake(start, len).map_err(refused)
    }

    /// Protects `range` again.
    pub(crate) fn protect(&mut self, range: Range<u64>) -> Result<(), PlatformError> {
        let (start, len) = pointer(&range);
        self.open.remove(range);
        self.uffd.write_protect(start, len, true).map_err(refused)
    }

    /// Makes `range` writable, and does not report it.
    pub(crate) fn unprotect(&mut self, range: Range<u64>) -> Result<(), PlatformError> {
        let (start, len) = pointer(&range);
        self.open.insert(range);
        self.uffd.write_protect(start, len, false).map_err(refused)
    }

    /// Removes `range`, which was unmapped.
    pub(crate) fn forget(&mut self, range: Range<u64>) {
        self.fresh.remove(range.clone());
        self.coming.remove(range.clone());
        self.watched.remove(range.clone());
        self.open.remove(range);
    }

    /// The pages that were written since they were protected and not reported yet, in order.
    pub(crate) fn drain(&mut self) -> Vec<u64> {
        let mut written = std::mem::take(&mut self.written);
        written.sort_unstable();
        written.dedup();
        written.retain(|&page| self.open.holds(page));
        written
    }

    /// Notes written pages, and wakes the guest. Returns the page that it waits for, if one is
    /// missing.
    pub(super) fn serve(&mut self) -> Result<Option<u64>, PlatformError> {
        while let Some(event) = self.uffd.next_event().map_err(refused)? {
            if let UffdEvent::Fault { address, write_protected, .. } = event {
                let page = address as u64 & !(PAGE - 1);
                if !write_protected {
                    return Ok(Some(page));
                }
                self.note(page..page + PAGE)?;
            }
        }
        Ok(None)
    }

    /// Opens the pages of `bytes`, which the sentry is about to write.
    pub(crate) fn touch(&mut self, bytes: Range<u64>) -> Result<(), PlatformError> {
        let pages = bytes.start & !(PAGE - 1)..bytes.end.saturating_add(PAGE - 1) & !(PAGE - 1);
        for watched in self.watched.within(pages) {
            let mut from = watched.start;
            let known = self.open.within(watched.clone());
            for known in known.into_iter().chain(std::iter::once(watched.end..watched.end)) {
                if from < known.start {
                    self.note(from..known.start)?;
                }
                from = known.end;
            }
        }
        Ok(())
    }

    fn note(&mut self, pages: Range<u64>) -> Result<(), PlatformError> {
        self.written.extend(pages.clone().step_by(PAGE_SIZE));
        self.unprotect(pages)
    }
}

impl Process {
    /// Addresses of pages that were written since they were protected and are not reported so far,
    /// in order; empty for a process that is not tracked.
    pub(crate) fn drain(&mut self) -> Result<Vec<u64>, PlatformError> {
        let Some(track) = &self.track else { return Ok(Vec::new()) };
        for range in track.fresh() {
            let copied = self.private(range.clone());
            let settled = copied.and_then(|copied| match &mut self.track {
                Some(track) => track.settle(range, copied),
                None => Ok(()),
            });
            settled.map_err(|error| self.ended_or(error))?;
        }
        Ok(self.track.as_mut().map(WriteTracker::drain).unwrap_or_default())
    }

    /// Makes pages writable, and does not report them.
    pub(crate) fn unprotect(&mut self, range: Range<u64>) -> Result<(), PlatformError> {
        self.track.as_mut().map_or(Ok(()), |track| track.unprotect(range))
    }

    pub(crate) fn watch(&mut self, range: Range<u64>) -> Result<(), PlatformError> {
        self.track.as_mut().map_or(Ok(()), |track| track.watch(range))
    }

    pub(crate) fn protect(&mut self, range: Range<u64>) -> Result<(), PlatformError> {
        self.track.as_mut().map_or(Ok(()), |track| track.protect(range))
    }

    pub(crate) fn forget(&mut self, range: Range<u64>) {
        if let Some(track) = &mut self.track {
            track.forget(range);
        }
    }
}

/// An address in the other process, as the wrappers take it; nothing here follows it.
fn pointer(range: &Range<u64>) -> (*const u8, usize) {
    (std::ptr::without_provenance(range.start as usize), (range.end - range.start) as usize)
}

fn refused(error: SysError) -> PlatformError {
    PlatformError::kernel(error.call.name(), std::io::Error::from_raw_os_error(error.errno))
}
