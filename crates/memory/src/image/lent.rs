//! Parts of borrowed files as images, without a copy.
//!
//! Promises: the lender of a part lives until no image contains any of it, and all images of one
//! part share one view of it. May break it: a change of lent pages.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use afresh_sys::{Memfd, PageRange};

use super::{Backing, Extent, Image};
use crate::ImageError;

/// The owner of a file whose parts are lent.
pub trait FileOwner: fmt::Debug + Send + Sync {
    /// The file.
    fn file(&self) -> &Memfd;

    /// The part: always the same.
    fn part(&self) -> PageRange;
}

/// The state that images of one lent part share. Its owner keeps it.
#[derive(Debug, Default)]
pub struct BorrowedFile {
    backing: Mutex<Weak<Backing>>,
}

impl BorrowedFile {
    /// The pages `range`, counted from the part's first, as an image that shares the file's memory.
    ///
    /// # Safety
    /// As long as `lender` lives nothing writes these pages, or gives their memory back. Others of
    /// the part may be written.
    ///
    /// # Errors
    /// [`ImageError`] when the range is not in the part, or the part cannot be mapped.
    pub unsafe fn image(
        &self,
        lender: &Arc<dyn FileOwner>,
        range: PageRange,
    ) -> Result<Image, ImageError> {
        let part = lender.part();
        super::build::check_sorted(&[range], part.len)?;
        if range.is_empty() {
            return Ok(Image::zero(0));
        }
        let mut shared = self.backing.lock().unwrap_or_else(PoisonError::into_inner);
        let backing = match shared.upgrade() {
            Some(backing) => backing,
            None => {
                let backing = Arc::new(Backing::from_lender(lender.clone())?);
                *shared = Arc::downgrade(&backing);
                backing
            }
        };
        let extent = Extent { range: PageRange::new(0, range.len), backing, at: range.start };
        Ok(Image::from_extents(range.len, vec![extent]))
    }
}
