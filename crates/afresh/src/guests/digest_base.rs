//! The digest of a warm state, from which the digests of all other states are computed.

use afresh_memory::{Image, ImageError};
use afresh_pager::StateSum;

/// The sum over a warm state, and its pages.
#[derive(Debug)]
pub(crate) struct DigestBase {
    image: Image,
    sum: StateSum,
}

impl DigestBase {
    /// Reads all pages of the warm state.
    pub(super) fn new(image: Image) -> Result<Self, ImageError> {
        let sum = StateSum::of(&image)?;
        Ok(Self { image, sum })
    }

    /// The digest of a state. It costs the pages that differ from the warm ones.
    pub(super) fn digest(&self, image: &Image, state: &[u8]) -> Result<[u8; 32], ImageError> {
        let sum = self.sum.moved(&self.image, image)?;
        Ok(sum.digest(image.pages(), state))
    }
}
