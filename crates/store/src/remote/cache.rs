//! A cache of remote blobs on local disk, shared by every process that names the same directory.
//!
//! A blob has one file, divided into blocks; each block is stored with a digest of its own. A block that is
//! missing, torn by a crash, or damaged does not match and is fetched again, so nothing needs to be
//! locked, ordered or made durable, and a bad cache can cost time but never yield wrong bytes.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::Sha256;

/// Bytes of a blob in a block.
pub(super) const BLOCK: u64 = 256 << 10;
/// What precedes a block in the file: the digest of number, length and bytes.
const HEADER: u64 = 32;
const CONTEXT: &str = "afresh 2026-11 remote cache block version 1";
const SUFFIX: &str = "blocks";

/// The cached blocks of one blob.
#[derive(Debug)]
pub(super) struct CacheFile {
    file: File,
    blob_len: u64,
}

fn digest(number: u64, bytes: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    hasher.update(&number.to_le_bytes());
    hasher.update(bytes);
    hasher.finalize().into()
}

impl CacheFile {
    pub(super) fn open(dir: &Path, blob: Sha256, blob_len: u64) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let path = dir.join(format!("{}.{SUFFIX}", blob.hex()));
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        Ok(Self { file, blob_len })
    }

    /// Length of block `number`; the last one is shorter.
    pub(super) fn block_len(&self, number: u64) -> u64 {
        BLOCK.min(self.blob_len - number * BLOCK)
    }

    /// The block, if it is there and whole.
    pub(super) fn get(&self, number: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![0; (HEADER + self.block_len(number)) as usize];
        self.file.read_exact_at(&mut bytes, number * (HEADER + BLOCK)).ok()?;
        let block = bytes.split_off(HEADER as usize);
        (bytes == digest(number, &block)).then_some(block)
    }

    /// Keeps a block, if the disk allows.
    pub(super) fn put(&self, number: u64, block: &[u8]) {
        let mut bytes = digest(number, block).to_vec();
        bytes.extend_from_slice(block);
        // A full disk leaves a torn block, which is fetched again.
        let _ = self.file.write_all_at(&bytes, number * (HEADER + BLOCK));
    }
}

impl CacheFile {
    /// Length of the blob.
    pub(super) fn blob_len(&self) -> u64 {
        self.blob_len
    }

    /// The whole blob, if every block of it is there. For small ones.
    pub(super) fn whole(&self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for number in 0..self.blob_len.div_ceil(BLOCK) {
            bytes.append(&mut self.get(number)?);
        }
        Some(bytes)
    }

    /// Keeps a whole blob.
    pub(super) fn keep(&self, bytes: &[u8]) {
        for (number, block) in (0..).zip(bytes.chunks(BLOCK as usize)) {
            self.put(number, block);
        }
    }

    /// Forgets the blocks that hold `len` bytes at `offset`: their bytes are what the server sent, but not
    /// what they should be.
    pub(super) fn forget(&self, offset: u64, len: u64) {
        for number in offset / BLOCK..(offset + len).div_ceil(BLOCK) {
            // If the header cannot be spoilt the block stays wrong, and is refused again.
            let _ = self.file.write_all_at(&[0; HEADER as usize], number * (HEADER + BLOCK));
        }
    }
}

/// Removes cached blobs, the longest unused first, until at most `max_bytes` are taken. Processes that use
/// a removed blob go on with it. Returns the bytes given back.
///
/// # Errors
/// An I/O error; the cache stays usable.
pub fn trim_cache(dir: &Path, max_bytes: u64) -> io::Result<u64> {
    let mut files: Vec<(std::time::SystemTime, u64, PathBuf)> = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|suffix| suffix == SUFFIX) {
            let meta = fs::metadata(&path)?;
            let used = meta.accessed().or_else(|_| meta.modified())?;
            files.push((used, std::os::unix::fs::MetadataExt::blocks(&meta) * 512, path));
        }
    }
    files.sort();
    let mut taken: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
    let mut freed = 0;
    for (_, bytes, path) in files {
        if taken <= max_bytes {
            break;
        }
        fs::remove_file(path)?;
        taken -= bytes;
        freed += bytes;
    }
    Ok(freed)
}
