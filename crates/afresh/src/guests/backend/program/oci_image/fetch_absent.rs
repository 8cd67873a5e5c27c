//! No images out of registries: this build lacks the feature `remote`.

use afresh_files::{LayerLimits, OciImage};
use afresh_store::OpenError;

use crate::{Cause, Options, Reference};

/// The cause that no snapshot was opened in a remote.
pub(super) fn open_error<'a>(_: &'a (dyn std::error::Error + 'static)) -> Option<&'a OpenError> {
    None
}

/// Fetches an image.
pub(super) fn fetch_image(
    reference: &Reference,
    _: &Options,
    _: &LayerLimits,
) -> Result<OciImage, Cause> {
    Err(reference.lacking_remote().into())
}
