//! userfaultfd write protection that the kernel lifts by itself (WP_ASYNC), read by `PAGEMAP_SCAN`.
//!
//! The first write to a protected page costs about a microsecond and no signal; system calls may
//! write too. In exchange every drain is a system call that walks the page tables of the watched
//! ranges, and pages left writable show up in it again each time.

use afresh_sys::{Interest, PAGE_SIZE, PageRange, Uffd, UffdMode, pagemap};

use super::dirty::push_run;
use super::{Descriptor, Tracker, TrackerKind};
use crate::TrackError;

static UFFD: Descriptor = Descriptor::new(UffdMode::Async);

/// Notices writes by scanning page tables.
pub(super) struct Scan {
    uffd: &'static Uffd,
    base: usize,
    /// Sorted, disjoint.
    watched: Vec<PageRange>,
}

impl Scan {
    pub(super) fn new(base: *mut u8, _capacity: usize) -> Result<Self, TrackError> {
        Ok(Self { uffd: UFFD.get()?, base: base as usize, watched: Vec::new() })
    }

    fn address(&self, page: usize) -> *const u8 {
        (self.base + page * PAGE_SIZE) as *const u8
    }

    fn protect(&self, pages: &[PageRange], protect: bool) -> Result<(), TrackError> {
        for range in pages {
            self.uffd.write_protect(self.address(range.start), range.byte_len(), protect)?;
        }
        Ok(())
    }
}

// SAFETY: only watched ranges are scanned, which are sorted and disjoint, and the kernel reports in
// order every page that lost its write protection since it was set; only a write, or this tracker,
// lifts it.
unsafe impl Tracker for Scan {
    fn kind(&self) -> TrackerKind {
        TrackerKind::UffdScan
    }

    fn watch(&mut self, range: PageRange) -> Result<(), TrackError> {
        self.uffd.register(self.address(range.start), range.byte_len(), Interest::WRITES)?;
        self.protect(&[range], true)?;
        self.watched.retain(|w| w.intersect(range).is_none_or(|i| i != *w));
        self.watched.push(range);
        self.watched.sort_unstable();
        let mut merged: Vec<PageRange> = Vec::with_capacity(self.watched.len());
        for w in self.watched.drain(..) {
            match merged.last_mut() {
                Some(last) if w.start <= last.end() => {
                    last.len = last.end().max(w.end()) - last.start;
                }
                _ => merged.push(w),
            }
        }
        self.watched = merged;
        Ok(())
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError> {
        for range in &self.watched {
            pagemap::written(self.address(range.start), range.len, |run| {
                push_run(written, PageRange::new(range.start + run.start, run.len));
            })?;
        }
        Ok(())
    }

    fn arm(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        self.protect(pages, true)
    }

    fn open(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        self.protect(pages, false)
    }

    fn drains_for_free(&self) -> bool {
        false
    }
}
