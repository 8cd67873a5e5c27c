//! Writes a page layer: finds zero and duplicate pages, digests groups, builds the index.

use std::collections::HashMap;

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::blobs::BlobWriter;
use crate::index::{Encoding, Extent, Index, MAX_PAGES, Role};
use crate::seal::SealKey;
use crate::shelf::Shelf;
use crate::{Pages, SaveError, Sha256, Snapshot};

/// Stored pages a digest covers: 64 KiB, the largest window in which a demand fault should read.
pub(crate) const GROUP_PAGES: u32 = 16;
/// Pages read at a time.
const BATCH: usize = 256;
/// zstd level: 1 is close to the disk's speed, and higher ones gain little on memory.
pub(crate) const ZSTD_LEVEL: i32 = 1;

/// What to write.
pub(crate) struct Plan<'a> {
    pub(crate) role: Role,
    pub(crate) encoding: Encoding,
    /// Pages to look at, in order and without overlap; others are left to the layer below.
    pub(crate) candidates: Vec<PageRange>,
    /// What lies below a delta; pages that equal it are left out.
    pub(crate) below: Option<&'a Snapshot>,
    /// Root of the layer below.
    pub(crate) parent: [u8; 32],
    /// What the layer is sealed with.
    pub(crate) key: Option<&'a SealKey>,
}

/// A layer that was written.
pub(crate) struct Written {
    pub(crate) digest: Sha256,
    pub(crate) size: u64,
    pub(crate) index: Index,
    pub(crate) sealed: bool,
}

struct Writer<'a> {
    source: &'a dyn Pages,
    blob: BlobWriter,
    index: Index,
    data_len: u64,
    /// Raw stored pages not yet written; whole groups but at the end.
    pending: Vec<u8>,
    /// Hash of a stored page to where it is stored and where it came from.
    seen: HashMap<u64, (u64, usize)>,
    scratch: Vec<u8>,
    compressor: Option<zstd::bulk::Compressor<'static>>,
}

/// Writes the layer that `plan` describes, with pages read from `source`.
pub(crate) fn write_layer(
    shelf: &mut dyn Shelf,
    source: &dyn Pages,
    plan: &Plan<'_>,
) -> Result<Written, SaveError> {
    let pages = source.pages() as u64;
    if pages > MAX_PAGES {
        return Err(SaveError::TooLarge { what: "a memory", size: pages, limit: MAX_PAGES });
    }
    let compressor = match plan.encoding {
        Encoding::Raw => None,
        Encoding::Zstd => {
            Some(zstd::bulk::Compressor::new(ZSTD_LEVEL).map_err(SaveError::Compress)?)
        }
    };
    // Sealed pages are never mapped, so they may lie anywhere.
    let mappable = plan.key.is_none().then_some((plan.encoding, pages));
    let blob = shelf.begin(mappable)?.sealed(plan.key)?;
    let index = Index {
        role: plan.role,
        group_pages: GROUP_PAGES,
        pages,
        stored: 0,
        extents: Vec::new(),
        groups: Vec::new(),
        parent: plan.parent,
        root: [0; 32],
        encoding: plan.encoding,
        chunks: Vec::new(),
    };
    let mut writer = Writer {
        source,
        pending: blob.buffer(),
        blob,
        index,
        data_len: 0,
        seen: HashMap::new(),
        scratch: vec![0; PAGE_SIZE],
        compressor,
    };
    let mut batch = vec![0; BATCH * PAGE_SIZE];
    let mut under = vec![0; if plan.below.is_some() { BATCH * PAGE_SIZE } else { 0 }];
    for range in &plan.candidates {
        for first in (range.start..range.end()).step_by(BATCH) {
            let count = BATCH.min(range.end() - first);
            let batch = &mut batch[..count * PAGE_SIZE];
            source.read(first, batch).map_err(SaveError::Source)?;
            let under = match plan.below {
                None => None,
                Some(below) => {
                    let under = &mut under[..count * PAGE_SIZE];
                    below.read_padded(first, under)?;
                    Some(&*under)
                }
            };
            for (n, page) in batch.chunks_exact(PAGE_SIZE).enumerate() {
                let same = under.is_some_and(|u| u[n * PAGE_SIZE..][..PAGE_SIZE] == *page);
                if !same {
                    writer.page(first + n, page)?;
                }
            }
            writer.flush(false)?;
        }
    }
    let (blob, index) = writer.finish()?;
    let (digest, size) = shelf.end(blob)?;
    Ok(Written { digest, size, index, sealed: plan.key.is_some() })
}

impl Writer<'_> {
    fn page(&mut self, number: usize, page: &[u8]) -> Result<(), SaveError> {
        let Some(hash) = hash_unless_zero(page) else {
            // The bottom layer says nothing about zero pages; others must, to hide what is below.
            if self.index.role != Role::Base {
                self.extend(number as u64, None);
            }
            return Ok(());
        };
        if let Some((stored, original)) = self.seen.get(&hash).copied() {
            self.source.read(original, &mut self.scratch).map_err(SaveError::Source)?;
            if self.scratch == page {
                self.extend(number as u64, Some(stored));
                return Ok(());
            }
        }
        let stored = self.index.stored;
        self.seen.insert(hash, (stored, number));
        self.pending.extend_from_slice(page);
        self.index.stored += 1;
        self.extend(number as u64, Some(stored));
        Ok(())
    }

    fn extend(&mut self, page: u64, stored: Option<u64>) {
        if let Some(last) = self.index.extents.last_mut()
            && last.end() == page
            && last.stored.map(|s| s + last.len) == stored
        {
            last.len += 1;
            return;
        }
        self.index.extents.push(Extent { first: page, len: 1, stored });
    }

    /// Writes the whole groups that are pending, and with `last` the partial one too.
    fn flush(&mut self, last: bool) -> Result<(), SaveError> {
        let group = GROUP_PAGES as usize * PAGE_SIZE;
        let whole = if last { self.pending.len() } else { self.pending.len() / group * group };
        if whole == 0 {
            return Ok(());
        }
        let mut next = self.blob.buffer();
        next.extend_from_slice(&self.pending[whole..]);
        self.pending.truncate(whole);
        let mut data = std::mem::replace(&mut self.pending, next);
        for bytes in data.chunks(group) {
            self.index.groups.push(blake3::hash(bytes).into());
        }
        if let Some(compressor) = &mut self.compressor {
            let mut compressed = Vec::new();
            for bytes in data.chunks(group) {
                let frame = compressor.compress(bytes).map_err(SaveError::Compress)?;
                self.index.chunks.push(frame.len() as u32);
                compressed.extend_from_slice(&frame);
            }
            data = compressed;
        }
        self.data_len += data.len() as u64;
        self.blob.push(data)
    }

    /// Writes what remains; the blob is complete then.
    fn finish(mut self) -> Result<(BlobWriter, Index), SaveError> {
        self.flush(true)?;
        self.index.seal();
        let tail = self.index.tail(self.data_len).map_err(|_| SaveError::TooLarge {
            what: "a layer index",
            size: self.index.extents.len() as u64 * 24,
            limit: u32::MAX.into(),
        })?;
        self.blob.push(tail)?;
        Ok((self.blob, self.index))
    }
}

/// A hash to find duplicates by, or `None` for a page of zeros. It need not resist an attacker:
/// candidates are compared byte by byte, and a page has one candidate.
fn hash_unless_zero(page: &[u8]) -> Option<u64> {
    const K: [u64; 4] = [
        0x9e37_79b9_7f4a_7c15,
        0xc2b2_ae3d_27d4_eb4f,
        0x1656_67b1_9e37_79f9,
        0x27d4_eb2f_1656_67c5,
    ];
    let mut lanes = K;
    let mut any = 0;
    for block in page.chunks_exact(32) {
        for (lane, word) in block.chunks_exact(8).enumerate() {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            let word = u64::from_le_bytes(bytes);
            any |= word;
            lanes[lane] = (lanes[lane] ^ word).wrapping_mul(K[lane] | 1).rotate_left(29);
        }
    }
    (any != 0).then(|| {
        lanes.iter().fold(0, |sum: u64, lane| (sum ^ lane).wrapping_mul(K[0]).rotate_left(31))
    })
}
