//! Continues a session, and folds its turns into a layer.
//!
//! Promises: folding does not change the state of the session. A writer that is killed during it
//! leaves the turns or the layer.

use crate::format::manifest::print;
use crate::layers::blob_sink::BlobSink;
use crate::local::naming::ExpectedName;
use crate::local::staging::Staging;
use crate::seal::access::Access;
use crate::snapshots::open::open_snapshot;
use crate::turn::{Journal, new_journal_id};
use crate::writing::save::write_memory;
use crate::{
    Encoding, OpenError, ReplacedName, SaveError, SaveRequest, Sha256, Snapshot, SnapshotOptions,
    Store,
};

/// Options of folding turns.
#[derive(Clone, Debug)]
pub struct FoldOptions {
    /// Encoding of the pages.
    pub encoding: Encoding,
    /// Maximum layers of the result. A higher stack is written whole: as one layer, or as four from
    /// 256 MiB on.
    pub layers: usize,
    /// Sign the result.
    #[cfg(feature = "seal")]
    pub sign: Option<crate::seal::SigningKey>,
}

impl Default for FoldOptions {
    fn default() -> Self {
        Self {
            encoding: Encoding::Raw,
            layers: 12,
            #[cfg(feature = "seal")]
            sign: None,
        }
    }
}

/// Writes a snapshot with turns as one without, and returns digest and length of its manifest.
pub(crate) fn fold_into(
    shelf: &mut dyn BlobSink,
    snapshot: &Snapshot,
    options: &FoldOptions,
) -> Result<(Sha256, u64), SaveError> {
    let base = snapshot.base();
    let as_delta = base.layers().len() < options.layers && snapshot.pages() >= base.pages();
    #[cfg_attr(not(feature = "seal"), allow(unused_mut, reason = "nothing seals it"))]
    let mut save = SnapshotOptions {
        encoding: options.encoding,
        changed: as_delta.then(|| snapshot.turned_pages()),
        parent: as_delta.then_some(base),
        working_set: snapshot.working_set(),
        ..SnapshotOptions::default()
    };
    #[cfg(feature = "seal")]
    {
        save.seal = snapshot.key().cloned();
        save.sign = options.sign.clone();
    }
    let (guest, state) = (snapshot.guest().clone(), snapshot.state().to_vec());
    write_memory(shelf, snapshot, &SaveRequest { guest, state, options: save })
}

impl Store {
    /// Makes `name` mean `snapshot`, wherever it was opened from, with turns to follow, and returns
    /// the journal to append them to. Blobs of it that the store lacks are copied from its open
    /// files.
    ///
    /// # Errors
    /// [`SaveError`] by cause, [`SaveError::Moved`] where the name has another target than
    /// `replaced`; the name is unchanged then.
    pub fn begin_turns(
        &self,
        name: &str,
        snapshot: &Snapshot,
        replaced: ReplacedName<'_>,
    ) -> Result<Journal, SaveError> {
        let mut staging = self.stage()?;
        let plain = self.fold_here(&mut staging, snapshot, &FoldOptions::default())?;
        self.follow(&mut staging, name, &plain, replaced.expected())
    }

    /// Folds the turns of the session that `name` means and `journal` belongs to, and returns the
    /// journal that follows on the result. Every other name of the session means the result, too.
    ///
    /// # Errors
    /// [`SaveError::Moved`] when the name means something else, or the session has other turns than
    /// `journal`; [`SaveError`] by cause. The name and `journal` are unchanged then.
    pub fn fold_turns(
        &self,
        name: &str,
        journal: &Journal,
        access: &Access,
        options: &FoldOptions,
    ) -> Result<Journal, SaveError> {
        let mut staging = self.stage()?;
        let id = journal.base();
        let session = match open_snapshot(self, id, access) {
            // `gc` removes a manifest without a name, and its journal.
            Err(error) if error.is_missing_file() => return Err(self.moved(name)),
            Err(OpenError::NoJournal { .. }) => return Err(self.moved(name)),
            opened => opened?,
        };
        if session.turned_root() != Some(journal.last()) {
            return Err(self.moved(name));
        }
        let plain = self.fold_here(&mut staging, &session, options)?;
        self.follow(&mut staging, name, &plain, ExpectedName::Folded(id, journal.size()))
    }

    /// Names `snapshot`, which has no turns, with turns to follow.
    fn follow(
        &self,
        staging: &mut Staging,
        name: &str,
        snapshot: &Snapshot,
        expected: ExpectedName,
    ) -> Result<Journal, SaveError> {
        self.keep(staging, snapshot)?;
        let id = new_journal_id()?;
        let manifest = print(&snapshot.manifest().with_journal(Some(&id)))?;
        let (base, _) = staging.put(manifest)?;
        let gate = staging.mark(&id)?;
        let journal = Journal::create(
            (self.root(), &self.blob_dir()),
            (&id, name),
            base,
            snapshot.key().cloned(),
        )?;
        drop(gate);
        let named = staging.rename(name, base, expected);
        if named.is_err() {
            self.remove_unnamed(&journal);
        }
        named.map(|()| journal)
    }

    /// Removes the new journal of a change of a name that failed. It stays if the name was changed,
    /// and only the sync after it failed.
    fn remove_unnamed(&self, journal: &Journal) {
        let is_unnamed = self.index().is_ok_and(|index| index.names_of(journal.base()).is_empty());
        if let Some(path) = journal.path().filter(|_| is_unnamed) {
            // Otherwise `gc` removes it.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Copies the blobs of `snapshot` that are missing here from its open files.
    fn keep(&self, staging: &mut Staging, snapshot: &Snapshot) -> Result<(), SaveError> {
        for layer in snapshot.layers().iter().chain(snapshot.working_set_layer()) {
            staging.keep(layer)?;
        }
        let config = &snapshot.manifest().config;
        if !staging.has(config.digest("the manifest")?, config.size)? {
            staging.put(snapshot.config_blob()?)?;
        }
        Ok(())
    }

    /// The same memory and state as a snapshot without turns, which has no name yet: `gc` removes
    /// it unless it gets one.
    ///
    /// # Errors
    /// [`SaveError`] by cause.
    pub fn folded(
        &self,
        snapshot: &Snapshot,
        options: &FoldOptions,
    ) -> Result<Snapshot, SaveError> {
        // Until the result is open.
        let mut staging = self.stage()?;
        self.fold_here(&mut staging, snapshot, options)
    }

    /// As [`Store::folded`]; `staging` keeps the blobs of the result.
    pub(crate) fn fold_here(
        &self,
        staging: &mut Staging,
        snapshot: &Snapshot,
        options: &FoldOptions,
    ) -> Result<Snapshot, SaveError> {
        if snapshot.turns().is_none() {
            return Ok(snapshot.clone());
        }
        let (id, _) = fold_into(staging, snapshot, options)?;
        let mut access = Access::new().with_limits(*snapshot.limits());
        access = access.with_seal(snapshot.key().cloned());
        Ok(open_snapshot(self, id, &access)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GuestBuild, MemoryPages};

    #[test]
    fn a_journal_whose_name_was_changed_stays_after_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        let text = || "a".to_owned();
        let guest = GuestBuild { kind: text(), module: text(), engine: text(), cpu: Vec::new() };
        store.save("a", &MemoryPages(vec![1; 4096]), &SaveRequest::new(guest)).unwrap();
        let snapshot = store.load("a").unwrap();
        let journal = store.begin_turns("a", &snapshot, ReplacedName::Any).unwrap();
        store.remove_unnamed(&journal);
        store.load("a").unwrap();
        let journal = store.begin_turns("b", &snapshot, ReplacedName::Any).unwrap();
        let path = journal.path().unwrap();
        std::fs::hard_link(path, dir.path().join("kept")).unwrap();
        store.untag("b").unwrap();
        std::fs::rename(dir.path().join("kept"), path).unwrap();
        store.remove_unnamed(&journal);
        assert!(!path.exists());
    }
}
