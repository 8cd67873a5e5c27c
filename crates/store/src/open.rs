//! Opening: manifest, configuration and layer indexes from whatever holds the blobs, each checked
//! before it is used.

use crate::blobs::BlobRead;
use crate::manifest::{Config, MAX_CONFIG, MAX_MANIFEST, Manifest, layer_type, parse};
use crate::{Layer, OpenError, Sha256, Snapshot};

/// Holds blobs: a store's directory, or an archive.
pub(crate) trait Blobs {
    /// Reads a small blob whole, at most `limit` bytes. The caller checks its digest.
    fn read(&self, what: &'static str, digest: Sha256, limit: u64) -> Result<Vec<u8>, OpenError>;

    /// Opens a blob of pages.
    fn open(&self, digest: Sha256) -> Result<Box<dyn BlobRead>, OpenError>;
}

/// Reads a small blob and checks it against its digest.
pub(crate) fn read_small(
    blobs: &dyn Blobs,
    what: &'static str,
    digest: Sha256,
    limit: u64,
) -> Result<Vec<u8>, OpenError> {
    let bytes = blobs.read(what, digest, limit)?;
    if Sha256::of(&bytes) != digest {
        return Err(OpenError::Digest { what, expected: digest });
    }
    Ok(bytes)
}

pub(crate) fn read_manifest(blobs: &dyn Blobs, id: Sha256) -> Result<Manifest, OpenError> {
    let bytes = read_small(blobs, "the manifest", id, MAX_MANIFEST)?;
    let manifest: Manifest = parse("the manifest", &bytes)?;
    manifest.check()?;
    Ok(manifest)
}

/// Opens the snapshot whose manifest has digest `id`.
pub(crate) fn open_snapshot(blobs: &dyn Blobs, id: Sha256) -> Result<Snapshot, OpenError> {
    let manifest = read_manifest(blobs, id)?;
    let config = manifest.config.digest("the manifest")?;
    let config = read_small(blobs, "the configuration", config, MAX_CONFIG)?;
    let config: Config = parse("the configuration", &config)?;
    let layers = manifest.layers.clone();
    Snapshot::assemble(id, manifest, config, |number, root| {
        let descriptor = &layers[number];
        let digest = descriptor.digest("the manifest")?;
        let layer = Layer::from_blob(blobs.open(digest)?, digest, descriptor.size, root)?;
        if descriptor.media_type != layer_type(layer.role(), layer.encoding()) {
            return Err(OpenError::MediaType {
                what: "a layer",
                found: descriptor.media_type.clone(),
            });
        }
        Ok(layer)
    })
}
