//! Changes how a layer's pages are stored. Its root stays the same, so a configuration fits both.

use afresh_sys::PAGE_SIZE;

use crate::format::index::{Encoding, MAX_INDEX, ZSTD_LEVEL};
use crate::layers::blob_sink::BlobSink;
use crate::writing::layer_writer::WrittenLayer;
use crate::{Layer, SaveError};

/// Groups handled at a time.
const BATCH: u64 = 16;

/// Writes the pages of `layer`, checking each, to a new blob of `shelf`.
pub(crate) fn transcode(
    shelf: &mut dyn BlobSink,
    layer: &Layer,
    encoding: Encoding,
) -> Result<WrittenLayer, SaveError> {
    let mut index = layer.index().clone();
    index.encoding = encoding;
    index.chunks.clear();
    let mut compressor = match encoding {
        Encoding::Raw => None,
        Encoding::Zstd => {
            Some(zstd::bulk::Compressor::new(ZSTD_LEVEL).map_err(SaveError::Compress)?)
        }
    };
    // A sealed layer stays sealed, with a new key under the same key of the user.
    let mut blob = shelf.begin(None)?.sealed(layer.key())?;
    let group_bytes = layer.group_pages() * PAGE_SIZE;
    let step = BATCH * layer.group_pages() as u64;
    let mut data_len = 0;
    for first in (0..index.stored).step_by(step as usize) {
        let pages = step.min(index.stored - first) as usize;
        let mut data = blob.buffer(pages * PAGE_SIZE);
        layer.read(first, &mut data)?;
        if let Some(compressor) = &mut compressor {
            let mut compressed = Vec::new();
            for group in data.chunks(group_bytes) {
                let frame = compressor.compress(group).map_err(SaveError::Compress)?;
                index.chunks.push(frame.len() as u32);
                compressed.extend_from_slice(&frame);
            }
            data = compressed;
        }
        data_len += data.len() as u64;
        blob.push(data)?;
    }
    let tail = index.tail(data_len).map_err(|_| SaveError::TooLarge {
        what: "a layer index",
        size: index.extents.len() as u64 * 24,
        limit: MAX_INDEX,
    })?;
    blob.push(tail)?;
    let (digest, size) = shelf.end(blob)?;
    Ok(WrittenLayer { digest, size, index, sealed: layer.key().is_some() })
}
