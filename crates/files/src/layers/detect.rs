//! The kind of layer at a path.

use std::path::Path;

use crate::error::LayerError;
use crate::layers::image::OciImage;
use crate::layers::item::LayerLimits;
use crate::layers::layer::Layer;
use crate::layers::zip;

impl Layer {
    /// Opens `path`: the layout of an OCI image, another directory, a zip, or a tar, compressed or
    /// not.
    ///
    /// # Errors
    /// [`LayerError`].
    pub fn open(path: impl AsRef<Path>, limits: &LayerLimits) -> Result<Self, LayerError> {
        let path = path.as_ref();
        if path.join("oci-layout").is_file() {
            Self::image(path, limits)
        } else if path.is_dir() {
            Self::directory(path)
        } else if zip::is_zip(path)? {
            Self::zip(path, limits)
        } else {
            Self::tar(path, limits)
        }
    }

    /// An OCI image in a directory of the OCI layout: the layers of its only image, or of the one
    /// for this machine.
    ///
    /// # Errors
    /// [`LayerError`].
    pub fn image(path: impl AsRef<Path>, limits: &LayerLimits) -> Result<Self, LayerError> {
        Ok(OciImage::open(path, None, limits)?.layer)
    }
}
