//! An opened page layer: its checked index, and its pages, checked group by group.

mod gather;
mod verify;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_sys::PAGE_SIZE;

use crate::format::blob::BlobRead;
use crate::format::index::{Encoding, FOOTER_LEN, Footer, Index, Role};
use crate::seal::SealKey;
use crate::{LayerError, Limits, OpenError, Sha256};

/// Bytes read from the end of a layer to begin with.
const TAIL: u64 = 64 << 10;

/// Groups read at once: 2 MiB of pages as written by this version.
const BATCH_GROUPS: usize = 32;

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
    /// The key that sealed it.
    key: Option<SealKey>,
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
    #[cfg(feature = "remote")]
    pub(crate) fn open(
        path: &Path,
        digest: Sha256,
        size: u64,
        root: &[u8; 32],
    ) -> Result<Self, OpenError> {
        let blob = crate::blobs::file::FileBlob::open(path).map_err(|e| OpenError::io(path, e))?;
        Self::from_blob(Box::new(blob), digest, size, root)
    }

    /// Opens a layer from any blob.
    ///
    /// # Errors
    /// [`OpenError::Layer`] when the blob has another length than `size`, is damaged, or has
    /// another root than `root`.
    pub fn from_blob(
        blob: Box<dyn BlobRead>,
        digest: Sha256,
        size: u64,
        root: &[u8; 32],
    ) -> Result<Self, OpenError> {
        Self::within(blob, digest, size, root, &Limits::NONE)
    }

    /// As [`Layer::from_blob`], with an index within `limits`.
    fn within(
        blob: Box<dyn BlobRead>,
        digest: Sha256,
        size: u64,
        root: &[u8; 32],
        limits: &Limits,
    ) -> Result<Self, OpenError> {
        let bad = |source| OpenError::Layer { digest, source };
        if blob.len() != size || size < FOOTER_LEN as u64 {
            return Err(bad(LayerError::Truncated(blob.len())));
        }
        let index = match read_index(&*blob, digest, root, limits) {
            Err(OpenError::Layer { .. }) if blob.distrust(0, size) => {
                read_index(&*blob, digest, root, limits)?
            }
            other => other?,
        };
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
        Ok(Self { blob, digest, index, offsets, verified, key: None })
    }

    /// As [`Layer::from_blob`]; with a key, the blob is sealed. The index is within `limits`.
    pub(crate) fn from_stored(
        blob: Box<dyn BlobRead>,
        digest: Sha256,
        size: u64,
        root: &[u8; 32],
        key: Option<&SealKey>,
        limits: &Limits,
    ) -> Result<Self, OpenError> {
        let Some(key) = key else { return Self::within(blob, digest, size, root, limits) };
        if blob.len() != size {
            let source = LayerError::Truncated(blob.len());
            return Err(OpenError::Layer { digest, source });
        }
        let blob = key.open(blob)?;
        let plain = blob.len();
        let layer = Self::within(blob, digest, plain, root, limits)?;
        Ok(Self { key: Some(key.clone()), ..layer })
    }

    /// The key that sealed the layer.
    pub(crate) fn key(&self) -> Option<&SealKey> {
        self.key.as_ref()
    }

    /// The blob's digest.
    #[must_use]
    pub fn digest(&self) -> Sha256 {
        self.digest
    }

    /// Digest of the content of the layer in any encoding.
    #[must_use]
    pub fn root(&self) -> &[u8; 32] {
        &self.index.root
    }

    /// The purpose of the layer.
    #[must_use]
    pub fn role(&self) -> Role {
        self.index.role
    }

    /// The encoding of its pages.
    #[must_use]
    pub fn encoding(&self) -> Encoding {
        self.index.encoding
    }

    /// Length of the blob in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.blob().len()
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

    /// The file of a raw local layer, and the page in it at which the stored pages begin; `None` if
    /// they cannot be mapped. Check the groups with [`Layer::verify`] before mapping them.
    #[must_use]
    pub fn file(&self) -> Option<(&File, u64)> {
        let (file, start) = self.blob.file().filter(|_| self.index.encoding == Encoding::Raw)?;
        let page = PAGE_SIZE as u64;
        start.is_multiple_of(page).then_some((file, start / page))
    }

    /// Checks that the blob is unchanged since it was opened, by the length and modification time
    /// of its file. It is for pages that were checked before.
    ///
    /// # Errors
    /// [`OpenError::Io`] when it was changed.
    pub fn check_unchanged(&self) -> Result<(), OpenError> {
        self.blob().check_unchanged().map_err(|e| self.io(e))
    }

    /// The blob as it is stored.
    pub(crate) fn blob(&self) -> &dyn BlobRead {
        self.blob.carrier().unwrap_or(&*self.blob)
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

    /// Bytes of the blob that hold `groups`.
    fn bytes_of(&self, groups: &Range<usize>) -> Range<u64> {
        match self.index.encoding {
            Encoding::Raw => {
                let page = |n: u64| n * PAGE_SIZE as u64;
                let first = self.index.group_range(groups.start).start;
                page(first)..page(self.index.group_range(groups.end - 1).end)
            }
            Encoding::Zstd => self.offsets[groups.start]..self.offsets[groups.end],
        }
    }

    /// Reads whole groups into `out`, which is exactly as long, and checks each. Wrong bytes are
    /// asked for again where that may help.
    fn read_groups(&self, groups: Range<usize>, out: &mut [u8]) -> Result<(), OpenError> {
        let bytes = self.bytes_of(&groups);
        match self.try_read_groups(groups.clone(), out) {
            Err(OpenError::Layer { .. })
                if self.blob.distrust(bytes.start, bytes.end - bytes.start) =>
            {
                self.try_read_groups(groups, out)
            }
            other => other,
        }
    }

    /// One attempt, with one read of the blob.
    fn try_read_groups(&self, groups: Range<usize>, out: &mut [u8]) -> Result<(), OpenError> {
        let bytes = self.bytes_of(&groups);
        let mut frames = Vec::new();
        match self.index.encoding {
            Encoding::Raw => self.blob.read_at(out, bytes.start),
            Encoding::Zstd => {
                // The index was checked: the chunks are no longer than the blob, which bounds this.
                frames.resize((bytes.end - bytes.start) as usize, 0);
                self.blob.read_at(&mut frames, bytes.start)
            }
        }
        .map_err(|e| self.io(e))?;
        self.check_groups(groups, &frames, out)
    }

    /// Checks whole groups: `out` holds their pages, or receives the decompressed `frames`.
    fn check_groups(
        &self,
        groups: Range<usize>,
        frames: &[u8],
        out: &mut [u8],
    ) -> Result<(), OpenError> {
        let start = self.bytes_of(&groups).start;
        let group_bytes = self.group_pages() * PAGE_SIZE;
        for (group, part) in groups.zip(out.chunks_mut(group_bytes)) {
            if self.index.encoding == Encoding::Zstd {
                let from = (self.offsets[group] - start) as usize;
                let to = (self.offsets[group + 1] - start) as usize;
                let n = zstd::bulk::decompress_to_buffer(&frames[from..to], part);
                if n.ok() != Some(part.len()) {
                    return Err(self.bad(LayerError::Decompress(group as u64)));
                }
            }
            // As with the root: a fuzzer cannot guess a digest.
            if blake3::hash(part) != blake3::Hash::from_bytes(self.index.groups[group])
                && !cfg!(fuzzing)
            {
                let range = self.index.group_range(group);
                return Err(self.bad(LayerError::Group { first: range.start, end: range.end }));
            }
            if let Some(word) = self.verified.get(group / 64) {
                word.fetch_or(1 << (group % 64), Ordering::Release);
            }
        }
        Ok(())
    }

    /// Reads whole stored pages from `first` on, checking every group that is used for the first
    /// time.
    ///
    /// # Errors
    /// [`OpenError::Layer`] when a group does not have its digest; nothing of `out` may be used
    /// then.
    pub fn read(&self, first: u64, out: &mut [u8]) -> Result<(), OpenError> {
        if self.is_distant() {
            return self.read_many(&mut [(first, out)]);
        }
        let end = first.saturating_add((out.len() / PAGE_SIZE) as u64);
        if end > self.index.stored {
            return Err(self.bad(LayerError::Layout("a page past the stored ones was asked for")));
        }
        let per_group = u64::from(self.index.group_pages);
        let mut scratch = Vec::new();
        let mut at = first;
        while at < end {
            let group = (at / per_group) as usize;
            let is_whole = |group: usize| {
                let range = self.index.group_range(group);
                !range.is_empty() && at <= range.start && range.end <= end
            };
            let mut groups = group..group + 1;
            let checked = self.is_verified(group);
            // Groups that can be read straight into place are taken together.
            while groups.len() < BATCH_GROUPS
                && is_whole(groups.end)
                && self.is_verified(groups.end) == checked
                && (checked || is_whole(group))
            {
                groups.end += 1;
            }
            let range =
                self.index.group_range(group).start..self.index.group_range(groups.end - 1).end;
            let until = range.end.min(end);
            let from = (at - first) as usize * PAGE_SIZE;
            let part = &mut out[from..][..(until - at) as usize * PAGE_SIZE];
            if checked {
                self.blob.read_at(part, at * PAGE_SIZE as u64).map_err(|e| self.io(e))?;
                self.check_unchanged()?;
            } else if at == range.start && until == range.end {
                self.read_groups(groups, part)?;
            } else {
                scratch.resize((range.end - range.start) as usize * PAGE_SIZE, 0);
                self.read_groups(groups, &mut scratch)?;
                let skip = (at - range.start) as usize * PAGE_SIZE;
                part.copy_from_slice(&scratch[skip..skip + part.len()]);
            }
            at = until;
        }
        Ok(())
    }
}

/// Reads and checks the index of a layer that is long enough to have one.
fn read_index(
    blob: &dyn BlobRead,
    digest: Sha256,
    root: &[u8; 32],
    limits: &Limits,
) -> Result<Index, OpenError> {
    let bad = |source| OpenError::Layer { digest, source };
    let io = |e| OpenError::io(Path::new(&digest.to_string()), e);
    let len = blob.len();
    // One read gets the footer, and the index of all but the largest layers with it.
    let mut tail = vec![0; len.min(TAIL) as usize];
    let tail_offset = len - tail.len() as u64;
    blob.read_at(&mut tail, tail_offset).map_err(io)?;
    let mut footer = [0; FOOTER_LEN];
    footer.copy_from_slice(&tail[tail.len() - FOOTER_LEN..]);
    let footer = Footer::parse(&footer, len).map_err(bad)?;
    limits.check_index(footer.index_len)?;
    let bytes = match footer.index_offset.checked_sub(tail_offset) {
        Some(at) => tail[at as usize..][..footer.index_len as usize].to_vec(),
        None => {
            let mut bytes = vec![0; footer.index_len as usize];
            blob.read_at(&mut bytes, footer.index_offset).map_err(io)?;
            bytes
        }
    };
    footer.parse_index(&bytes, root).map_err(bad)
}
