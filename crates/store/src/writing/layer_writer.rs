//! Writes a page layer: finds zero and duplicate pages, digests groups, builds the index.

mod segments;

use std::collections::HashMap;

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::blobs::file::BlobWriter;
use crate::format::index::{
    Encoding, Extent, GROUP_PAGES, Index, MAX_INDEX, MAX_PAGES, Role, ZSTD_LEVEL,
};
use crate::layers::blob_sink::BlobSink;
use crate::seal::SealKey;
use crate::{Pages, SaveError, Sha256, Snapshot};

pub(crate) use segments::write_base;

const GROUP_BYTES: usize = GROUP_PAGES as usize * PAGE_SIZE;
/// Maximum stored pages written at a time: 1 MiB, in whole groups. No more pages are read at a
/// time.
const MAX_BATCH: usize = 16 * GROUP_PAGES as usize;
/// Pages of a small delta that are written at a time: while they are hashed and written, the next
/// ones are read.
const SMALL_BATCH: usize = 4 * GROUP_PAGES as usize;
/// Maximum pages of a small delta.
const MAX_SMALL: usize = 4 * MAX_BATCH;

/// What to write.
pub(crate) struct Plan<'a> {
    pub(crate) role: Role,
    pub(crate) encoding: Encoding,
    /// Pages to look at, in order and without overlap; others are left to the layer below.
    pub(crate) candidates: Vec<PageRange>,
    /// The memory below a delta; pages that equal it are left out.
    pub(crate) below: Option<&'a Snapshot>,
    /// Root of the layer below.
    pub(crate) parent: [u8; 32],
    /// The key that seals the layer.
    pub(crate) key: Option<&'a SealKey>,
}

/// The pages of a layer that were not looked at yet.
struct Candidates<'a> {
    ranges: &'a [PageRange],
    /// Pages of the first range that were taken.
    taken: usize,
}

impl<'a> Candidates<'a> {
    fn new(ranges: &'a [PageRange]) -> Self {
        Self { ranges, taken: 0 }
    }

    /// The next pages, at most `room` consecutive ones; `None` at the end.
    fn take(&mut self, room: usize) -> Option<PageRange> {
        loop {
            let (first, others) = self.ranges.split_first()?;
            let len = room.min(first.len - self.taken);
            let part = PageRange::new(first.start + self.taken, len);
            self.taken += len;
            if self.taken == first.len {
                (self.ranges, self.taken) = (others, 0);
            }
            if len > 0 {
                return Some(part);
            }
        }
    }
}

/// A layer that was written.
pub(crate) struct WrittenLayer {
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
    /// Room for a batch: stored pages that are not yet written, then pages being looked at. Empty
    /// until the first of them.
    batch: Vec<u8>,
    /// Bytes of stored pages in `batch`.
    pending: usize,
    /// Pages of a full batch.
    batch_pages: usize,
    /// Hash of a stored page to where it is stored and where it came from.
    seen: HashMap<u64, (u64, usize)>,
    scratch: Vec<u8>,
    /// Whether pages of zeros are named in the index, to hide those below.
    names_zeros: bool,
    compressor: Option<zstd::bulk::Compressor<'static>>,
}

/// Writes the layer that `plan` describes, with pages read from `source`. The manifest that follows
/// makes it durable and gives it its name.
pub(crate) fn write_layer(
    shelf: &mut dyn BlobSink,
    source: &dyn Pages,
    plan: &Plan<'_>,
) -> Result<WrittenLayer, SaveError> {
    let mut writer = Writer::begin(shelf, source, plan)?;
    if plan.below.is_none() {
        writer.expect(&plan.candidates);
    }
    writer.fill(&plan.candidates, plan.below)?;
    let (blob, index) = writer.finish(plan.parent)?;
    let (digest, size) = shelf.hold(blob)?;
    Ok(WrittenLayer { digest, size, index, sealed: plan.key.is_some() })
}

/// Pages that the writer of `plan` writes at a time.
fn batch_pages(plan: &Plan<'_>) -> usize {
    let pages = || plan.candidates.iter().map(|range| range.len).sum::<usize>();
    if plan.role == Role::Delta && pages() <= MAX_SMALL { SMALL_BATCH } else { MAX_BATCH }
}

impl<'a> Writer<'a> {
    /// Begins the blob of the layer that `plan` describes.
    fn begin(
        shelf: &mut dyn BlobSink,
        source: &'a dyn Pages,
        plan: &Plan<'_>,
    ) -> Result<Self, SaveError> {
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
        // Sealed pages are never mapped, so they may be anywhere.
        let mappable = plan.key.is_none().then_some((plan.encoding, pages));
        let blob = shelf.begin(mappable)?.sealed(plan.key)?;
        let index = Index {
            role: plan.role,
            group_pages: GROUP_PAGES,
            pages,
            stored: 0,
            extents: Vec::new(),
            groups: Vec::new(),
            parent: [0; 32],
            root: [0; 32],
            encoding: plan.encoding,
            chunks: Vec::new(),
        };
        Ok(Self {
            source,
            batch: Vec::new(),
            pending: 0,
            batch_pages: batch_pages(plan),
            blob,
            index,
            data_len: 0,
            seen: HashMap::new(),
            scratch: vec![0; PAGE_SIZE],
            // The bottom layer says nothing about zero pages.
            names_zeros: plan.role != Role::Base,
            compressor,
        })
    }

    /// Allocates blocks ahead for the pages in `candidates`, most of which will be stored.
    fn expect(&mut self, candidates: &[PageRange]) {
        if self.compressor.is_none() {
            self.blob.expect(candidates.iter().map(|range| range.byte_len() as u64).sum());
        }
    }

    /// Stores those of the pages in `candidates` that differ from the ones in `below`.
    fn fill(
        &mut self,
        candidates: &[PageRange],
        below: Option<&Snapshot>,
    ) -> Result<(), SaveError> {
        let mut under = vec![0; if below.is_some() { self.batch_pages * PAGE_SIZE } else { 0 }];
        let mut candidates = Candidates::new(candidates);
        while let Some(range) = candidates.take(self.room()) {
            let under = match below {
                None => None,
                Some(below) => {
                    let under = &mut under[..range.byte_len()];
                    below.read_padded(range.start, under)?;
                    Some(&*under)
                }
            };
            self.pages(range.start, range.len, under)?;
        }
        Ok(())
    }

    /// Pages that can be looked at before the batch must be written; at least one.
    fn room(&self) -> usize {
        self.batch_pages - self.pending / PAGE_SIZE
    }

    /// Stores the changed ones of the `count` pages from `first` on, for which there is room;
    /// `under` has the pages below them. Pages are read into their place in the batch, so that one
    /// which is stored is copied once, and everything that looks at it finds it in the cache.
    fn pages(&mut self, first: usize, count: usize, under: Option<&[u8]>) -> Result<(), SaveError> {
        let start = self.pending;
        let end = start + count * PAGE_SIZE;
        if self.batch.is_empty() {
            self.batch = self.blob.buffer(self.batch_pages * PAGE_SIZE);
        }
        self.source.read(first, &mut self.batch[start..end]).map_err(SaveError::Source)?;
        for n in 0..count {
            let at = start + n * PAGE_SIZE;
            let page = &self.batch[at..at + PAGE_SIZE];
            if under.is_some_and(|under| under[n * PAGE_SIZE..][..PAGE_SIZE] == *page) {
                continue;
            }
            if self.is_new(first + n, at)? {
                if at != self.pending {
                    self.batch.copy_within(at..at + PAGE_SIZE, self.pending);
                }
                self.pending += PAGE_SIZE;
                if self.pending.is_multiple_of(GROUP_BYTES) {
                    let group = &self.batch[self.pending - GROUP_BYTES..self.pending];
                    self.index.groups.push(blake3::hash(group).into());
                }
            }
        }
        if self.room() == 0 { self.flush() } else { Ok(()) }
    }

    /// Enters page `number`, at byte `at` of the batch, in the index. Returns whether it must be
    /// stored.
    fn is_new(&mut self, number: usize, at: usize) -> Result<bool, SaveError> {
        let page = &self.batch[at..at + PAGE_SIZE];
        let Some(hash) = hash_unless_zero(page) else {
            if self.names_zeros {
                self.extend(number as u64, None);
            }
            return Ok(false);
        };
        if let Some((stored, original)) = self.seen.get(&hash).copied() {
            self.source.read(original, &mut self.scratch).map_err(SaveError::Source)?;
            if self.scratch == page {
                self.extend(number as u64, Some(stored));
                return Ok(false);
            }
        }
        let stored = self.index.stored;
        self.seen.insert(hash, (stored, number));
        self.index.stored += 1;
        self.extend(number as u64, Some(stored));
        Ok(true)
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

    /// Writes the stored pages of the batch, which are whole groups but at the end.
    fn flush(&mut self) -> Result<(), SaveError> {
        if self.pending == 0 {
            return Ok(());
        }
        let mut data = std::mem::take(&mut self.batch);
        data.truncate(self.pending);
        self.pending = 0;
        if let Some(compressor) = &mut self.compressor {
            let mut compressed = Vec::new();
            for bytes in data.chunks(GROUP_BYTES) {
                let frame = compressor.compress(bytes).map_err(SaveError::Compress)?;
                self.index.chunks.push(frame.len() as u32);
                compressed.extend_from_slice(&frame);
            }
            data = compressed;
        }
        self.data_len += data.len() as u64;
        self.blob.push(data)
    }

    /// Writes the remaining pages, and the index over the layer with the root `parent`. The blob is
    /// complete then.
    fn finish(mut self, parent: [u8; 32]) -> Result<(BlobWriter, Index), SaveError> {
        let partial = &self.batch[self.pending / GROUP_BYTES * GROUP_BYTES..self.pending];
        if !partial.is_empty() {
            self.index.groups.push(blake3::hash(partial).into());
        }
        self.flush()?;
        self.index.parent = parent;
        self.index.seal();
        let tail = self.index.tail(self.data_len).map_err(|_| SaveError::TooLarge {
            what: "a layer index",
            size: self.index.extents.len() as u64 * 24,
            limit: MAX_INDEX,
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
    // Wide products: compilers do not turn them into vector code, which is slower here.
    let fold = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        product as u64 ^ (product >> 64) as u64
    };
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    let mut lanes = K;
    let mut any = 0;
    for block in page.chunks_exact(64) {
        for (lane, pair) in block.chunks_exact(16).enumerate() {
            let (a, b) = (word(&pair[..8]), word(&pair[8..]));
            any |= a | b;
            lanes[lane] = fold(lanes[lane] ^ a, K[lane] ^ b) ^ b;
        }
    }
    (any != 0).then(|| lanes.iter().fold(K[0], |sum, lane| fold(sum ^ lane, K[1])))
}
