//! How something is opened. The defaults suit a guest that is trusted with time and memory.

use std::path::PathBuf;
#[cfg(shared_images)]
use std::sync::Arc;

#[cfg(shared_images)]
use afresh_pager::images::ImageClient;
use afresh_store::Access;

/// Options and limits of a guest.
///
/// Options that every kind of guest has are set here; those of one kind go to the crate below
/// ([`Options::wasm`], [`Options::vm`], [`Options::linux`]).
#[derive(Clone, Default)]
#[must_use]
pub struct Options {
    pub(crate) access: Access,
    pub(crate) cache: Option<PathBuf>,
    pub(crate) page_cache: Option<PathBuf>,
    pub(crate) pager: afresh_pager::Options,
    #[cfg(feature = "guests")]
    pub(crate) guest: crate::guests::GuestOptions,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("cache", &self.cache)
            .field("page_cache", &self.page_cache)
            .finish_non_exhaustive()
    }
}

impl Options {
    /// No limits, no cache, nothing demanded, no warm-up.
    pub fn new() -> Self {
        Self::default()
    }

    /// Demands on snapshots: limits, and with the feature `seal` a signature or a key.
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Directory for compiled guests, pages of remote snapshots and OCI images between runs. The
    /// files are native code, so the directory must be the embedder's own, and opening a Wasm guest
    /// fails where other users can write to it. Nothing is kept if not set.
    pub fn cache(mut self, dir: impl Into<PathBuf>) -> Self {
        self.cache = Some(dir.into());
        self
    }

    /// Directory for pages of remote snapshots, if not `pages` below [`Options::cache`]. Any number
    /// of processes may share it.
    pub fn cache_pages(mut self, dir: impl Into<PathBuf>) -> Self {
        self.page_cache = Some(dir.into());
        self
    }

    /// Takes the memory of snapshots in local stores from an image server (`afresh images`), which
    /// passes processes of one host the same memory. A snapshot that the server does not have yet
    /// opens as without one.
    #[cfg(shared_images)]
    pub fn images(mut self, client: Arc<ImageClient>) -> Self {
        self.pager.images = Some(client);
        self
    }
}
