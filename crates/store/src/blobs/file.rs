//! Content-addressed files: written under a temporary name, made durable, renamed to their digest.
//!
//! A blob exists under its digest only once all of it is on disk. A writer that is dropped or
//! killed before [`BlobWriter::place`] leaves at most a temporary file, which `gc` removes.
//!
//! The files of a snapshot are made durable together ([`BlobWriter::finish`], then
//! [`BlobWriter::sync`]): the disk begins to write each of them, and only then is the first one
//! synced. `sync_file_range` allocates the blocks of a file and starts its writes. So the blocks of
//! all files are in the present transaction of ext4, or in the log of XFS, when the first `fsync`
//! commits it. That commit is the expensive part, and the `fsync` of each other file mostly finds
//! it done.
//! Nothing depends on it: each file has its own `fsync`, which returns when the file is durable,
//! before the file gets its name.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
#[cfg(unix)]
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use afresh_sys::crash::{point, synced};
#[cfg(unix)]
use afresh_sys::file::{begin_writing, reserve};
use tempfile::TempPath;

use crate::disk::hashing::BlobHash;
use crate::disk::os::{FileExt, open_regular, set_mode};
use crate::disk::temporary::{self, readers};
use crate::format::blob::BlobRead;
use crate::seal::{SealKey, Sealer};
use crate::{OpenError, SaveError, Sha256};

/// Opens for reading, refusing links and pipes: a store never contains any.
pub(crate) fn open_file(path: &Path) -> io::Result<File> {
    open_regular(path, OpenOptions::new().read(true))
}

/// Reads a small file whole, at most `limit` bytes.
pub(crate) fn read_bounded(
    path: &Path,
    what: &'static str,
    limit: u64,
) -> Result<Vec<u8>, OpenError> {
    let io = |e| OpenError::io(path, e);
    let file = open_file(path).map_err(io)?;
    let size = file.metadata().map_err(io)?.len();
    if size > limit {
        return Err(OpenError::TooLarge { what, size, limit });
    }
    let mut bytes = Vec::with_capacity(size as usize);
    file.take(limit + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(OpenError::TooLarge { what, size: bytes.len() as u64, limit });
    }
    Ok(bytes)
}

/// A blob in a local file: all of it, or a part of an archive.
#[derive(Debug)]
pub(crate) struct FileBlob {
    file: Arc<File>,
    start: u64,
    len: u64,
    /// Length and time of the last change of the file; `None` where they are unknown.
    state: Option<(u64, SystemTime)>,
}

/// Length and time of the last change; without times there is nothing to compare.
fn state(file: &File) -> Option<(u64, SystemTime)> {
    let metadata = file.metadata().ok()?;
    Some((metadata.len(), metadata.modified().ok()?))
}

impl FileBlob {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = open_file(path)?;
        let len = file.metadata()?.len();
        Ok(Self::part(Arc::new(file), 0, len))
    }

    /// The `len` bytes from `start` on, which the caller knows to be within the file.
    pub(crate) fn part(file: Arc<File>, start: u64, len: u64) -> Self {
        let state = state(&file);
        Self { file, start, len, state }
    }
}

impl BlobRead for FileBlob {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.read_exact_at(out, self.start + offset)
    }

    fn check_unchanged(&self) -> io::Result<()> {
        if self.state.is_some() && state(&self.file) != self.state {
            return Err(io::Error::other("the file was changed after it was opened"));
        }
        Ok(())
    }

    fn file(&self) -> Option<(&File, u64)> {
        Some((&self.file, self.start))
    }
}

/// Writes a blob. Another thread hashes a large one, also bytes that are being written, because the
/// hash takes longer than all other work. Or the writer hashes it. The disk begins to write while
/// more is pushed.
pub(crate) struct BlobWriter {
    target: Target,
    file: File,
    len: u64,
    /// Bytes pushed since the last request to write to the disk.
    unsent: usize,
    /// Bytes that the blob may have, as far as its blocks are allocated ahead, and those that are.
    expected: u64,
    reserved: u64,
    /// The time of the first write.
    began: Option<Instant>,
    /// Encrypts what is pushed.
    sealer: Option<Sealer>,
    hashing: BlobHash,
    /// The digest, once all bytes are written.
    digest: Option<Sha256>,
    /// Whether the bytes of a separate file are durable.
    is_durable: bool,
}

/// Where a blob is written.
enum Target {
    /// A separate file in this directory, under a temporary name until it is whole; `None` then.
    Own { dir: PathBuf, temporary: Option<TempPath> },
    /// A part of a larger file, whose writer makes it durable and gives it its name.
    Part(PathBuf),
}

fn target_path(target: &Target) -> &Path {
    match target {
        Target::Own { temporary: Some(temporary), .. } => temporary,
        Target::Own { dir, .. } => dir,
        Target::Part(path) => path,
    }
}

/// Bytes between requests to write to the disk, so that little is left for the fsync at the end.
const WRITE_BEHIND: usize = 8 << 20;
/// Bytes whose blocks are allocated at a time. More than one writer may have so many too many, on a
/// disk that is almost full.
const RESERVE: u64 = 32 << 20;

impl BlobWriter {
    /// Writes to a file in `dir`, with a temporary name that begins with `prefix`.
    pub(crate) fn create(dir: &Path, prefix: &str) -> Result<Self, SaveError> {
        let file = temporary::create_named(dir, prefix.as_ref());
        let file = file.map_err(|e| SaveError::io(dir, e))?;
        let (file, temporary) = file.into_parts();
        Ok(Self::new(Target::Own { dir: dir.to_owned(), temporary: Some(temporary) }, file))
    }

    /// Writes at the position of `file`, whose name is `path`.
    pub(crate) fn part(file: File, path: &Path) -> Self {
        Self::new(Target::Part(path.to_owned()), file)
    }

    fn new(target: Target, file: File) -> Self {
        let hashing = BlobHash::new();
        Self {
            target,
            file,
            len: 0,
            unsent: 0,
            expected: 0,
            reserved: 0,
            began: None,
            sealer: None,
            hashing,
            digest: None,
            is_durable: false,
        }
    }

    /// Hashes this blob and `other`, to which nothing was pushed yet, in one thread: they are
    /// written at the same time. Where no thread can be started, each writer hashes its blob.
    pub(crate) fn hash_together(&mut self, other: &mut Self) {
        let apart = |_| [BlobHash::of_writer(), BlobHash::of_writer()];
        [self.hashing, other.hashing] = BlobHash::pair().unwrap_or_else(apart);
    }

    /// Hashes this blob, and `other` if there is one, in the thread that writes them by turns.
    /// Nothing was pushed to them yet.
    pub(crate) fn hash_here(&mut self, other: Option<&mut Self>) {
        match other {
            None => self.hashing = BlobHash::of_writer(),
            Some(other) => [self.hashing, other.hashing] = BlobHash::lanes(),
        }
    }

    /// Allocates blocks ahead for a separate file of up to `len` bytes, where that makes writes
    /// cheaper.
    pub(crate) fn expect(&mut self, len: u64) {
        if let Target::Own { .. } = self.target
            && len >= RESERVE
        {
            self.expected = len;
        }
    }

    /// Allocates the next blocks, before `len` bytes are written.
    fn reserve(&mut self, len: usize) {
        if self.len + len as u64 <= self.reserved || self.reserved >= self.expected {
            return;
        }
        let next = self.expected.min(self.reserved + RESERVE);
        // A hint. A write that finds no room reports it.
        #[cfg(unix)]
        if reserve(self.file.as_fd(), self.reserved, next - self.reserved).is_err() {
            self.expected = 0;
        }
        self.reserved = next;
    }

    /// Returns blocks that were allocated and not written.
    fn release_rest(&mut self) -> Result<(), SaveError> {
        if self.reserved > self.len {
            self.reserved = 0;
            self.file.set_len(self.len).map_err(|e| SaveError::io(self.path(), e))?;
        }
        Ok(())
    }

    fn path(&self) -> &Path {
        target_path(&self.target)
    }

    /// A buffer of `len` bytes, reused when one came back. It holds anything.
    pub(crate) fn buffer(&mut self, len: usize) -> Vec<u8> {
        let mut buffer = self.hashing.recycled();
        if buffer.capacity() < len {
            // The kernel's pages are zero already.
            return vec![0; len];
        }
        buffer.resize(len, 0);
        buffer
    }

    /// Seals the blob with `key`, if there is one. Nothing was pushed yet.
    pub(crate) fn sealed(mut self, key: Option<&SealKey>) -> Result<Self, SaveError> {
        self.sealer = key.map(SealKey::sealer).transpose()?;
        Ok(self)
    }

    /// Appends bytes.
    pub(crate) fn push(&mut self, bytes: Vec<u8>) -> Result<(), SaveError> {
        let Some(sealer) = &mut self.sealer else { return self.write(bytes) };
        let mut out = self.hashing.recycled();
        out.clear();
        sealer.push(&bytes, &mut out)?;
        self.write(out)
    }

    /// Appends bytes as they are stored.
    fn write(&mut self, bytes: Vec<u8>) -> Result<(), SaveError> {
        let bytes = Arc::new(bytes);
        if !self.hashing.push(bytes.clone()) {
            return Err(self.ended());
        }
        self.began.get_or_insert_with(Instant::now);
        self.reserve(bytes.len());
        point();
        self.file.write_all(&bytes).map_err(|e| SaveError::io(self.path(), e))?;
        self.len += bytes.len() as u64;
        self.unsent += bytes.len();
        if self.unsent >= WRITE_BEHIND {
            self.unsent = 0;
            self.begin_writing();
        }
        Ok(())
    }

    /// Has the disk begin to write. A hint: without it, the fsync at the end does all of the work,
    /// and reports errors.
    fn begin_writing(&self) {
        #[cfg(unix)]
        let _ = begin_writing(self.file.as_fd());
    }

    /// When its first bytes were written, if any were.
    pub(crate) fn began(&self) -> Option<Instant> {
        self.began
    }

    fn ended(&self) -> SaveError {
        SaveError::io(self.path(), io::Error::other("the hashing thread has ended"))
    }

    /// Writes the end of a sealed blob.
    fn write_end(&mut self) -> Result<(), SaveError> {
        if let Some(sealer) = self.sealer.take() {
            let mut end = self.buffer(0);
            sealer.finish(&mut end)?;
            self.write(end)?;
        }
        self.hashing.close();
        self.release_rest()
    }

    /// Digest and length of a blob whose bytes are all written.
    fn digest(&mut self) -> Result<(Sha256, u64), SaveError> {
        let digest = match self.digest {
            Some(digest) => digest,
            None => self.hashing.finish().ok_or_else(|| self.ended())?,
        };
        self.digest = Some(digest);
        Ok((digest, self.len))
    }

    /// Ends the blob, and returns digest and length. The disk begins to write a separate file,
    /// which is durable after [`BlobWriter::sync`].
    pub(crate) fn finish(&mut self) -> Result<(Sha256, u64), SaveError> {
        if self.digest.is_none() {
            self.write_end()?;
            if let Target::Own { .. } = self.target {
                self.begin_writing();
            }
        }
        self.digest()
    }

    /// Makes the bytes of a separate file durable.
    pub(crate) fn sync(&mut self) -> Result<(), SaveError> {
        if let (Target::Own { .. }, false) = (&self.target, self.is_durable) {
            point();
            self.file.sync_all().map_err(|e| SaveError::io(self.path(), e))?;
            synced(&self.file);
            self.is_durable = true;
        }
        Ok(())
    }

    /// Ends the blob, whose own file is durable then, and returns digest and length.
    /// A blob that is closed stays so.
    pub(crate) fn close(&mut self) -> Result<(Sha256, u64), SaveError> {
        if self.digest.is_none() {
            self.write_end()?;
        }
        self.sync()?;
        self.digest()
    }

    /// Renames the file of a closed blob to its digest; the caller syncs the directory once for all
    /// blobs.
    pub(crate) fn place(&mut self, digest: Sha256) -> Result<(), SaveError> {
        let Target::Own { dir, temporary } = &mut self.target else { return Ok(()) };
        let Some(temporary) = temporary.take() else { return Ok(()) };
        let path = dir.join(digest.hex());
        point();
        set_mode(&self.file, readers(dir))
            .and_then(|()| temporary.persist(&path).map_err(|e| e.error))
            .map_err(|e| SaveError::io(&path, e))
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_blob_that_is_shorter_than_expected_keeps_no_blocks_beyond_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let mut blob = BlobWriter::create(dir.path(), "test-").unwrap();
        blob.expect(3 * RESERVE);
        for part in 0..3 {
            blob.push(vec![part; RESERVE as usize / 2]).unwrap();
        }
        blob.push(vec![7; 10]).unwrap();
        let (digest, len) = blob.close().unwrap();
        assert_eq!(len, 3 * RESERVE / 2 + 10);
        blob.place(digest).unwrap();
        let meta = std::fs::metadata(dir.path().join(digest.hex())).unwrap();
        assert_eq!(meta.len(), len);
        let blocks = meta.blocks() * 512;
        assert!(blocks < len + (1 << 20), "{blocks} bytes in blocks for {len}");
    }
}
