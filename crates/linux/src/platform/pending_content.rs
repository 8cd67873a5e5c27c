//! Content that a process shows before it is there: pages of a snapshot that has just been opened.
//!
//! The process maps the file that its image is filled into. A page that it touches too early is
//! reported by userfaultfd, fetched while the guest waits, and found by it in the file when it
//! looks again.
//!
//! Promises: no guest sees a page before its content is in place. Nor does the kernel put a page of
//! zeros there by itself: every mapping is registered before anything touches it, and the sentry
//! fetches pages beforehand that it is about to read or write for the guest, because the kernel
//! refuses accesses that would have to wait.

use std::ops::Range;

use afresh_memory::{Image, PAGE_SIZE, PageRange};

use super::mapped_image::{MappedImage, unread};
use super::{PlatformError, Process, Segments, stub};

const PAGE: u64 = PAGE_SIZE as u64;

/// An image with missing content, and its mappings in the process.
#[derive(Debug)]
pub(super) struct PendingContent {
    shown: MappedImage,
    /// Pages of the image.
    pages: usize,
    segments: Segments,
}

impl PendingContent {
    /// The pages of the image that the process has, or had, at `range`.
    fn pages(&self, range: &Range<u64>) -> Vec<PageRange> {
        let window = stub::IMAGE..stub::IMAGE + self.pages as u64 * PAGE;
        if window.contains(&range.start) {
            let first = (range.start - window.start) / PAGE;
            let end = (range.end.min(window.end) - window.start).div_ceil(PAGE);
            return vec![PageRange::new(first as usize, (end - first) as usize)];
        }
        self.segments.within(range.clone()).map(|part| part.pages()).collect()
    }

    /// Waits for the content at `range`.
    fn bring(&self, range: &Range<u64>) -> Result<(), PlatformError> {
        let pages = self.pages(range);
        let mut parts = pages.iter().flat_map(|run| self.shown.parts(*run));
        parts.try_for_each(|part| part.resolve()).map_err(|error| unread(&error))
    }
}

impl Process {
    /// Has missing pages of `shown` reported, which has just been mapped: at `files`, where files
    /// are; nowhere if none can be missing.
    pub(super) fn await_content(
        &mut self,
        shown: &MappedImage,
        segments: &Segments,
        files: Vec<Range<u64>>,
    ) -> Result<(), PlatformError> {
        let Some(track) = self.track.as_mut().filter(|_| !files.is_empty()) else { return Ok(()) };
        track.await_content(files)?;
        let (shown, pages) = (shown.clone(), segments.pages());
        self.coming = Some(PendingContent { shown, pages, segments: segments.clone() });
        Ok(())
    }

    /// `image` for another mapping, with its missing content, if the process shows it.
    pub(crate) fn with_missing_content(&self, image: &Image) -> Result<MappedImage, PlatformError> {
        match self.coming.as_ref().filter(|coming| coming.shown.is_coming_of(image)) {
            Some(coming) => Ok(coming.shown.clone()),
            None => MappedImage::new(image),
        }
    }

    /// Notes writes and fetches missing pages while the guest waits for them.
    pub(super) fn serve_faults(&mut self) -> Result<(), PlatformError> {
        let Some(track) = &mut self.track else { return Ok(()) };
        while let Some(page) = track.serve()? {
            if let Some(coming) = &self.coming {
                coming.bring(&(page..page + PAGE))?;
            }
            track.wake(&(page..page + PAGE))?;
        }
        Ok(())
    }

    /// Waits for missing content of `len` bytes at `address`, which the kernel is about to read or
    /// write for the sentry.
    pub(super) fn bring(&self, address: u64, len: u64) -> Result<(), PlatformError> {
        let Some(coming) = &self.coming else { return Ok(()) };
        let end = address.saturating_add(len).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        coming.bring(&(address & !(PAGE - 1)..end))
    }

    /// Looks whether all content has come, while the guest waits in the stub.
    pub(crate) fn look_for_content(&mut self) {
        if self.coming.as_ref().is_some_and(|coming| !coming.shown.is_coming()) {
            self.coming = None;
            self.track.iter_mut().for_each(super::write_tracker::WriteTracker::is_filled);
        }
    }
}
