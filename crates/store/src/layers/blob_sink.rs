//! Where the blobs of a snapshot are put while it is written: a store's directory, or an archive.

use std::path::Path;

use crate::blobs::file::BlobWriter;
use crate::format::blob::BlobRead;
use crate::{Encoding, Layer, OpenError, SaveError, Sha256};

/// Takes blobs.
pub(crate) trait BlobSink {
    /// Begins a blob. `pages` says, for a page layer, how it is encoded and how many pages its
    /// index space has, from which follows how it is aligned where that matters.
    fn begin(&mut self, pages: Option<(Encoding, u64)>) -> Result<BlobWriter, SaveError>;

    /// Whether several blobs may be written at the same time. Otherwise one is ended before the
    /// next begins.
    fn takes_several(&self) -> bool {
        false
    }

    /// Ends a blob, and returns its digest and length.
    fn end(&mut self, blob: BlobWriter) -> Result<(Sha256, u64), SaveError>;

    /// Ends a blob before others of the same snapshot, and returns its digest and length. It need
    /// not be durable or have its name before the next [`BlobSink::end`].
    fn hold(&mut self, blob: BlobWriter) -> Result<(Sha256, u64), SaveError> {
        self.end(blob)
    }

    /// Adds a layer of another snapshot where it is missing.
    fn keep(&mut self, layer: &Layer) -> Result<(), SaveError>;

    /// Adds the layers of another snapshot that are missing.
    fn keep_all(&mut self, layers: &[Layer]) -> Result<(), SaveError> {
        layers.iter().try_for_each(|layer| self.keep(layer))
    }

    /// Puts a small blob.
    fn put(&mut self, bytes: Vec<u8>) -> Result<(Sha256, u64), SaveError> {
        let mut blob = self.begin(None)?;
        blob.push(bytes)?;
        self.end(blob)
    }
}

/// Copies the blob of a layer to `shelf`, and checks its digest on the way.
pub(crate) fn copy_blob(shelf: &mut dyn BlobSink, layer: &Layer) -> Result<(), SaveError> {
    let pages = layer.key().is_none().then_some((layer.encoding(), layer.index().pages));
    copy_to(shelf, layer.blob(), layer.digest(), pages)
}

/// Copies `from` to `shelf`; it must have the digest `digest`.
pub(crate) fn copy_to(
    shelf: &mut dyn BlobSink,
    from: &dyn BlobRead,
    digest: Sha256,
    pages: Option<(Encoding, u64)>,
) -> Result<(), SaveError> {
    const PART: u64 = 1 << 20;
    let mut blob = shelf.begin(pages)?;
    for at in (0..from.len()).step_by(PART as usize) {
        let mut bytes = blob.buffer(PART.min(from.len() - at) as usize);
        from.read_at(&mut bytes, at)
            .map_err(|e| SaveError::io(Path::new(&digest.to_string()), e))?;
        blob.push(bytes)?;
    }
    if shelf.end(blob)?.0 != digest {
        return Err(OpenError::Digest { what: "a blob", expected: digest }.into());
    }
    Ok(())
}
