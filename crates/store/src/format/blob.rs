//! The bytes of a blob, wherever they are: in a file, on a server, sealed in another blob.

use std::fs::File;
use std::io;

/// Random access to the bytes of a blob, wherever it is.
pub trait BlobRead: Send + Sync {
    /// Length in bytes.
    fn len(&self) -> u64;

    /// Whether the blob is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `out` from `offset` on.
    ///
    /// # Errors
    /// `UnexpectedEof` past the end; anything the medium says.
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()>;

    /// Fills several parts, each from its offset on. A blob that is far away fetches them at the
    /// same time.
    ///
    /// # Errors
    /// As [`BlobRead::read_at`]; nothing of any part may be used then.
    fn read_many(&self, parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        parts.iter_mut().try_for_each(|(offset, out)| self.read_at(out, *offset))
    }

    /// Whether a read costs a round trip, so that few and large ones are better than many and small
    /// ones.
    fn is_distant(&self) -> bool {
        false
    }

    /// Told that `len` bytes at `offset` were wrong: whatever is cached of them is dropped. Returns
    /// whether reading again may bring others.
    fn distrust(&self, offset: u64, len: u64) -> bool {
        let _ = (offset, len);
        false
    }

    /// Whether the blob is unchanged since it was opened, by length and time of change of its file.
    ///
    /// # Errors
    /// One that says that it was changed.
    fn check_unchanged(&self) -> io::Result<()> {
        Ok(())
    }

    /// The blob as it is stored, where this one shows what is inside.
    fn carrier(&self) -> Option<&dyn BlobRead> {
        None
    }

    /// The local file that holds it, and the byte at which it begins there.
    fn file(&self) -> Option<(&File, u64)> {
        None
    }
}

/// A blob in memory.
pub(crate) struct BytesBlob(pub(crate) Vec<u8>);

impl BlobRead for BytesBlob {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        let from = usize::try_from(offset).map_err(io::Error::other)?;
        let part = self.0.get(from..).and_then(|rest| rest.get(..out.len()));
        out.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}
