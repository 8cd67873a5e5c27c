//! An arena's content in a snapshot: written as an image, and read back.
//!
//! An arena is zero at every start, so its content is copied in both directions. For memory that
//! starts from an image, and only pays for a run's writes, use a slot over that image
//! (`afresh_memory::Slot`), which may still be filling from a snapshot.
//!
//! Promises: a thawed arena has the size and the bytes of the image; one whose thaw failed is empty
//! or as it was.

use std::io;

use afresh_memory::{Image, ImageError};
use afresh_sys::PAGE_SIZE;

use crate::{Arena, ArenaError};

/// Giving an arena the content of an image failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ThawError {
    /// Some of the content will never arrive; the arena is as it was.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The arena cannot hold it; the arena is empty.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

impl Arena {
    /// The content as an image, zero pages left out. Memory that was never touched is not looked
    /// at.
    ///
    /// Code with pointers into the memory must not use it during the call.
    ///
    /// # Errors
    /// [`ImageError`] when memory or descriptors ran out, or in a forked child.
    pub fn freeze(&mut self) -> Result<Image, ImageError> {
        if self.is_of_parent() {
            return Err(ImageError::Read(io::Error::other(ArenaError::Forked)));
        }
        let pages = self.pages();
        // SAFETY: the pages are accessible, and the exclusive borrow excludes other users.
        unsafe { Image::zero(pages).derive(pages, &self.present(), self.base()) }
    }

    /// Takes size and content from `image`, waiting for missing content.
    ///
    /// # Errors
    /// [`ThawError`], which describes the arena's state.
    pub fn thaw(&mut self, image: &Image) -> Result<(), ThawError> {
        image.complete()?;
        self.clear()?;
        let filled = self.grow(image.pages()).and_then(|_| {
            image.stored().try_for_each(|run| {
                self.touch(run)?;
                for page in run.start..run.end() {
                    let Some(content) = image.page(page) else { continue };
                    // SAFETY: the page is accessible and present, and this is its only user; the
                    // image is not part of any arena.
                    unsafe {
                        let at = self.base().add(page * PAGE_SIZE);
                        at.copy_from_nonoverlapping(content.as_ptr(), PAGE_SIZE);
                    }
                }
                Ok(())
            })
        });
        if let Err(error) = filled {
            self.clear()?;
            return Err(error.into());
        }
        Ok(())
    }
}
