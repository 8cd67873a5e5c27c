//! A run of an image as a part of a file, for mappings in other processes.
//!
//! Promises: the file's part never changes during the lifetime of this value or of the image.
//! Descriptors are for reading only, so no process that receives one can write to the pages of an
//! image through it.
//!
//! May break it: a process with the descriptor that may open `/proc/self/fd` as the owner of the
//! file.

use std::os::fd::BorrowedFd;

use afresh_sys::{PageRange, SysError};

use super::{Extent, Image};
use crate::ImageError;

/// A run of image pages, and the part of a file that holds it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ImageFile {
    pub(super) extent: Extent,
    /// Keeps the pages.
    pub(super) image: Image,
}

impl ImageFile {
    /// The pages of the image.
    #[must_use]
    pub fn pages(&self) -> PageRange {
        self.extent.range
    }

    /// A descriptor of the file, for reading. The file can hold the pages of other images: do not
    /// leave it open in an untrusted process.
    ///
    /// # Errors
    /// As [`Memfd::read_only`](afresh_sys::Memfd::read_only).
    pub fn file(&self) -> Result<BorrowedFd<'_>, SysError> {
        self.extent.backing.file().0.read_only()
    }

    /// The first page of the run in the file.
    #[must_use]
    pub fn first(&self) -> usize {
        self.extent.backing.file().1 + self.extent.at
    }

    /// Whether both are in the same file.
    #[must_use]
    pub fn shares_file(&self, other: &ImageFile) -> bool {
        std::ptr::eq(self.extent.backing.file().0, other.extent.backing.file().0)
    }

    /// Whether both show the same part of the same file at the same place.
    #[must_use]
    pub fn same(&self, other: &ImageFile) -> bool {
        self.shares_file(other) && self.first() == other.first() && self.pages() == other.pages()
    }

    /// Waits until the whole run is in place, including zeros between its pages.
    ///
    /// # Errors
    /// [`ImageError::Filler`] with the cause when a page is lost.
    pub fn resolve(&self) -> Result<(), ImageError> {
        self.extent.backing.resolve(PageRange::new(self.extent.at, self.extent.range.len))
    }

    /// The part inside `range`, if any.
    #[must_use]
    pub fn within(&self, range: PageRange) -> Option<ImageFile> {
        let extent = self.extent.clip(range)?;
        Some(ImageFile { extent, image: self.image.clone() })
    }
}
