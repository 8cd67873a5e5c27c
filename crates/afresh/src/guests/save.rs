//! Saving: a warm guest, or its state after calls, becomes a snapshot in a directory, an archive or
//! a remote.

use afresh_memory::{Features, PageRange};
use afresh_pager::{Recorder, SnapshotOptions};
use afresh_store::{
    Access, Encoding, FoldOptions, Journal, ReplacedName, Sha256, Snapshot, Store, Turn, archive,
};

use super::backend::{FrozenGuest, LiveInstance, WarmGuest, dispatch};
use super::keys::SaveKeys;
use super::remote_saves::push;
use super::temp_dir::TempDir;
use super::{Call, Guest, Lease, SaveError, SavePoint, SavePreparation};
use crate::{Cause, LATEST, Options, Place, Reference, ReferenceError};

/// Options of saving a guest.
#[derive(Clone, Debug)]
#[must_use]
pub struct SaveOptions {
    encoding: Encoding,
    record: Vec<Call>,
    pub(super) keys: SaveKeys,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self { encoding: Encoding::Raw, record: Vec::new(), keys: Default::default() }
    }
}

impl SaveOptions {
    /// Raw pages, no working set, neither signed nor sealed.
    pub fn new() -> Self {
        Self::default()
    }

    /// Encoding of the pages: raw ones open faster, compressed ones are smaller.
    pub fn encoding(mut self, encoding: Encoding) -> Self {
        self.encoding = encoding;
        self
    }

    /// Adds a call that records the working set. It starts from the warm state, and its pages are
    /// read first when the snapshot is opened.
    pub fn record(mut self, call: Call) -> Self {
        self.record.push(call);
        self
    }

    fn with(&self, parent: Option<Parent>) -> SnapshotOptions {
        let encoding = self.encoding;
        let (parent, changed) = match parent {
            Some(Parent { snapshot, changed }) => (Some(snapshot), Some(changed)),
            None => (None, None),
        };
        let mut options =
            SnapshotOptions { encoding, parent, changed, ..SnapshotOptions::default() };
        self.keys.equip(&mut options);
        options
    }

    /// Whether they bring a key to seal with.
    pub(super) fn seals(&self) -> bool {
        self.keys.seals()
    }

    /// Whether they define the form of a snapshot, so that an existing one cannot be continued.
    pub(super) fn shapes(&self) -> bool {
        self.keys.is_any() || self.encoding != Encoding::Raw || !self.record.is_empty()
    }

    /// Appends a turn, signed if required.
    pub(super) fn append(
        &self,
        journal: &mut Journal,
        turn: &Turn,
    ) -> Result<u64, afresh_store::SaveError> {
        self.keys.append(journal, turn)
    }

    /// How turns are folded.
    pub(super) fn fold(&self) -> FoldOptions {
        let mut fold = FoldOptions { encoding: self.encoding, ..FoldOptions::default() };
        self.keys.equip_fold(&mut fold);
        fold
    }

    /// The demands on the new snapshot. A delta is sealed like its parent, with the key that opened
    /// that.
    pub(super) fn own_access(&self, options: &Options) -> Access {
        self.keys.access(&options.access)
    }
}

#[cfg(feature = "seal")]
impl SaveOptions {
    /// Signs the snapshot.
    pub fn sign(mut self, key: crate::SigningKey) -> Self {
        self.keys.sign = Some(key);
        self
    }

    /// Seals the snapshot: it cannot be read or changed without the key.
    pub fn seal(mut self, key: crate::SealKey) -> Self {
        self.keys.seal = Some(key);
        self
    }
}

/// A snapshot that was saved.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SavedSnapshot {
    /// Its id in the place it was saved to.
    pub id: Sha256,
    /// The snapshot.
    pub snapshot: Snapshot,
    /// The missing feature of this host if no working set was recorded although calls were given.
    pub unrecorded: Option<&'static str>,
}

/// The snapshot that a delta follows on.
pub(crate) struct Parent {
    snapshot: Snapshot,
    /// The pages that differ from it.
    changed: Vec<PageRange>,
}

impl Parent {
    pub(super) fn new(snapshot: Snapshot, changed: Vec<PageRange>) -> Self {
        Self { snapshot, changed }
    }
}

impl dyn FrozenGuest + '_ {
    /// The pages that `calls` touch, each in a new guest that starts warm.
    fn record(&self, calls: &[Call], options: &Options) -> Result<Vec<PageRange>, SaveError> {
        let write = |source: Cause| SaveError::Write {
            reference: "a copy to record from".to_owned(),
            source,
        };
        let scratch = TempDir::new()?;
        let store = Store::create(scratch.path()).map_err(|e| write(e.into()))?;
        let id = self.store(&store, "recorded", &SnapshotOptions::default()).map_err(write)?;
        let snapshot = store.load_id(id).map_err(|e| write(e.into()))?;
        let mut recorder = Recorder::new();
        for call in calls {
            let touched = || {
                let (guest, memory) = self.thaw_recording(snapshot.clone(), options)?;
                Guest::assemble(guest, options).invoke(call)?;
                Ok(memory.touched())
            };
            let touched = touched().map_err(|source| SaveError::Record {
                function: call.function().to_owned(),
                source,
            })?;
            recorder.add(&touched);
        }
        let skipped = self.skipped_pages();
        let after = |run: PageRange| {
            let start = run.start.max(skipped);
            (start < run.end()).then(|| PageRange::new(start, run.end() - start))
        };
        // All pages that one of them touches, since the caller chose the calls.
        Ok(recorder.pages(0.0).into_iter().filter_map(after).collect())
    }

    /// The options of the save, and the reason why a requested working set was not recorded.
    pub(super) fn with(
        &self,
        parent: Option<Parent>,
        options: &SaveOptions,
        opened: &Options,
    ) -> Result<(SnapshotOptions, Option<&'static str>), SaveError> {
        let mut with = options.with(parent);
        let mut unrecorded = None;
        if !options.record.is_empty() {
            let needed = self.recorder();
            if Features::host().has(needed) {
                with.working_set = self.record(&options.record, &opened.without_output())?;
            } else {
                unrecorded = Some(needed.name());
            }
        }
        Ok((with, unrecorded))
    }

    /// Saves it as `to`; in a directory, in place of `replaced`.
    pub(crate) fn write(
        &self,
        to: &Reference,
        parent: Option<Parent>,
        options: &SaveOptions,
        opened: &Options,
        replaced: ReplacedName<'_>,
    ) -> Result<SavedSnapshot, SaveError> {
        let name = target(to)?;
        let (with, unrecorded) = self.with(parent, options, opened)?;
        let failed = |source: Cause| SaveError::Write { reference: to.to_string(), source };
        let own = options.own_access(opened);
        let save = |store: &Store, name: &str, with: &SnapshotOptions| {
            let id = self.store(store, name, with)?;
            store.load_with(&id.to_string(), &own).map_err(Cause::from)
        };
        let (id, snapshot) = match to.place() {
            Place::Directory(_) => {
                let with = SnapshotOptions { condition: replaced.into(), ..with };
                let snapshot = save(&to.place().create()?, name, &with).map_err(failed)?;
                (snapshot.id(), snapshot)
            }
            Place::Remote(_) => {
                let scratch = TempDir::new()?;
                let store = Store::create(scratch.path()).map_err(|e| failed(e.into()))?;
                let snapshot = save(&store, name, &with).map_err(failed)?;
                (push(to, &store, &snapshot, name, with.encoding)?, snapshot)
            }
            Place::File(path) => {
                let scratch = TempDir::new()?;
                let store = Store::create(scratch.path()).map_err(|e| failed(e.into()))?;
                let snapshot = save(&store, LATEST, &with).map_err(failed)?;
                archive::export(&snapshot, path, Some(LATEST)).map_err(|e| failed(e.into()))?;
                (snapshot.id(), snapshot)
            }
        };
        Ok(SavedSnapshot { id, snapshot, unrecorded })
    }
}

/// The name to save under. A file has one snapshot, which needs no other.
pub(super) fn target(to: &Reference) -> Result<&str, ReferenceError> {
    if let (Place::File(path), Some(name)) = (to.place(), to.explicit_name()) {
        return Err(ReferenceError::Single { path: path.clone(), name: name.to_owned() });
    }
    to.target(LATEST)
}

impl Guest {
    /// Checks that a guest can be saved as `to`, before one is warmed.
    ///
    /// # Errors
    /// [`SaveError::Reference`], and [`SaveError::Write`] for a file that is no snapshot.
    pub fn check_target(to: &Reference) -> Result<(), SaveError> {
        target(to)?;
        match to.place() {
            Place::File(path) => archive::check_target(path).map_err(|source| SaveError::Write {
                reference: to.to_string(),
                source: source.into(),
            }),
            _ => Ok(()),
        }
    }

    /// Saves the warm state as a snapshot, which opens without the guest's own file. A missing
    /// directory is made. The name is replaced if it exists. An existing file is replaced only if
    /// it is a snapshot.
    ///
    /// # Errors
    /// [`SaveError`]; the name is unchanged then.
    pub fn save(&self, to: &Reference, options: &SaveOptions) -> Result<SavedSnapshot, SaveError> {
        let frozen = dispatch!(Backend, &self.inner().backend, warm => {
            if !options.record.is_empty() {
                warm.check_recording()?;
            }
            warm.freeze_warm().map_err(SaveError::Freeze)?
        });
        frozen.write(to, None, options, &self.inner().options, ReplacedName::Any)
    }
}

impl Lease<'_> {
    /// Saves the present state, including changes by the calls of this lease. In the directory of
    /// the snapshot from which the guest was opened, only changes are stored. The guest stops until
    /// it is saved.
    ///
    /// # Errors
    /// As [`Guest::save`].
    pub fn save(
        &mut self,
        to: &Reference,
        options: &SaveOptions,
    ) -> Result<SavedSnapshot, SaveError> {
        let frozen = dispatch!(Instance, &mut self.instance, live => live.freeze_present()?);
        SavePoint::new(frozen, Guest::clone(&self.guest)).save(to, options)
    }

    /// Begins a save point, for which [`Lease::save_point`] then stops the guest for less time.
    ///
    /// A system call of a host function that writes to guest memory may fail with `EFAULT` from
    /// here on. Read into a buffer of the host, and copy from there.
    ///
    /// # Errors
    /// As [`Lease::save_point`].
    pub fn prepare_save_point(&mut self) -> Result<SavePreparation, SaveError> {
        let work = dispatch!(Instance, &mut self.instance, live => live.prepare_present()?);
        Ok(SavePreparation::new(work))
    }

    /// The present state, to be saved while the guest runs.
    ///
    /// From here on, a system call of a host function that writes to guest memory
    /// may fail with `EFAULT`, also where the function touched that memory before. Read into a
    /// buffer of the host, and copy from there.
    ///
    /// # Errors
    /// [`SaveError::Freeze`] for a state that cannot be kept.
    pub fn save_point(&mut self) -> Result<SavePoint, SaveError> {
        let frozen = dispatch!(Instance, &mut self.instance, live => live.freeze_present_live()?);
        Ok(SavePoint::new(frozen, Guest::clone(&self.guest)))
    }
}
