//! Images of containers: their documents and blobs, into a local layout.
//!
//! Promises: each blob has the digest of its name, and the requested size. The reader of the
//! documents chooses the image and its blobs.

use super::{Remote, RemoteError};
use crate::layers::blob_sink::BlobSink;
use crate::{Sha256, Store};

impl Remote {
    /// Fetches the document that `name` means, an index or a manifest of at most 1 MiB, and keeps
    /// it in `local`. `name` is a tag or a digest.
    ///
    /// # Errors
    /// [`RemoteError`] by cause.
    pub fn document(&self, local: &Store, name: &str) -> Result<(Sha256, Vec<u8>), RemoteError> {
        let (id, bytes) = self.block_on(self.document_of(name))?;
        local.stage()?.put(bytes.clone())?;
        Ok((id, bytes))
    }

    /// Fetches a blob of `size` bytes and keeps it in `local`, unless it is there.
    ///
    /// # Errors
    /// [`RemoteError`] by cause: also for a blob of another size or digest, which does not appear
    /// then.
    pub fn fetch(&self, local: &Store, digest: Sha256, size: u64) -> Result<(), RemoteError> {
        let mut staging = local.stage()?;
        if staging.has(digest, size)? {
            return Ok(());
        }
        self.block_on(self.download(&mut staging, digest, size, &mut |_| {}))
    }
}
