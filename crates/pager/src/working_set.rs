//! Putting the working set of a lazily filled image in place.
//!
//! Promises: only pages that the image stores are put, so zeros of a set take no memory. While
//! slots use the image, only claimed pages are put. No other thread puts these, and the kernel adds
//! no page of zeros there.
//!
//! May break it: a source that passes on other bytes than it checked.

use std::sync::atomic::Ordering;

use afresh_memory::Inserter;
use afresh_sys::{PAGE_SIZE, PageRange};

use crate::SourceError;
use crate::lazy::{Fill, LazyMemory, put_missing};

/// The bytes of `part`, a part of `run`.
fn bytes_of(part: PageRange, run: PageRange, bytes: &[u8]) -> Result<&[u8], SourceError> {
    let from = (part.start - run.start) * PAGE_SIZE;
    let pages = bytes.len() / PAGE_SIZE;
    bytes.get(from..from + part.byte_len()).ok_or(SourceError::TooShort { pages, wanted: run.len })
}

/// Puts those pages of `run` in place that the image stores. No slot uses the image yet.
pub(crate) fn put_set(
    inserter: &Inserter,
    run: PageRange,
    bytes: &[u8],
) -> Result<(), SourceError> {
    let filled = inserter.filled();
    let first = filled.partition_point(|filled| filled.end() <= run.start);
    let parts = filled[first..].iter().map_while(|filled| filled.intersect(run));
    parts
        .into_iter()
        .try_for_each(|part| put_missing(inserter, part.start, bytes_of(part, run, bytes)?))
}

impl LazyMemory {
    /// Fills the windows of the working set, each of one page, or fails the image.
    pub(crate) fn fill_working_set(&self) {
        let Fill::Insert(inserter) = &self.fill else { return };
        if self.set.is_empty() {
            return;
        }
        // Windows up to this one in the list are present.
        let mut next = 0;
        let read = self.source.read_working_set(&mut |run, bytes| {
            if self.control.stop.load(Ordering::Acquire) {
                return Err(SourceError::Io(std::io::ErrorKind::Interrupted.into()));
            }
            // Both are in the order of addresses.
            while let Some(window) = self.set.get(next).copied().filter(|next| *next < run.end()) {
                if !run.contains(window) {
                    // The source left it out.
                    self.fill(self.pages_of(window))?;
                    self.publish_claimed(window);
                    next += 1;
                    continue;
                }
                let claimed = self.set[next..].iter().zip(window..run.end());
                let claimed = claimed.take_while(|(claimed, page)| *claimed == page).count();
                let part = PageRange::new(window, claimed);
                put_missing(inserter, window, bytes_of(part, run, bytes)?)?;
                (part.start..part.end()).for_each(|window| self.publish_claimed(window));
                next += claimed;
            }
            Ok(())
        });
        let rest = read.and_then(|()| {
            self.set[next..].iter().try_for_each(|window| {
                self.fill(self.pages_of(*window))?;
                self.publish_claimed(*window);
                Ok(())
            })
        });
        // An image that was dropped or has failed keeps that cause.
        if let Err(error) = rest
            && !self.control.stop.load(Ordering::Acquire)
        {
            self.control.fail(&error);
        }
    }
}
