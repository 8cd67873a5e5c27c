//! The hash of one blob. A blob that stays small is hashed by its writer, and any other by a
//! thread, or by the writer where no processor is free for a thread or none can be started.
//!
//! Most blobs of a snapshot are small: configuration, manifest, turns. Starting a thread and
//! waiting for it takes longer than hashing one of them.
//!
//! Promises: the digest is the same either way.

use std::io;
use std::sync::Arc;

use super::lanes::LaneHasher;
use super::{BlobHasher, Hash};
use crate::Sha256;

/// Maximum bytes that the writer hashes of a blob that may have a thread.
const MAX_SMALL: usize = 64 << 10;

/// The hash of a blob that is being written.
pub(crate) struct BlobHash(Hasher);

enum Hasher {
    Writer {
        hash: Hash,
        len: usize,
        /// The length from which on a thread hashes.
        max: usize,
        recycled: Arc<Vec<u8>>,
    },
    Lane(LaneHasher),
    Thread(BlobHasher),
}

impl Hasher {
    fn of_writer(max: usize) -> Self {
        Self::Writer { hash: Hash::new(), len: 0, max, recycled: Arc::default() }
    }
}

impl BlobHash {
    pub(crate) fn new() -> Self {
        Self(Hasher::of_writer(MAX_SMALL))
    }

    /// The hash of a blob that its writer hashes, whatever its length.
    pub(crate) fn of_writer() -> Self {
        Self(Hasher::of_writer(usize::MAX))
    }

    /// The hashes of two blobs that one thread writes by turns and hashes.
    pub(crate) fn lanes() -> [Self; 2] {
        LaneHasher::pair().map(|lane| Self(Hasher::Lane(lane)))
    }

    /// The hashes of two blobs that are written at the same time, in one thread.
    pub(crate) fn pair() -> io::Result<[Self; 2]> {
        Ok(BlobHasher::pair()?.map(|hashing| Self(Hasher::Thread(hashing))))
    }

    /// A buffer that was hashed and that the writer has no more, with any content.
    pub(crate) fn recycled(&mut self) -> Vec<u8> {
        let buffer = match &mut self.0 {
            Hasher::Writer { recycled, .. } => std::mem::take(recycled),
            Hasher::Lane(lane) => lane.recycled(),
            Hasher::Thread(hashing) => hashing.recycled(),
        };
        Arc::try_unwrap(buffer).unwrap_or_default()
    }

    /// Appends bytes, which a thread hashes while the writer writes them. Returns whether they will
    /// be hashed.
    pub(crate) fn push(&mut self, bytes: Arc<Vec<u8>>) -> bool {
        if let Hasher::Writer { hash, len, max, recycled } = &mut self.0 {
            let is_large = len.saturating_add(bytes.len()) > *max;
            match is_large.then(|| BlobHasher::one(hash.clone())) {
                Some(Ok(hashing)) => self.0 = Hasher::Thread(hashing),
                no_thread => {
                    if no_thread.is_some() {
                        // None can be started: the writer hashes all.
                        *max = usize::MAX;
                    }
                    hash.update(&bytes);
                    *len = len.saturating_add(bytes.len());
                    *recycled = bytes;
                    return true;
                }
            }
        }
        match &self.0 {
            Hasher::Writer { .. } => true,
            Hasher::Lane(lane) => {
                lane.push(bytes);
                true
            }
            Hasher::Thread(hashing) => hashing.push(bytes),
        }
    }

    /// No more bytes come, so that the hash can be completed while others are waited for.
    pub(crate) fn close(&self) {
        if let Hasher::Thread(hashing) = &self.0 {
            hashing.close();
        }
    }

    /// The digest of the closed blob; `None` if its thread has ended before.
    pub(crate) fn finish(&mut self) -> Option<Sha256> {
        match &mut self.0 {
            Hasher::Writer { hash, .. } => Some(std::mem::replace(hash, Hash::new()).finish()),
            Hasher::Lane(lane) => lane.finish(),
            Hasher::Thread(hashing) => hashing.finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blob_has_the_same_digest_wherever_it_is_hashed() {
        let bytes: Vec<u8> = (0..3 * MAX_SMALL).map(|at| (at / 7) as u8).collect();
        for len in [0, 1, MAX_SMALL, MAX_SMALL + 1, bytes.len()] {
            for piece in [1000, MAX_SMALL, bytes.len()] {
                let mut hash = BlobHash::new();
                for part in bytes[..len].chunks(piece) {
                    assert!(hash.push(Arc::new(part.to_vec())));
                }
                hash.close();
                assert_eq!(matches!(hash.0, Hasher::Writer { .. }), len <= MAX_SMALL);
                assert_eq!(hash.finish(), Some(Sha256::of(&bytes[..len])), "{len} by {piece}");
            }
        }
    }
}
