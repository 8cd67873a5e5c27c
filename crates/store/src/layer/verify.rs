//! Checks a whole layer: its pages against the index, its bytes against the name of the blob.

use std::ops::Range;

use afresh_sys::PAGE_SIZE;
use sha2::Digest;

use super::{BATCH_GROUPS, Layer};
use crate::index::Encoding;
use crate::{LayerError, OpenError, Sha256};

/// Bytes read at a time where there are no groups.
const PIECE: u64 = 1 << 20;

impl Layer {
    /// Checks every byte of the blob, which is read once and in order, whatever was checked before:
    /// each group against its digest, and all of it against the SHA-256 that names it. `progress` is told
    /// the bytes done. A sealed blob is read twice, for its digest is that of the sealed bytes.
    ///
    /// # Errors
    /// [`OpenError::Layer`] with the first damage.
    pub fn check(&self, progress: &mut dyn FnMut(u64)) -> Result<(), OpenError> {
        let mut hasher = sha2::Sha256::new();
        let (mut bytes, mut pages) = (Vec::new(), Vec::new());
        let groups = self.index.groups.len();
        let mut at = 0;
        for first in (0..groups).step_by(BATCH_GROUPS) {
            let batch = first..(first + BATCH_GROUPS).min(groups);
            let range = self.bytes_of(&batch);
            let checked = self.check_batch(batch.clone(), &mut bytes, &mut pages);
            match checked {
                // Asked for once more where that may bring others.
                Err(OpenError::Layer { .. })
                    if self.blob.distrust(range.start, range.end - range.start) =>
                {
                    self.check_batch(batch, &mut bytes, &mut pages)?;
                }
                other => other?,
            }
            if self.key.is_none() {
                hasher.update(&bytes);
                at = range.end;
                progress(at);
            }
        }
        // What follows the pages.
        while at < self.size() {
            bytes.resize(PIECE.min(self.size() - at) as usize, 0);
            self.blob().read_at(&mut bytes, at).map_err(|e| self.io(e))?;
            hasher.update(&bytes);
            at += bytes.len() as u64;
            progress(at);
        }
        if Sha256(hasher.finalize().into()) != self.digest {
            return Err(self.bad(LayerError::Name));
        }
        Ok(())
    }

    /// Reads the bytes of whole groups and checks their pages.
    fn check_batch(
        &self,
        groups: Range<usize>,
        bytes: &mut Vec<u8>,
        pages: &mut Vec<u8>,
    ) -> Result<(), OpenError> {
        let range = self.bytes_of(&groups);
        bytes.resize((range.end - range.start) as usize, 0);
        self.blob.read_at(bytes, range.start).map_err(|e| self.io(e))?;
        match self.encoding() {
            Encoding::Raw => self.check_groups(groups, &[], bytes),
            Encoding::Zstd => {
                let first = self.index.group_range(groups.start).start;
                let end = self.index.group_range(groups.end - 1).end;
                pages.resize((end - first) as usize * PAGE_SIZE, 0);
                self.check_groups(groups, bytes, pages)
            }
        }
    }
}
