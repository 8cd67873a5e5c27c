//! Stores of blobs, and the manifests in them, each checked before it is used.

use std::path::PathBuf;

use serde::Deserialize;

use crate::format::blob::BlobRead;
use crate::format::json::parse;
use crate::format::manifest::{MAX_MANIFEST, Manifest};
use crate::{OpenError, Sha256};

/// Holds blobs: a store's directory, or an archive.
pub(crate) trait Blobs {
    /// Reads a small blob whole, at most `limit` bytes. The caller checks its digest.
    fn read(&self, what: &'static str, digest: Sha256, limit: u64) -> Result<Vec<u8>, OpenError>;

    /// Opens a blob of pages.
    fn open(&self, digest: Sha256) -> Result<Box<dyn BlobRead>, OpenError>;

    /// Where the turns of a session are; `None` where there are never any.
    fn journal(&self, _: &str) -> Option<PathBuf> {
        None
    }
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
    Manifest::parse(&read_small(blobs, "the manifest", id, MAX_MANIFEST)?)
}

/// The artifact type of a manifest; empty for a container image.
pub(crate) fn read_kind(blobs: &dyn Blobs, id: Sha256) -> Result<String, OpenError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Kind {
        #[serde(default)]
        artifact_type: String,
    }
    let bytes = read_small(blobs, "the manifest", id, MAX_MANIFEST)?;
    Ok(parse::<Kind>("the manifest", &bytes)?.artifact_type)
}
