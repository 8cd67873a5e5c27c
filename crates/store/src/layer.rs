//! An opened page layer: its checked index, and its pages, checked group by group.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_sys::PAGE_SIZE;

use crate::blobs::{BlobRead, FileBlob};
use crate::index::{Encoding, FOOTER_LEN, Footer, Index, Role};
use crate::{LayerError, OpenError, Sha256};

/// An opened page layer.
pub struct Layer {
    blob: Box<dyn BlobRead>,
    digest: Sha256,
    index: Index,
    /// Byte offset of each compressed group, and the end of the last; empty for raw layers.
    offsets: Vec<u64>,
    /// A bit for each group whose digest was found right. Kept for raw layers only: compressed
    /// groups are checked whenever they are decompressed.
    verified: Vec<AtomicU64>,
}

impl std::fmt::Debug for Layer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layer")
            .field("digest", &self.digest)
            .field("role", &self.index.role)
            .field("stored", &self.index.stored)
            .finish_non_exhaustive()
    }
}

impl Layer {
    /// Opens the blob at `path` and checks its index against `root`.
    pub(crate) fn open(
        path: &Path,
        digest: Sha256,
        size: u64,
        root: &[u8; 32],
    ) -> Result<Self, OpenError> {
        let blob = FileBlob::open(path).map_err(|e| OpenError::io(path, e))?;
        Self::from_blob(Box::new(blob), digest, size, root)
    }

    /// Opens a layer from any blob.
    ///
    /// # Errors
    /// [`OpenError::Layer`] when the blob has another length than `size`, is damaged, or is not the
    /// layer whose root is `root`.
    pub fn from_blob(
        blob: Box<dyn BlobRead>,
        digest: Sha256,
        size: u64,
        root: &[u8; 32],
    ) -> Result<Self, OpenError> {
        let bad = |source| OpenError::Layer { digest, source };
        let io = |e| OpenError::io(Path::new(&digest.to_string()), e);
        let len = blob.len();
        if len != size || len < FOOTER_LEN as u64 {
            return Err(bad(LayerError::Truncated(len)));
        }
        let mut footer = [0; FOOTER_LEN];
        blob.read_at(&mut footer, len - FOOTER_LEN as u64).map_err(io)?;
        let footer = Footer::parse(&footer, len).map_err(bad)?;
        let mut bytes = vec![0; footer.index_len as usize];
        blob.read_at(&mut bytes, footer.index_offset).map_err(io)?;
        let index = footer.parse_index(&bytes, root).map_err(bad)?;
        let offsets = match index.encoding {
            Encoding::Raw => Vec::new(),
            Encoding::Zstd => std::iter::once(0)
                .chain(index.chunks.iter().scan(0, |at, chunk| {
                    *at += u64::from(*chunk);
                    Some(*at)
                }))
                .collect(),
        };
        let words = match index.encoding {
            Encoding::Raw => index.groups.len().div_ceil(64),
            Encoding::Zstd => 0,
        };
        let verified = (0..words).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { blob, digest, index, offsets, verified })
    }

    /// The blob's digest.
    #[must_use]
    pub fn digest(&self) -> Sha256 {
        self.digest
    }

    /// Digest of what the layer holds, whatever its encoding.
    #[must_use]
    pub fn root(&self) -> &[u8; 32] {
        &self.index.root
    }

    /// What the layer is for.
    #[must_use]
    pub fn role(&self) -> Role {
        self.index.role
    }

    /// How its pages are stored.
    #[must_use]
    pub fn encoding(&self) -> Encoding {
        self.index.encoding
    }

    /// Length of the blob in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.blob.len()
    }

    /// Number of pages stored, duplicates counted once.
    #[must_use]
    pub fn stored(&self) -> u64 {
        self.index.stored
    }

    /// Number of stored pages a digest covers.
    #[must_use]
    pub fn group_pages(&self) -> usize {
        self.index.group_pages as usize
    }

    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    /// The file of a raw local layer, whose page `n` lies at byte `n * 4096`. Whoever maps it checks
    /// the groups first, with [`Layer::verify`].
    #[must_use]
    pub fn file(&self) -> Option<&File> {
        match self.index.encoding {
            Encoding::Raw => self.blob.file(),
            Encoding::Zstd => None,
        }
    }

    fn is_verified(&self, group: usize) -> bool {
        self.verified
            .get(group / 64)
            .is_some_and(|word| word.load(Ordering::Acquire) & 1 << (group % 64) != 0)
    }

    fn io(&self, error: io::Error) -> OpenError {
        OpenError::io(Path::new(&self.digest.to_string()), error)
    }

    fn bad(&self, source: LayerError) -> OpenError {
        OpenError::Layer { digest: self.digest, source }
    }

    /// Reads group `group` into `out`, which is exactly as long, and checks it.
    fn read_group(&self, group: usize, out: &mut [u8]) -> Result<(), OpenError> {
        match self.index.encoding {
            Encoding::Raw => {
                let first = self.index.group_range(group).start;
                self.blob.read_at(out, first * PAGE_SIZE as u64).map_err(|e| self.io(e))?;
            }
            Encoding::Zstd => {
                let wrong = || self.bad(LayerError::Decompress(group as u64));
                let (from, to) = (self.offsets[group], self.offsets[group + 1]);
                // A frame that does not shrink its input is at most a few bytes longer than it.
                if (to - from) as usize > zstd::zstd_safe::compress_bound(out.len()) {
                    return Err(wrong());
                }
                let mut frame = vec![0; (to - from) as usize];
                self.blob.read_at(&mut frame, from).map_err(|e| self.io(e))?;
                let n = zstd::bulk::decompress_to_buffer(&frame, out).map_err(|_| wrong())?;
                if n != out.len() {
                    return Err(wrong());
                }
            }
        }
        if blake3::hash(out) != blake3::Hash::from_bytes(self.index.groups[group]) {
            let range = self.index.group_range(group);
            return Err(self.bad(LayerError::Group { first: range.start, end: range.end }));
        }
        if let Some(word) = self.verified.get(group / 64) {
            word.fetch_or(1 << (group % 64), Ordering::Release);
        }
        Ok(())
    }

    /// Reads whole stored pages from `first` on, checking every group that is used for the first time.
    ///
    /// # Errors
    /// [`OpenError::Layer`] when a group does not have its digest; nothing of `out` may be used then.
    pub fn read(&self, first: u64, out: &mut [u8]) -> Result<(), OpenError> {
        let end = first + (out.len() / PAGE_SIZE) as u64;
        if end > self.index.stored {
            return Err(self.bad(LayerError::Layout("a page past the stored ones was asked for")));
        }
        let per_group = u64::from(self.index.group_pages);
        let mut scratch = Vec::new();
        let mut at = first;
        while at < end {
            let group = (at / per_group) as usize;
            let range = self.index.group_range(group);
            let until = range.end.min(end);
            let part =
                &mut out[(at - first) as usize * PAGE_SIZE..][..(until - at) as usize * PAGE_SIZE];
            if at == range.start && until == range.end {
                if self.is_verified(group) {
                    self.blob.read_at(part, at * PAGE_SIZE as u64).map_err(|e| self.io(e))?;
                } else {
                    self.read_group(group, part)?;
                }
            } else if self.is_verified(group) {
                self.blob.read_at(part, at * PAGE_SIZE as u64).map_err(|e| self.io(e))?;
            } else {
                scratch.resize((range.end - range.start) as usize * PAGE_SIZE, 0);
                self.read_group(group, &mut scratch)?;
                let skip = (at - range.start) as usize * PAGE_SIZE;
                part.copy_from_slice(&scratch[skip..skip + part.len()]);
            }
            at = until;
        }
        Ok(())
    }

    /// Checks the groups of stored pages `first .. first + len` that were not checked before.
    ///
    /// # Errors
    /// As [`Layer::read`].
    pub fn verify(&self, first: u64, len: u64) -> Result<(), OpenError> {
        let per_group = u64::from(self.index.group_pages);
        let end = (first + len).min(self.index.stored);
        if first >= end {
            return Ok(());
        }
        let mut scratch = vec![0; self.group_pages() * PAGE_SIZE];
        for group in first / per_group..end.div_ceil(per_group) {
            let group = group as usize;
            if !self.is_verified(group) {
                let range = self.index.group_range(group);
                self.read_group(
                    group,
                    &mut scratch[..(range.end - range.start) as usize * PAGE_SIZE],
                )?;
            }
        }
        Ok(())
    }
}
