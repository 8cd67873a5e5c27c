//! The contents of a snapshot: a frozen guest as pages and bytes.
//!
//! An adapter of a kind of guest implements [`SnapshotState`] for all that its guests have apart
//! from pages. [`SnapshotContents`] saves, loads and records guests of every kind in the same way.
//!
//! Promises: only a snapshot of the same kind, of a readable version and for features that this
//! host has is loaded, and only with the program whose digest it names. May break it: an adapter
//! that decodes bytes without checking them.

use std::error::Error;
use std::ops::Deref;

use afresh_memory::Image;
use afresh_store::{GuestBuild, Sha256, Snapshot, SnapshotOptions, Store};

use crate::{FreezeError, Options, RestoreError, SnapshotMemory, ThawError};

/// The state of a kind of guest apart from its pages, as snapshots store it.
pub trait SnapshotState: Sized {
    /// Name of the kind of guest.
    const KIND: &'static str;
    /// Version of the encoded state. It changes with each form that older readers cannot decode.
    const ENGINE: &'static str;
    /// Older versions that this one decodes.
    const OLDER_ENGINES: &'static [&'static str] = &[];
    /// Whether the pages include the program, which must have the digest that the snapshot names.
    const INCLUDES_PROGRAM: bool = true;

    /// The kind's own errors of freezing.
    type FreezeCause: Error + Send + Sync + 'static;
    /// The kind's own errors of thawing.
    type ThawCause: Error + Send + Sync + 'static;

    /// blake3 of the program.
    fn program_digest(&self) -> [u8; 32];

    /// CPU features that the guest has seen, and may have acted upon.
    fn cpu_features(&self) -> Vec<String>;

    /// CPU features that this host can show to a guest.
    fn host_cpu_features() -> Vec<String>;

    /// The state as bytes.
    ///
    /// # Errors
    /// [`FreezeError::State`] when it cannot be encoded.
    fn encode(&self) -> Result<Vec<u8>, FreezeError<Self::FreezeCause>>;

    /// The state from the bytes and pages of a snapshot.
    ///
    /// # Errors
    /// [`ThawError::State`] when they do not fit together.
    fn decode(memory: &SnapshotMemory, bytes: &[u8]) -> Result<Self, ThawError<Self::ThawCause>>;

    /// The options with which [`SnapshotContents::load`] opens a snapshot.
    fn load_options(_: &Snapshot, options: &Options) -> Options {
        options.clone()
    }
}

/// A frozen guest, with the methods of its state. Cheap to clone; it shares the memory of the guest
/// it came from.
#[derive(Clone, Debug)]
pub struct SnapshotContents<S> {
    memory: SnapshotMemory,
    state: S,
}

impl<S> Deref for SnapshotContents<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.state
    }
}

impl<S> SnapshotContents<S> {
    /// A guest that was frozen in this process.
    pub fn new(memory: SnapshotMemory, state: S) -> Self {
        Self { memory, state }
    }

    /// The pages.
    #[must_use]
    pub fn memory(&self) -> &SnapshotMemory {
        &self.memory
    }

    /// The pages as an image.
    #[must_use]
    pub fn image(&self) -> &Image {
        self.memory.pages()
    }
}

impl<S: SnapshotState> SnapshotContents<S> {
    /// Everything but the pages, in a form that only the adapter of its kind reads.
    ///
    /// # Errors
    /// [`FreezeError::State`] when it cannot be encoded.
    pub fn bytes(&self) -> Result<Vec<u8>, FreezeError<S::FreezeCause>> {
        self.state.encode()
    }

    /// The guest build that a snapshot of it belongs to.
    #[must_use]
    pub fn build(&self) -> GuestBuild {
        GuestBuild {
            kind: S::KIND.to_owned(),
            module: format!("blake3:{}", blake3::Hash::from(self.state.program_digest()).to_hex()),
            engine: S::ENGINE.to_owned(),
            cpu: self.state.cpu_features(),
        }
    }

    /// Saves it under `name`.
    ///
    /// # Errors
    /// [`FreezeError`]; the name is unchanged then.
    pub fn save(
        &self,
        store: &Store,
        name: &str,
        with: &SnapshotOptions,
    ) -> Result<Sha256, FreezeError<S::FreezeCause>> {
        Ok(self.memory.save(store, name, self.build(), self.bytes()?, with)?)
    }

    /// A guest from the results of [`SnapshotContents::memory`] and [`SnapshotContents::bytes`].
    ///
    /// # Errors
    /// [`ThawError::State`] when they do not fit together.
    pub fn from_parts(
        memory: SnapshotMemory,
        bytes: &[u8],
    ) -> Result<Self, ThawError<S::ThawCause>> {
        let state = S::decode(&memory, bytes)?;
        Ok(Self { memory, state })
    }

    /// Opens a snapshot, lazily: see [`SnapshotMemory::load`].
    ///
    /// # Errors
    /// [`ThawError`]: a snapshot of another kind of guest or for a CPU with more features, a
    /// damaged one, or no memory for it.
    pub fn load(snapshot: Snapshot, options: &Options) -> Result<Self, ThawError<S::ThawCause>> {
        let options = S::load_options(&snapshot, options);
        Self::open(snapshot, |snapshot| SnapshotMemory::load(snapshot, &options))
    }

    /// Opens a snapshot to learn which pages its guest touches: [`SnapshotMemory::touched`] lists
    /// them.
    ///
    /// # Errors
    /// As [`SnapshotContents::load`].
    pub fn record(snapshot: Snapshot) -> Result<Self, ThawError<S::ThawCause>> {
        Self::open(snapshot, SnapshotMemory::record)
    }

    fn open(
        snapshot: Snapshot,
        load: impl FnOnce(Snapshot) -> Result<SnapshotMemory, RestoreError>,
    ) -> Result<Self, ThawError<S::ThawCause>> {
        let saved = snapshot.guest().clone();
        let older = S::OLDER_ENGINES.iter().find(|older| saved.engine == **older);
        snapshot.check_guest(&GuestBuild {
            kind: S::KIND.to_owned(),
            module: saved.module.clone(),
            engine: (*older.unwrap_or(&S::ENGINE)).to_owned(),
            cpu: S::host_cpu_features(),
        })?;
        let bytes = snapshot.state().to_vec();
        let this = Self::from_parts(load(snapshot)?, &bytes)?;
        if S::INCLUDES_PROGRAM && this.build().module != saved.module {
            return Err(ThawError::Program);
        }
        Ok(this)
    }
}
