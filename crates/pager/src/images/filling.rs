//! Reading a snapshot into a sealed file.

use afresh_memory::{ImageError, SealedImageFile, SealedMemfd};
use afresh_store::{OpenError, Pages, Snapshot};
use afresh_sys::PAGE_SIZE;

use super::message::RefusalReason;
use super::shelf::Filling;

/// Why a snapshot was not made an image.
#[derive(Debug, thiserror::Error)]
pub(super) enum FillError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("the snapshot has another memory than the request names")]
    Digest,
    #[error("the image is refused: {0}")]
    Refused(RefusalReason),
}

/// The pages of `snapshot` in a sealed file. Each page is checked against the digest of its layer
/// when it is read, and the sealed file against the pages that were read.
///
/// The layout is made before the charge. It takes memory in proportion to the index of the
/// snapshot, which the limits for opening a snapshot bound, for two snapshots at a time.
pub(super) fn fill(snapshot: &Snapshot, filling: &mut Filling) -> Result<SealedMemfd, FillError> {
    if snapshot.memory_digest().as_ref() != Some(filling.memory()) {
        return Err(FillError::Digest);
    }
    let layout = SealedImageFile::new(snapshot.pages(), &Pages::occupied(snapshot))?;
    filling.charge(layout.file_pages().saturating_mul(PAGE_SIZE)).map_err(FillError::Refused)?;
    let file = layout.build(|runs, bytes| {
        let mut rest = bytes;
        for run in runs {
            let (part, left) = rest.split_at_mut(run.byte_len());
            snapshot.read(run.start, part)?;
            rest = left;
        }
        Ok::<(), FillError>(())
    })?;
    // With huge pages for all memory files the last one can exceed the length.
    let more = file.file().resident_bytes().saturating_sub(file.bytes());
    filling.charge(more).map_err(FillError::Refused)?;
    Ok(file)
}
