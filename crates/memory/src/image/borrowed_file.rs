//! Parts of borrowed files as images, without a copy.
//!
//! Promises: the lender of a part lives until no image contains any of it, and all images of one
//! part share one view of it. May break it: a change of borrowed pages.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use afresh_sys::{PageRange, PerProcess};

use super::{Backing, Extent, FileOwner, Image};
use crate::ImageError;

/// The state that images of one borrowed part share. Its owner keeps it.
///
/// A child of a fork makes its own views: a thread of its parent may hold the lock.
#[derive(Debug)]
pub struct BorrowedFile {
    backing: PerProcess<Mutex<Weak<Backing>>>,
}

impl Default for BorrowedFile {
    fn default() -> Self {
        Self { backing: PerProcess::new(Mutex::default) }
    }
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
        let mut shared = self.backing.get().lock().unwrap_or_else(PoisonError::into_inner);
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

#[cfg(all(test, not(miri)))]
mod tests {
    use afresh_sys::{Memfd, PAGE_SIZE, child_passes};

    use super::*;

    #[derive(Debug)]
    struct Owner {
        file: Memfd,
        borrowed: BorrowedFile,
    }

    impl FileOwner for Owner {
        fn file(&self) -> &Memfd {
            &self.file
        }

        fn part(&self) -> PageRange {
            PageRange::new(0, 2)
        }
    }

    #[test]
    fn a_child_waits_for_no_lender_of_its_parent() {
        let file = Memfd::new(c"afresh-test").unwrap();
        file.set_len(2 * PAGE_SIZE).unwrap();
        file.write_at(&[7; PAGE_SIZE], PAGE_SIZE).unwrap();
        let owner = Arc::new(Owner { file, borrowed: BorrowedFile::default() });
        let lender: Arc<dyn FileOwner> = owner.clone();
        // SAFETY: nothing writes the file from here on.
        let lend = || unsafe { owner.borrowed.image(&lender, PageRange::new(1, 1)) };
        let before = lend().unwrap();
        // As if another thread were mapping the part during the fork.
        let held = owner.borrowed.backing.get().lock().unwrap();
        assert!(child_passes(|| lend().is_ok_and(|image| image.page_is(0, &[7; PAGE_SIZE]))));
        drop(held);
        assert!(before.page_is(0, &[7; PAGE_SIZE]));
    }
}
