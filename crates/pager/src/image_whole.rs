//! Images from a page source, read whole before their first use.
//!
//! It takes the place of the filling behind the guests' backs where pages that are missing cannot
//! be noticed: on systems other than Linux, and in portable builds.
//!
//! Promises: every page was checked against its digest before the image exists, and nothing of the
//! source is held afterwards.

use std::sync::Arc;
use std::time::Duration;

use afresh_memory::{Image, ImageBuilder};
use afresh_sys::{PAGE_SIZE, PageRange};

use crate::{Options, PageSource, RestoreError, SourceError};

/// Pages that are read at a time.
const PART: usize = 256;

/// An image that was read from a source.
#[derive(Clone, Debug)]
pub struct LazyImage {
    image: Image,
}

impl LazyImage {
    /// Reads all pages of `source`. No option has an effect here.
    ///
    /// # Errors
    /// [`RestoreError`] when the source is damaged or memory runs out.
    pub fn start(source: Arc<dyn PageSource>, _: &Options) -> Result<Self, RestoreError> {
        let mut builder = ImageBuilder::new(source.pages());
        let mut bytes = Vec::new();
        for run in source.occupied() {
            if run.start.checked_add(run.len).is_none_or(|end| end > source.pages()) {
                let (pages, wanted) = (source.pages(), run.start.saturating_add(run.len));
                return Err(SourceError::TooShort { pages, wanted }.into());
            }
            for first in (run.start..run.end()).step_by(PART) {
                let part = PageRange::new(first, PART.min(run.end() - first));
                bytes.resize(part.byte_len(), 0);
                // SAFETY: the vector is ours, and has the length of the part.
                unsafe { source.read(part.start, bytes.as_mut_ptr(), part.len) }?;
                builder.segment(part.start * PAGE_SIZE, &bytes)?;
            }
        }
        Ok(Self { image: builder.build()? })
    }

    /// Always fails: the pages that a guest touches cannot be noticed.
    ///
    /// # Errors
    /// [`RestoreError::Unsupported`].
    pub fn record(_: Arc<dyn PageSource>) -> Result<Self, RestoreError> {
        Err(RestoreError::Unsupported {
            strategy: "record",
            why: "only Linux's userfaultfd notices the pages that a guest touches; record the \
                  working set on Linux"
                .to_owned(),
        })
    }

    /// The image.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Nothing: all pages are in place.
    #[must_use]
    pub fn touched(&self) -> Vec<PageRange> {
        Vec::new()
    }

    /// None: no page was missing.
    #[must_use]
    pub fn faults(&self) -> usize {
        0
    }

    /// None: the pages are not moved.
    #[must_use]
    pub fn huge_folios(&self) -> usize {
        0
    }

    /// Returns at once.
    ///
    /// # Errors
    /// None.
    pub fn wait(&self, _: Duration) -> Result<(), RestoreError> {
        Ok(())
    }
}
