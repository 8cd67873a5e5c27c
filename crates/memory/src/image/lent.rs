//! Parts of a file of somebody else's as images, without a copy.
//!
//! Promises: whoever lends a part lives as long as an image shows any of it, and all images of one part share one view of it. May break
//! it: whoever changes pages that are lent.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use afresh_sys::{Memfd, PageRange};

use super::{Backing, Extent, Image};
use crate::ImageError;

/// Who owns a file of which a part is lent.
pub trait FileOwner: fmt::Debug + Send + Sync {
    /// The file.
    fn file(&self) -> &Memfd;

    /// The part: always the same.
    fn part(&self) -> PageRange;
}

/// What images show of one lent part. Its owner keeps it.
#[derive(Debug, Default)]
pub struct BorrowedFile {
    backing: Mutex<Weak<Backing>>,
}

impl BorrowedFile {
    /// The pages `range`, counted from the part's first, as an image that shares the file's memory.
    ///
    /// # Safety
    /// As long as `lender` lives nothing writes these pages, or gives their memory back. Others of the part may be written.
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
                let backing = Arc::new(Backing::lent(lender.clone())?);
                *shared = Arc::downgrade(&backing);
                backing
            }
        };
        let extent = Extent { range: PageRange::new(0, range.len), backing, at: range.start };
        Ok(Image::from_extents(range.len, vec![extent]))
    }
}
