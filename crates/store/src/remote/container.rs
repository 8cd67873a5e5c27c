//! Images of containers: their documents and blobs, into a local layout.
//!
//! What it promises: what is put there has the digest that it lies under, and the size that was asked for. Which blobs
//! belong to an image, and which image is meant, is for whoever reads the documents.

use super::{Remote, RemoteError};
use crate::{Sha256, Store};

impl Remote {
    /// Fetches the document that `name` means, an index or a manifest of at most 1 MiB, and keeps it in `local`. `name` is a
    /// tag or a digest.
    ///
    /// # Errors
    /// [`RemoteError`] by cause.
    pub fn document(&self, local: &Store, name: &str) -> Result<(Sha256, Vec<u8>), RemoteError> {
        let _lock = local.lock_blobs()?;
        let (id, bytes) = self.block_on(self.document_of(name))?;
        local.write_blob(bytes.clone())?;
        Ok((id, bytes))
    }

    /// Fetches a blob of `size` bytes and keeps it in `local`, unless it is there.
    ///
    /// # Errors
    /// [`RemoteError`] by cause: also for a blob of another size or digest, which does not appear then.
    pub fn fetch(&self, local: &Store, digest: Sha256, size: u64) -> Result<(), RemoteError> {
        let _lock = local.lock_blobs()?;
        if std::fs::metadata(local.blob_path(digest)).is_ok_and(|meta| meta.len() == size) {
            return Ok(());
        }
        self.block_on(self.download(local, digest, size, &mut |_| {}))
    }
}
