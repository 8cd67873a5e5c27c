//! The identity of the memory of a snapshot.

use crate::{Layer, Snapshot};

/// Domain of the digest.
const CONTEXT: &str = "afresh 2026-11 memory of a stack of layers version 1";

impl Snapshot {
    /// Digest of the memory: of its size and the roots of its layers. Snapshots with the same
    /// digest have the same pages, however their layers are encoded and whatever their state is.
    /// Other snapshots can have the same pages.
    ///
    /// `None` for a sealed snapshot, whose pages are secret, and for one with turns.
    #[must_use]
    pub fn memory_digest(&self) -> Option<[u8; 32]> {
        if self.key().is_some() || self.turned().is_some() {
            return None;
        }
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        hasher.update(&(self.pages() as u64).to_le_bytes());
        self.layers().iter().map(Layer::root).for_each(|root| {
            hasher.update(root);
        });
        Some(*hasher.finalize().as_bytes())
    }
}
