//! Bytes of layers that are stored elsewhere.

/// Where the bytes of stored layers are: the pages that [`crate::StoredLayers::read`] gave, one
/// after the other.
pub trait LayerBytes: std::fmt::Debug + Send + Sync {
    /// Reads the bytes at `at`.
    ///
    /// # Errors
    /// The reason why they cannot be read, as text.
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<(), String>;
}
