//! Why a restore failed, and how its guest finds out.

use std::io;

use afresh_memory::ImageError;
use afresh_store::{OpenError, SaveError};
use afresh_sys::SysError;

/// A page source could not deliver pages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The operating system refused.
    #[error(transparent)]
    Sys(#[from] SysError),
    /// The snapshot is damaged or cannot be read.
    #[error(transparent)]
    Snapshot(#[from] OpenError),
    /// Reading failed.
    #[error("reading pages: {0}")]
    Io(#[from] io::Error),
    /// A file is not what it was when it was opened.
    #[error(
        "the file was changed while it was in use; write to a new file and rename it over the old one"
    )]
    Changed,
    /// The source has fewer pages than asked for.
    #[error("the source has {pages} pages, fewer than the {wanted} asked for")]
    TooShort {
        /// Pages it has.
        pages: usize,
        /// Pages wanted.
        wanted: usize,
    },
}

/// Memory could not be restored.
///
/// After an error nothing of the memory can be read: a guest that touches it gets SIGSEGV, never
/// zeros or a part of its pages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// A system call failed while the restore was set up.
    #[error("setting up the restore: {0}")]
    Sys(#[from] SysError),
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The image that was to be filled could not be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The strategy cannot be used for this source or on this host.
    #[error("strategy `{strategy}` cannot be used here: {why}")]
    Unsupported {
        /// The strategy.
        strategy: &'static str,
        /// Why, and what to use instead.
        why: String,
    },
    /// A page could not be filled while the guest ran.
    #[error("the memory was closed because a page could not be filled: {0}")]
    Failed(String),
    /// Waiting took longer than allowed; the restore continues.
    #[error("the restore has not finished after {0:?}")]
    Timeout(std::time::Duration),
}

/// Freezing or saving a guest failed; `E` is the error of its kind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreezeError<E: std::error::Error + 'static> {
    /// The state cannot be kept.
    #[error("the guest cannot be frozen: {0}")]
    State(String),
    /// The present state could not be read.
    #[error(transparent)]
    Guest(E),
    /// Its pages are not all there, or could not be stored.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The snapshot could not be written.
    #[error(transparent)]
    Save(#[from] SaveMemoryError),
}

/// Making a guest out of a frozen one failed; `E` is the error of its kind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ThawError<E: std::error::Error + 'static> {
    /// The snapshot is damaged, or of another kind of guest.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its pages could not be fetched.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// Pages that are needed at once will never be there.
    #[error(transparent)]
    Image(ImageError),
    /// The state is damaged, or does not fit.
    #[error("the frozen state cannot be used: {0}")]
    State(String),
    /// The program is not the one that was frozen.
    #[error("the snapshot's program does not have the digest it was frozen with")]
    Program,
    /// The guest cannot be made here.
    #[error(transparent)]
    Guest(E),
}

/// Saving a frozen guest failed; the name means what it meant before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveMemoryError {
    /// Its pages are not all there.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The snapshot could not be written.
    #[error(transparent)]
    Save(#[from] SaveError),
}
