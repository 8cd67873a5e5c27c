//! Checks a whole layer: its pages against the index, its bytes against the name of the blob.

use sha2::Digest;

use super::{BATCH_GROUPS, Layer};
use crate::index::Encoding;
use crate::{LayerError, OpenError, Sha256};
use afresh_sys::PAGE_SIZE;

/// Bytes read at a time where there are no groups.
const PIECE: u64 = 1 << 20;

impl Layer {
    /// Checks every byte of the blob, which is read once and in order, whatever was checked before:
    /// each group against its digest, and all of it against the SHA-256 that names it. `progress` is told
    /// the bytes done.
    ///
    /// # Errors
    /// [`OpenError::Layer`] with the first damage.
    pub fn check(&self, progress: &mut dyn FnMut(u64)) -> Result<(), OpenError> {
        let mut hasher = sha2::Sha256::new();
        let (mut pages, mut frames) = (Vec::new(), Vec::new());
        let groups = self.index.groups.len();
        let mut at = 0;
        for first in (0..groups).step_by(BATCH_GROUPS) {
            let batch = first..(first + BATCH_GROUPS).min(groups);
            let start = self.index.group_range(batch.start).start;
            let end = self.index.group_range(batch.end - 1).end;
            pages.resize((end - start) as usize * PAGE_SIZE, 0);
            at = self.bytes_of(&batch).end;
            self.read_groups(batch, &mut pages, &mut frames)?;
            hasher.update(match self.encoding() {
                Encoding::Raw => &pages,
                Encoding::Zstd => &frames,
            });
            progress(at);
        }
        // What follows the pages.
        while at < self.size() {
            frames.resize(PIECE.min(self.size() - at) as usize, 0);
            self.blob.read_at(&mut frames, at).map_err(|e| self.io(e))?;
            hasher.update(&frames);
            at += frames.len() as u64;
            progress(at);
        }
        if Sha256(hasher.finalize().into()) != self.digest {
            return Err(self.bad(LayerError::Name));
        }
        Ok(())
    }
}
