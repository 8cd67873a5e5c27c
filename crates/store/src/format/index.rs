//! The index of a page layer: footer, extents, group digests. Parsing and writing, no I/O.
//!
//! The layout is described byte by byte in `docs/format.md`. Two properties matter here:
//!
//! * The *root* covers what the pages are (role, counts, extents, group digests, parent) and not
//!   how they are encoded, so a layer keeps its root when it is compressed for transport.
//! * Every count is checked against the bytes that are there before anything is allocated.

use crate::LayerError;
use afresh_sys::PAGE_SIZE;

/// Bytes of the footer.
pub(crate) const FOOTER_LEN: usize = 192;
/// The footer's first field.
pub(crate) const MAGIC: [u8; 8] = *b"AFRESHPG";
/// The version written.
pub(crate) const VERSION_1: u32 = 1;
/// Bytes of an extent.
const EXTENT_LEN: u64 = 24;
/// Bytes of a group digest.
const DIGEST_LEN: u64 = 32;
/// Stored page number that stands for a page of zeros.
const ZERO: u64 = u64::MAX;
/// Largest index space: 16 TiB.
pub(crate) const MAX_PAGES: u64 = 1 << 32;
/// Largest group: 2 MiB.
pub(crate) const MAX_GROUP_PAGES: u32 = 512;
/// Stored pages a digest covers: 64 KiB, the largest window in which a demand fault should read.
pub(crate) const GROUP_PAGES: u32 = 16;
/// Largest index read into memory: 1 GiB, which holds 44 million extents.
pub(crate) const MAX_INDEX: u64 = 1 << 30;
/// Skippable-frame header in front of the index of a compressed layer, which makes the whole blob a
/// valid zstd stream.
pub(crate) const SKIPPABLE: [u8; 4] = [0x5e, 0x2a, 0x4d, 0x18];
/// zstd level: 1 is close to the disk's speed, and higher ones gain little on memory.
pub(crate) const ZSTD_LEVEL: i32 = 1;
/// Domain of the root digest.
const ROOT_CONTEXT: &str = "afresh 2026-11 page layer version 1 root";

/// Maximum length of a compressed group: no frame of zstd is longer.
fn max_chunk(group_pages: u32) -> u64 {
    zstd::zstd_safe::compress_bound(group_pages as usize * PAGE_SIZE) as u64
}

/// The purpose of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The bottom of a stack; pages it does not name are zero.
    Base,
    /// Lies on the layer whose root it names; pages it does not name are that layer's.
    Delta,
    /// A compact copy of the pages that runs touch first, in address order.
    WorkingSet,
}

impl Role {
    fn number(self) -> u32 {
        match self {
            Role::Base => 0,
            Role::Delta => 1,
            Role::WorkingSet => 2,
        }
    }

    fn from_number(number: u32) -> Result<Self, LayerError> {
        match number {
            0 => Ok(Role::Base),
            1 => Ok(Role::Delta),
            2 => Ok(Role::WorkingSet),
            other => Err(LayerError::Field { field: "role", value: other.into() }),
        }
    }
}

/// The encoding of stored pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// As they are, page `n` at byte `n * 4096`: can be mapped.
    Raw,
    /// Each group is one zstd frame.
    Zstd,
}

impl Encoding {
    fn number(self) -> u32 {
        match self {
            Encoding::Raw => 0,
            Encoding::Zstd => 1,
        }
    }
}

/// A run of pages and where it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) first: u64,
    pub(crate) len: u64,
    /// First stored page, or `None` for zeros.
    pub(crate) stored: Option<u64>,
}

impl Extent {
    pub(crate) fn end(&self) -> u64 {
        self.first + self.len
    }
}

/// Everything a layer says about its pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Index {
    pub(crate) role: Role,
    pub(crate) group_pages: u32,
    pub(crate) pages: u64,
    pub(crate) stored: u64,
    pub(crate) extents: Vec<Extent>,
    pub(crate) groups: Vec<[u8; 32]>,
    pub(crate) parent: [u8; 32],
    pub(crate) root: [u8; 32],
    pub(crate) encoding: Encoding,
    /// Compressed length of each group; empty for raw layers.
    pub(crate) chunks: Vec<u32>,
}

/// The fixed part, read first: it says where the rest is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Footer {
    role: Role,
    encoding: Encoding,
    group_pages: u32,
    pages: u64,
    stored: u64,
    extents: u64,
    data_len: u64,
    pub(crate) index_offset: u64,
    pub(crate) index_len: u64,
    parent: [u8; 32],
    root: [u8; 32],
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn digest_at(bytes: &[u8], at: usize) -> [u8; 32] {
    let mut digest = [0; 32];
    digest.copy_from_slice(&bytes[at..at + 32]);
    digest
}

impl Footer {
    /// Parses the last [`FOOTER_LEN`] bytes of a blob of `blob_len` bytes.
    pub(crate) fn parse(bytes: &[u8; FOOTER_LEN], blob_len: u64) -> Result<Self, LayerError> {
        if bytes[..8] != MAGIC {
            return Err(LayerError::Magic);
        }
        let version = u32_at(bytes, 8);
        if version != VERSION_1 {
            return Err(LayerError::Version(version));
        }
        let encoding = match u32_at(bytes, 12) {
            0 => Encoding::Raw,
            1 => Encoding::Zstd,
            other => return Err(LayerError::Field { field: "encoding", value: other.into() }),
        };
        let footer = Self {
            encoding,
            role: Role::from_number(u32_at(bytes, 16))?,
            group_pages: u32_at(bytes, 20),
            pages: u64_at(bytes, 24),
            stored: u64_at(bytes, 32),
            extents: u64_at(bytes, 40),
            data_len: u64_at(bytes, 48),
            index_offset: u64_at(bytes, 56),
            index_len: u64_at(bytes, 64),
            parent: digest_at(bytes, 128),
            root: digest_at(bytes, 160),
        };
        footer.check(bytes, blob_len)?;
        Ok(footer)
    }

    fn check(&self, bytes: &[u8; FOOTER_LEN], blob_len: u64) -> Result<(), LayerError> {
        let field = |field, value| Err(LayerError::Field { field, value });
        if !self.group_pages.is_power_of_two() || self.group_pages > MAX_GROUP_PAGES {
            return field("group_pages", self.group_pages.into());
        }
        if self.pages > MAX_PAGES {
            return field("pages", self.pages);
        }
        if self.stored > self.pages {
            return field("stored", self.stored);
        }
        if self.extents > self.pages {
            return field("extents", self.extents);
        }
        if self.index_len > MAX_INDEX {
            return field("index_len", self.index_len);
        }
        if bytes[72..128].iter().any(|b| *b != 0) {
            return Err(LayerError::Field { field: "reserved", value: 1 });
        }
        // No product below can overflow: counts are at most 2^32.
        let chunk_table = match self.encoding {
            Encoding::Raw => 0,
            Encoding::Zstd => self.groups() * 4,
        };
        let wanted = self.extents * EXTENT_LEN + self.groups() * DIGEST_LEN + chunk_table;
        if self.index_len != wanted {
            return Err(LayerError::Layout("the index has another length than its counts say"));
        }
        let gap = match self.encoding {
            Encoding::Raw => {
                if self.data_len != self.stored * PAGE_SIZE as u64 {
                    return Err(LayerError::Layout("the data are not the stored pages"));
                }
                0
            }
            Encoding::Zstd => SKIPPABLE.len() as u64 + 4,
        };
        let end = self
            .data_len
            .checked_add(gap)
            .filter(|offset| *offset == self.index_offset)
            .and_then(|offset| offset.checked_add(self.index_len))
            .and_then(|end| end.checked_add(FOOTER_LEN as u64));
        if end != Some(blob_len) {
            return Err(LayerError::Layout("the sections do not add up to the blob"));
        }
        Ok(())
    }

    fn groups(&self) -> u64 {
        self.stored.div_ceil(self.group_pages.into())
    }

    /// Parses the index section, whose length the caller took from this footer, and checks it
    /// against `root`, the digest that the configuration names.
    pub(crate) fn parse_index(&self, bytes: &[u8], root: &[u8; 32]) -> Result<Index, LayerError> {
        if bytes.len() as u64 != self.index_len {
            return Err(LayerError::Truncated(bytes.len() as u64));
        }
        let semantic_len = (self.extents * EXTENT_LEN + self.groups() * DIGEST_LEN) as usize;
        let (semantic, chunk_table) = bytes.split_at(semantic_len);
        let found = root_of(
            self.role,
            self.group_pages,
            [self.pages, self.stored, self.extents],
            semantic,
            &self.parent,
        );
        // A fuzzer cannot guess a digest; what comes after must stand on its own.
        if (found != *root || self.root != *root) && !cfg!(fuzzing) {
            return Err(LayerError::Root);
        }
        let (extents, groups) = semantic.split_at((self.extents * EXTENT_LEN) as usize);
        let index = Index {
            role: self.role,
            group_pages: self.group_pages,
            pages: self.pages,
            stored: self.stored,
            extents: self.parse_extents(extents)?,
            groups: groups.chunks_exact(DIGEST_LEN as usize).map(|d| digest_at(d, 0)).collect(),
            parent: self.parent,
            root: self.root,
            encoding: self.encoding,
            chunks: chunk_table.chunks_exact(4).map(|c| u32_at(c, 0)).collect(),
        };
        if self.encoding == Encoding::Zstd
            && index.chunks.iter().map(|c| u64::from(*c)).sum::<u64>() != self.data_len
        {
            return Err(LayerError::Layout("the chunks do not add up to the data"));
        }
        // The root does not cover chunks. One is fetched as a whole, and a reader's buffer and
        // cache have its length.
        let limit = max_chunk(self.group_pages);
        if let Some(chunk) = index.chunks.iter().map(|c| u64::from(*c)).find(|c| *c > limit) {
            return Err(LayerError::Field { field: "chunk length", value: chunk });
        }
        Ok(index)
    }

    fn parse_extents(&self, bytes: &[u8]) -> Result<Vec<Extent>, LayerError> {
        let mut extents = Vec::with_capacity(self.extents as usize);
        let mut from = 0;
        for (number, raw) in bytes.chunks_exact(EXTENT_LEN as usize).enumerate() {
            let bad = || LayerError::Extent(number as u64);
            let (first, len, stored) = (u64_at(raw, 0), u64_at(raw, 8), u64_at(raw, 16));
            let end = first.checked_add(len).ok_or_else(bad)?;
            if first < from || len == 0 || end > self.pages {
                return Err(bad());
            }
            let stored = (stored != ZERO).then_some(stored);
            if stored.is_some_and(|s| s.checked_add(len).is_none_or(|end| end > self.stored)) {
                return Err(bad());
            }
            extents.push(Extent { first, len, stored });
            from = end;
        }
        Ok(extents)
    }
}

/// The root digest: what the pages of a layer are, whatever their encoding.
fn root_of(
    role: Role,
    group_pages: u32,
    counts: [u64; 3],
    semantic: &[u8],
    parent: &[u8; 32],
) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key(ROOT_CONTEXT);
    hasher.update(&role.number().to_le_bytes());
    hasher.update(&group_pages.to_le_bytes());
    for count in counts {
        hasher.update(&count.to_le_bytes());
    }
    hasher.update(parent);
    hasher.update(semantic);
    hasher.finalize().into()
}

impl Index {
    fn semantic(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.extents.len() * 24 + self.groups.len() * 32);
        for extent in &self.extents {
            out.extend_from_slice(&extent.first.to_le_bytes());
            out.extend_from_slice(&extent.len.to_le_bytes());
            out.extend_from_slice(&extent.stored.unwrap_or(ZERO).to_le_bytes());
        }
        for group in &self.groups {
            out.extend_from_slice(group);
        }
        out
    }

    /// Computes the root of the other fields.
    pub(crate) fn seal(&mut self) {
        self.root = root_of(
            self.role,
            self.group_pages,
            [self.pages, self.stored, self.extents.len() as u64],
            &self.semantic(),
            &self.parent,
        );
    }

    /// The bytes that follow the data: a skippable-frame header for compressed layers, the index,
    /// the footer.
    pub(crate) fn tail(&self, data_len: u64) -> Result<Vec<u8>, LayerError> {
        let mut index = self.semantic();
        for chunk in &self.chunks {
            index.extend_from_slice(&chunk.to_le_bytes());
        }
        if index.len() as u64 > MAX_INDEX {
            return Err(LayerError::Layout("the index is too large"));
        }
        let mut out = Vec::with_capacity(index.len() + FOOTER_LEN + 8);
        if self.encoding == Encoding::Zstd {
            let frame = u32::try_from(index.len() + FOOTER_LEN)
                .map_err(|_| LayerError::Layout("the index is too large for a zstd frame"))?;
            out.extend_from_slice(&SKIPPABLE);
            out.extend_from_slice(&frame.to_le_bytes());
        }
        let index_offset = data_len + out.len() as u64;
        let index_len = index.len() as u64;
        out.append(&mut index);
        let mut footer = [0; FOOTER_LEN];
        footer[..8].copy_from_slice(&MAGIC);
        footer[8..12].copy_from_slice(&VERSION_1.to_le_bytes());
        footer[12..16].copy_from_slice(&self.encoding.number().to_le_bytes());
        footer[16..20].copy_from_slice(&self.role.number().to_le_bytes());
        footer[20..24].copy_from_slice(&self.group_pages.to_le_bytes());
        let words =
            [self.pages, self.stored, self.extents.len() as u64, data_len, index_offset, index_len];
        for (at, word) in words.iter().enumerate() {
            footer[24 + at * 8..32 + at * 8].copy_from_slice(&word.to_le_bytes());
        }
        footer[128..160].copy_from_slice(&self.parent);
        footer[160..].copy_from_slice(&self.root);
        out.extend_from_slice(&footer);
        Ok(out)
    }

    /// Bytes of the index as it is stored.
    pub(crate) fn bytes(&self) -> u64 {
        let (extents, groups) = (self.extents.len() as u64, self.groups.len() as u64);
        extents * EXTENT_LEN + groups * DIGEST_LEN + self.chunks.len() as u64 * 4
    }

    /// Stored pages of group `group`.
    pub(crate) fn group_range(&self, group: usize) -> std::ops::Range<u64> {
        let first = group as u64 * u64::from(self.group_pages);
        first..(first + u64::from(self.group_pages)).min(self.stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_longer_than_any_frame_of_its_pages_is_refused() {
        let parsed = |chunk: u64| {
            let extents = vec![Extent { first: 0, len: 16, stored: Some(0) }];
            let mut index = Index {
                role: Role::Base,
                group_pages: 16,
                pages: 16,
                stored: 16,
                extents,
                groups: vec![[7; 32]],
                parent: [0; 32],
                root: [0; 32],
                encoding: Encoding::Zstd,
                chunks: vec![u32::try_from(chunk).unwrap()],
            };
            index.seal();
            let tail = index.tail(chunk).unwrap();
            let footer = Footer::parse(tail.last_chunk().unwrap(), chunk + tail.len() as u64)?;
            let end = tail.len() - FOOTER_LEN;
            let start = end - footer.index_len as usize;
            footer.parse_index(&tail[start..end], &index.root)
        };
        parsed(max_chunk(16)).unwrap();
        for chunk in [max_chunk(16) + 1, 1 << 30, u32::MAX.into()] {
            let refused = LayerError::Field { field: "chunk length", value: chunk };
            assert_eq!(parsed(chunk).unwrap_err(), refused);
        }
    }
}
