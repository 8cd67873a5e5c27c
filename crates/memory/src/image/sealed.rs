//! Images in sealed files, which processes share.
//!
//! The file of an image has its stored pages in the order of [`BackingLayout`], which follows from
//! the runs of pages alone. So the receiver of a file computes the place of each page itself, and
//! the file needs no header.
//!
//! Promises: a file of [`SealedImageFile::build`] holds each page at the place where
//! [`Image::from_sealed`] reads it. The content cannot change under an image. May break it: a
//! sender whose file has other pages. The receiver checks its seals and its length alone.

use afresh_sys::{Advice, HUGE_PAGES, HUGE_SIZE, PAGE_SIZE, SealedMemfd};
use afresh_sys::{Memfd, PageRange, Protection, Reservation, SysError};

use super::Image;
use super::backing::Backing;
use super::build::{check_sorted, read_batches};
use super::layout::BackingLayout;
use crate::ImageError;

/// The place of each run of stored pages in a sealed file.
#[derive(Debug)]
pub struct SealedImageFile {
    pages: usize,
    stored: Vec<PageRange>,
    file_pages: usize,
}

impl SealedImageFile {
    /// The layout for an image of `pages` pages. Those outside of `stored` are zero.
    ///
    /// # Errors
    /// [`ImageError::OutOfBounds`] for runs that are not sorted, disjoint and inside.
    pub fn new(pages: usize, stored: &[PageRange]) -> Result<Self, ImageError> {
        check_sorted(stored, pages)?;
        let stored: Vec<PageRange> = stored.iter().copied().filter(|run| !run.is_empty()).collect();
        let layout = BackingLayout::new(&stored, |_| true);
        let file_pages = layout.places().last().map_or(0, |place| place.end());
        Ok(Self { pages, stored, file_pages })
    }

    /// Length of the file in pages. It takes at most that much memory.
    #[must_use]
    pub fn file_pages(&self) -> usize {
        self.file_pages
    }

    /// Makes the file. `read` puts the pages of a few runs one after the other into bytes.
    ///
    /// # Errors
    /// [`ImageError`] when memory or descriptors ran out, and any error of `read`.
    pub fn build<E: From<ImageError>>(
        &self,
        read: impl FnMut(&[PageRange], &mut [u8]) -> Result<(), E>,
    ) -> Result<SealedMemfd, E> {
        let system = |error: SysError| E::from(ImageError::from(error));
        let file = Memfd::new(c"afresh-shared-image").map_err(system)?;
        file.set_len(self.file_pages * PAGE_SIZE).map_err(system)?;
        let layout = BackingLayout::new(&self.stored, |_| true);
        read_batches(&self.stored, read, |runs, bytes| {
            layout.write(&file, 0, runs, bytes).map_err(system)
        })?;
        self.collapse(&file);
        SealedMemfd::new(file).map_err(system)
    }

    /// Moves the pages to folios of 2 MiB, where the kernel has them: a mapping then takes fewer
    /// faults.
    fn collapse(&self, file: &Memfd) {
        let whole = PageRange::new(0, self.file_pages / HUGE_PAGES * HUGE_PAGES);
        if whole.is_empty() {
            return;
        }
        let Ok(view) = Reservation::aligned(whole.len, HUGE_SIZE) else { return };
        if view.map_shared(whole, Protection::Read, file, 0).is_err() {
            return;
        }
        for number in 0..whole.len / HUGE_PAGES {
            let pages = PageRange::new(number * HUGE_PAGES, HUGE_PAGES);
            // The pages stay as they are after an error.
            let _ = view.advise(pages, Advice::Collapse);
        }
    }
}

impl Image {
    /// The image in a sealed file with this layout.
    ///
    /// # Errors
    /// [`ImageError::System`]: `EINVAL` for a file of another length, `EMFILE` where this process
    /// has many images with separate files, and `ENOMEM`.
    pub fn from_sealed(layout: &SealedImageFile, file: SealedMemfd) -> Result<Image, ImageError> {
        let places = BackingLayout::new(&layout.stored, |_| true);
        if layout.file_pages == 0 {
            return Ok(Image::zero(layout.pages));
        }
        let backing = Backing::from_sealed(file, layout.file_pages, places.places().to_vec())?;
        let extents = places.extents(&backing);
        Ok(Image::from_extents(layout.pages, extents))
    }
}
