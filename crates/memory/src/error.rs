//! Errors, one type per operation.

use afresh_sys::SysError;

/// Building or deriving an image failed; nothing was created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// A segment or page range is outside the image.
    #[error("bytes {offset}..{offset}+{len} are outside an image of {image} bytes")]
    OutOfBounds {
        /// Offset of the first byte.
        offset: usize,
        /// Number of bytes.
        len: usize,
        /// Length of the image in bytes.
        image: usize,
    },
    /// The source could not be read.
    #[error("reading the image's content failed: {0}")]
    Read(#[source] std::io::Error),
    /// Content of a lazily filled image is lost.
    #[error("the image's content could not be fetched: {0}")]
    Filler(String),
    /// Another process wrote to the file of the image before it was sealed.
    #[error("another process wrote to the file of the image: find it among those of this user")]
    Altered,
    /// The kernel refused.
    #[error("storing the image failed: {0}")]
    System(#[from] SysError),
}

/// Creating, growing or accessing a slot failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The image or a region does not fit the slot's capacity.
    #[error("{pages} pages do not fit a slot of {capacity} pages: raise the slot's capacity")]
    TooLarge {
        /// Pages asked for.
        pages: usize,
        /// Pages the slot can hold.
        capacity: usize,
    },
    /// Bytes outside the accessible part of the slot.
    #[error("bytes {offset}..{offset}+{len} are outside the slot's accessible memory")]
    OutOfBounds {
        /// Offset of the first byte.
        offset: usize,
        /// Number of bytes.
        len: usize,
    },
    /// Regions overlap or are out of order.
    #[error("regions must be sorted, disjoint and not empty")]
    Regions,
    /// The image has content outside every region.
    #[error("the image stores page {page}, which no region of the slot holds")]
    ImageOutsideRegions {
        /// The first such page.
        page: usize,
    },
    /// The slot failed earlier and must not be used again.
    #[error("the slot is quarantined: {reason}")]
    Quarantined {
        /// The cause.
        reason: String,
    },
    /// The strategy needs a feature that this host lacks.
    #[error("strategy {strategy} is not available here: {reason}")]
    Unavailable {
        /// The requested strategy.
        strategy: String,
        /// Which feature is missing, and why.
        reason: String,
    },
    /// The image's content is lost, or could not be stored.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Write tracking failed.
    #[error(transparent)]
    Track(#[from] TrackError),
    /// The kernel refused.
    #[error("mapping the slot failed: {0}")]
    System(#[from] SysError),
}

/// Write tracking failed. The slot is quarantined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackError {
    /// The kernel refused.
    #[error("tracking writes failed: {0}")]
    System(#[from] SysError),
    /// A backend of another crate failed.
    #[error("tracking writes failed: {0}")]
    Backend(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// A reset failed. The slot is quarantined: its content is unknown and it refuses further use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// The slot had failed before.
    #[error("the slot is quarantined: {reason}")]
    Quarantined {
        /// The cause.
        reason: String,
    },
    /// The image's content is lost.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Write tracking failed.
    #[error(transparent)]
    Track(#[from] TrackError),
    /// The kernel refused.
    #[error("resetting the slot failed: {0}")]
    System(#[from] SysError),
    /// The comparison after a reset found a byte that differs from the image.
    #[error("after the reset, page {page} differs from the image: the slot is quarantined")]
    Mismatch {
        /// The first such page.
        page: usize,
    },
}

impl ResetError {
    /// The kind of the error as one word, a label for monitoring.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Quarantined { .. } => "quarantined",
            Self::Image(_) => "image",
            Self::Track(_) => "tracking",
            Self::System(_) => "system",
            Self::Mismatch { .. } => "difference",
        }
    }
}
