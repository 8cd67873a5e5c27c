//! How something is opened. The defaults suit a guest that is trusted with time and memory.

use std::path::PathBuf;
#[cfg(shared_images)]
use std::sync::Arc;

#[cfg(shared_images)]
use afresh_pager::images::ImageClient;
use afresh_store::Access;

/// Options and limits of a guest.
///
/// Options of all kinds of guests are methods of this type. Those of one kind are set with
/// [`Options::wasm`], [`Options::vm`] and [`Options::linux`].
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
    /// No limits, no cache, no demands on snapshots, no warm-up.
    pub fn new() -> Self {
        Self::default()
    }

    /// Demands on snapshots: limits, and with the feature `seal` a signature or a key.
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Directory for compiled guests, pages of remote snapshots and OCI images between runs. The
    /// files are native code, so the directory must belong to the embedder. A Wasm guest does not
    /// open if other users can write to it. Without a directory nothing is cached.
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

    /// Gets the memory of snapshots in local stores from an image server (`afresh images`), which
    /// processes of a host share. A snapshot that the server does not have yet opens as without a
    /// server.
    #[cfg(shared_images)]
    pub fn images(mut self, client: Arc<ImageClient>) -> Self {
        self.pager.images = Some(client);
        self
    }
}
