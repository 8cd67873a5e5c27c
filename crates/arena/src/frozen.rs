//! An arena's content as an image, and back: what a snapshot holds of it.
//!
//! An arena is zero at every start, so its content is copied in both directions. Memory that starts from
//! an image, and only pays for what a run wrote, is a slot over that image (`afresh_memory::Slot`), which
//! may be one that is still being filled from a snapshot.
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
    /// The content as an image, zero pages left out. Memory that was never touched is not looked at.
    ///
    /// Whoever uses the memory through pointers must be quiet meanwhile.
    ///
    /// # Errors
    /// [`ImageError`] when memory or descriptors ran out, or in a forked child.
    pub fn freeze(&mut self) -> Result<Image, ImageError> {
        if self.is_of_parent() {
            return Err(ImageError::Read(io::Error::other(ArenaError::Forked)));
        }
        let pages = self.pages();
        // SAFETY: the pages are accessible, and the exclusive borrow says that nobody uses them.
        unsafe { Image::zero(pages).derive(pages, &self.present(), self.base()) }
    }

    /// Takes size and content from `image`, waiting for what is not in place yet.
    ///
    /// # Errors
    /// [`ThawError`], which says what became of the arena.
    pub fn thaw(&mut self, image: &Image) -> Result<(), ThawError> {
        image.complete()?;
        self.clear()?;
        let filled = self.grow(image.pages()).and_then(|_| {
            image.stored().try_for_each(|run| {
                self.touch(run)?;
                for page in run.start..run.end() {
                    let Some(content) = image.page(page) else { continue };
                    // SAFETY: the page is accessible and present, and nobody else uses it; the image
                    // is no part of any arena.
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
