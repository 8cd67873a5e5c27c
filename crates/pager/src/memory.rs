//! The memory of a guest on its way into a snapshot or out of one: what is common to all guests.
//!
//! A guest adapter brings an image of its pages, its own bytes and its build; it gets them back,
//! with an image that fills itself while guests run on it.

use std::sync::Arc;
use std::time::Duration;

use afresh_memory::Image;
use afresh_store::{GuestBuild, Limits, SaveRequest, Sha256, Snapshot, SnapshotOptions, Store};
use afresh_sys::PageRange;

use crate::error::SaveMemoryError;
use crate::{LazyImage, Options, PageSource, RestoreError, SnapshotSource};

/// The pages of a frozen guest. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SnapshotMemory {
    pages: Image,
    filling: Option<LazyImage>,
    limits: Limits,
}

impl From<Image> for SnapshotMemory {
    fn from(pages: Image) -> Self {
        Self { pages, filling: None, limits: Limits::default() }
    }
}

impl SnapshotMemory {
    /// The pages.
    #[must_use]
    pub fn pages(&self) -> &Image {
        &self.pages
    }

    /// The limits that the snapshot was opened with.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Saves the pages, and the guest's own `state`, under `name`.
    ///
    /// # Errors
    /// [`SaveMemoryError`]; the name means then what it meant before.
    pub fn save(
        &self,
        store: &Store,
        name: &str,
        build: GuestBuild,
        state: Vec<u8>,
        with: &SnapshotOptions,
    ) -> Result<Sha256, SaveMemoryError> {
        if with.parent.is_none() || with.changed.is_none() {
            self.pages.complete()?;
        }
        // A guest's image knows its changes.
        let options = SnapshotOptions { compared: true, ..with.clone() };
        Ok(store.save(name, &self.pages, &SaveRequest { guest: build, state, options })?)
    }

    /// Opens the pages of a snapshot; they are fetched, and checked, when they are touched and
    /// behind the guest's back (see [`LazyImage`]). Where the host lacks what it takes, they are
    /// read at once. An image server that has the pages passes them complete, if the options name
    /// one.
    ///
    /// # Errors
    /// [`RestoreError`] when the working set is damaged or memory runs out.
    pub fn load(snapshot: Snapshot, options: &Options) -> Result<Self, RestoreError> {
        #[cfg(all(target_os = "linux", not(afresh_portable)))]
        if let Some(pages) = options.images.as_ref().and_then(|images| images.image(&snapshot)) {
            return Ok(Self { pages, filling: None, limits: *snapshot.limits() });
        }
        Self::open(snapshot, |source| LazyImage::start(source, options))
    }

    /// Opens a snapshot to learn which pages its guest touches.
    ///
    /// # Errors
    /// As [`SnapshotMemory::load`].
    pub fn record(snapshot: Snapshot) -> Result<Self, RestoreError> {
        Self::open(snapshot, LazyImage::record)
    }

    fn open(
        snapshot: Snapshot,
        start: impl FnOnce(Arc<dyn PageSource>) -> Result<LazyImage, RestoreError>,
    ) -> Result<Self, RestoreError> {
        let limits = *snapshot.limits();
        let filling = start(Arc::new(SnapshotSource::new(snapshot)))?;
        Ok(Self { pages: filling.image().clone(), filling: Some(filling), limits })
    }

    /// The pages that are in place: of a snapshot that is recorded, those that were touched.
    #[must_use]
    pub fn touched(&self) -> Vec<PageRange> {
        self.filling.as_ref().map(LazyImage::touched).unwrap_or_default()
    }

    /// Number of answered faults on missing pages.
    #[must_use]
    pub fn faults(&self) -> usize {
        self.filling.as_ref().map_or(0, LazyImage::faults)
    }

    /// Waits until all pages are in place and nothing of the snapshot is needed any more.
    ///
    /// # Errors
    /// [`RestoreError::Failed`] with the cause, [`RestoreError::Timeout`] while it continues.
    pub fn wait(&self, timeout: Duration) -> Result<(), RestoreError> {
        self.filling.as_ref().map_or(Ok(()), |filling| filling.wait(timeout))
    }
}
