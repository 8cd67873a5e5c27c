//! A cache of remote blobs on local disk, shared by every process that names the same directory.
//!
//! A blob has one file, divided into blocks; each block is stored with its digest. A block that is
//! missing, torn by a crash, or damaged does not match and is fetched again, so nothing needs to be
//! locked, ordered or made durable, and a bad cache can cost time but never yield wrong bytes.
//!
//! Pages hold secrets. The directory must belong to this user, and no other may write to it; files
//! are readable by their owner only, whatever the umask, and a symbolic link is refused.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fstat, open, openat};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::Sha256;
use crate::disk::temporary::new_dir;

/// Bytes of a blob in a block.
pub(super) const BLOCK: u64 = 256 << 10;
/// The prefix of a block in the file: the digest of number, length and bytes.
const HEADER: u64 = 32;
const CONTEXT: &str = "afresh 2026-11 remote cache block version 1";
const SUFFIX: &str = "blocks";
/// Mode of the files.
const OWNER: Mode = Mode::RUSR.union(Mode::WUSR);
/// Attempts to open a file that others make and remove.
const RACES: usize = 8;

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

/// Opens a directory that only this user writes to, and makes it if it is missing.
fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    new_dir(path)?;
    let dir = open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&dir)?;
    let refused = |why| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    if stat.st_uid != geteuid().as_raw() {
        return refused("the cache directory belongs to another user: choose one of your own");
    }
    if stat.st_mode & 0o022 != 0 {
        return refused(
            "other users can write to the cache directory: run `chmod go-w` on it, or choose another",
        );
    }
    Ok(dir)
}

/// Refuses all but a regular file of this user, and takes it from other readers: an earlier version
/// followed the umask.
fn checked(file: File) -> io::Result<File> {
    let meta = file.metadata()?;
    if !meta.is_file() || meta.uid() != geteuid().as_raw() {
        let why = "a file in the cache directory is not a regular file of this user: remove it";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    if meta.permissions().mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

impl CacheFile {
    pub(super) fn open(dir: &Path, blob: Sha256, blob_len: u64) -> io::Result<Self> {
        let dir = open_dir(dir)?;
        let name = format!("{}.{SUFFIX}", blob.hex());
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        for _ in 0..RACES {
            let there = openat(&dir, &name, flags, Mode::empty());
            let opened = match there {
                Err(Errno::NOENT) => {
                    openat(&dir, &name, flags | OFlags::CREATE | OFlags::EXCL, OWNER)
                }
                there => there,
            };
            match opened {
                // Another process made or removed it in between.
                Err(Errno::EXIST | Errno::NOENT) => {}
                opened => return Ok(Self { file: checked(opened?.into())?, blob_len }),
            }
        }
        Err(Errno::AGAIN.into())
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

    /// Forgets the blocks that hold `len` bytes at `offset`: their bytes are what the server sent,
    /// but not what they should be.
    pub(super) fn forget(&self, offset: u64, len: u64) {
        for number in offset / BLOCK..(offset + len).div_ceil(BLOCK) {
            // If the header cannot be spoilt the block stays wrong, and is refused again.
            let _ = self.file.write_all_at(&[0; HEADER as usize], number * (HEADER + BLOCK));
        }
    }
}

/// Removes the least recently used blobs of a cache until it has at most `max_bytes`. Processes
/// that use a removed blob can continue. Returns the freed bytes.
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
