//! A blob on the other side of the network, read by ranges.

use std::io;

use object_store::ObjectStoreExt;

use super::{Remote, RemoteError};
use crate::Sha256;
use crate::blobs::BlobRead;

/// A blob of a remote.
pub(super) struct RangeBlob {
    remote: Remote,
    digest: Sha256,
    len: u64,
}

impl RangeBlob {
    pub(super) fn new(remote: Remote, digest: Sha256, len: u64) -> Self {
        Self { remote, digest, len }
    }
}

impl Remote {
    /// Fetches `len` bytes at `offset`, and tries again when fewer come.
    pub(super) async fn get_range(
        &self,
        digest: Sha256,
        offset: u64,
        len: u64,
    ) -> Result<Vec<u8>, RemoteError> {
        let path = self.blob_path(digest);
        let what = digest.to_string();
        let mut rounds = 0;
        loop {
            let bytes = self
                .attempt(&what, || self.0.objects.get_range(&path, offset..offset + len))
                .await?;
            if bytes.len() as u64 == len {
                return Ok(bytes.into());
            }
            rounds += 1;
            if rounds >= self.0.patience.attempts {
                let found = bytes.len() as u64;
                return Err(RemoteError::Length { what, found, wanted: len });
            }
        }
    }
}

impl BlobRead for RangeBlob {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let bytes = self
            .remote
            .block_on(self.remote.get_range(self.digest, offset, out.len() as u64))
            .map_err(io::Error::other)?;
        out.copy_from_slice(&bytes);
        Ok(())
    }
}
