//! Taking a slot's content: its differences from the image, and an image of it.

use afresh_sys::PageRange;

use super::Slot;
use crate::{Image, ImageError};

impl Slot {
    /// The slot's content as an image, which shares unwritten pages with the present image. With a
    /// tracker it costs the changes, and without one a full capture. The slot keeps its image.
    ///
    /// # Errors
    /// [`ImageError`]; a failure of the tracker quarantines the slot.
    pub fn freeze(&mut self) -> Result<Image, ImageError> {
        Ok(self.capture()?.0)
    }

    /// As [`Slot::freeze`], sharing nothing: the whole content in one separate file, each page
    /// copied once. For an image that many slots will use.
    ///
    /// # Errors
    /// As [`Slot::freeze`].
    pub fn freeze_apart(&mut self) -> Result<Image, ImageError> {
        let changed = self.differing()?;
        // SAFETY: the runs are accessible pages of this slot, and `&mut self` excludes a running
        // guest.
        unsafe { self.image.derive_apart(self.space.end, &changed, self.base()) }
    }

    /// The pages whose content differs from the image, and pages of a growth that are not zero.
    /// With a tracker it compares the write set, and without one all pages.
    ///
    /// # Errors
    /// As [`Slot::freeze`].
    pub fn differing(&mut self) -> Result<Vec<PageRange>, ImageError> {
        self.settle_or_refuse()?;
        let runs = if self.learns() {
            let before = self.write_set.len();
            self.learn_written()?;
            if self.write_set.len() > before {
                self.plan()?;
            }
            self.captured_runs()
        } else {
            self.image.complete()?;
            self.space.accessible().collect()
        };
        Ok(self.changed(&runs))
    }

    /// The slot's content as an image, and the pages in which it differs from the present one.
    pub(super) fn capture(&mut self) -> Result<(Image, Vec<PageRange>), ImageError> {
        let changed = self.differing()?;
        let base = self.base();
        if changed.is_empty() && self.space.end == self.image.pages() {
            return Ok((self.image.clone(), changed));
        }
        // SAFETY: the runs are accessible pages of this slot, and `&mut self` excludes a running
        // guest.
        let image = unsafe { self.image.derive(self.space.end, &changed, base)? };
        Ok((image, changed))
    }
}
