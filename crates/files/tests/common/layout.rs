//! OCI image layouts with any layers.

use std::path::Path;

use afresh_files::{LayerError, LayerLimits, OciImage};
use sha2::{Digest, Sha256};

/// A directory of the OCI layout, blob by blob.
pub(crate) struct Layout(tempfile::TempDir);

impl Layout {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("blobs/sha256")).unwrap();
        std::fs::write(directory.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)
            .unwrap();
        Self(directory)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Stores a blob and returns its descriptor. `more` is appended to the descriptor.
    pub(crate) fn put(&self, media: &str, bytes: &[u8], more: &str) -> String {
        let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        std::fs::write(self.path().join("blobs/sha256").join(&hex), bytes).unwrap();
        let size = bytes.len();
        format!(r#"{{"mediaType":"{media}","digest":"sha256:{hex}","size":{size}{more}}}"#)
    }

    /// Stores an image and returns its descriptor.
    pub(crate) fn image(&self, layers: &[Vec<u8>], config: &str, more: &str) -> String {
        let media = "application/vnd.oci.image.layer.v1.tar";
        let layers: Vec<_> = layers.iter().map(|layer| self.put(media, layer, "")).collect();
        let config = self.put("application/vnd.oci.image.config.v1+json", config.as_bytes(), "");
        let manifest =
            format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{}]}}"#, layers.join(","));
        self.put("application/vnd.oci.image.manifest.v1+json", manifest.as_bytes(), more)
    }

    pub(crate) fn index(&self, images: &[String]) {
        let index = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, images.join(","));
        std::fs::write(self.path().join("index.json"), index).unwrap();
    }

    pub(crate) fn open(&self, name: Option<&str>) -> Result<OciImage, LayerError> {
        OciImage::open(self.path(), name, &LayerLimits::default())
    }

    pub(crate) fn open_within(&self, limits: &LayerLimits) -> Result<OciImage, LayerError> {
        OciImage::open(self.path(), None, limits)
    }
}
