//! Names: each change replaces the target that it was made from, or fails.
//!
//! Promises: a name never means a snapshot whose blobs are missing. A change that expects a target
//! is refused once the name has another one, or the session has further turns. A turn that was
//! appended belongs to the target that a change replaces, or its append fails. May break it:
//! programs that write `index.json` or remove blobs without the store's locks.
//!
//! Locks are taken in this order: `.blob-lock` shared, `.index-lock`, the journal. A writer of
//! turns takes the journal only, and reads `index.json` under it. A change writes `index.json`
//! under both, so an append happens before the change and is part of the target that it compares,
//! or after it and finds the new `index.json`. The kernel releases each lock when its holder dies.
//! A session that was saved through `file://` is closed first, because its writers take no lock.

use std::fs::{self, File};
use std::path::PathBuf;

use afresh_sys::crash::point;
use afresh_sys::planted::{Bug, is};

use crate::blobs::file::open_file;
use crate::blobs::source::read_manifest;
use crate::disk::os::same_file;
use crate::disk::temporary::sync_dir;
use crate::format::descriptor::Descriptor;
use crate::format::manifest::INDEX_FILE;
use crate::local::remote_turns::close_turns;
use crate::local::store::check_name;
use crate::turn::JournalFile;
use crate::{OpenError, SaveError, Sha256, Snapshot, Store};

/// The target that a name must have when it gets another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ExpectedName {
    /// Any, or none.
    #[default]
    Any,
    /// This manifest, or none.
    Manifest(Option<Sha256>),
    /// The session of this manifest, with a journal of this length.
    Session(Sha256, u64),
    /// The same, which the change folds: every other name of the session follows it.
    Folded(Sha256, u64),
}

impl ExpectedName {
    /// The manifest that is expected.
    #[cfg(feature = "remote")]
    pub(crate) fn manifest(self) -> Option<Sha256> {
        match self {
            Self::Any => None,
            Self::Manifest(id) => id,
            Self::Session(id, _) | Self::Folded(id, _) => Some(id),
        }
    }
}

/// The journal of a session, locked.
struct LockedJournal {
    path: PathBuf,
    lock: File,
}

impl Store {
    /// Tags `id` as `name`, or removes the name if `id` is `None`. This is atomic and durable: the
    /// blobs that `id` needs are made durable first.
    ///
    /// # Errors
    /// A name that cannot be a tag, a blob that is missing, or an I/O error; the old target stays
    /// then.
    pub fn tag(&self, name: &str, id: Option<Sha256>) -> Result<(), SaveError> {
        self.rename(name, id, ExpectedName::Any)
    }

    /// As [`Store::tag`], if the name has the expected target.
    pub(crate) fn rename(
        &self,
        name: &str,
        id: Option<Sha256>,
        expected: ExpectedName,
    ) -> Result<(), SaveError> {
        check_name(name)?;
        if let Some(id) = id {
            // Names of blobs that exist before the sync are durable after it. Other writers wait
            // for the locks below, so it comes before them.
            self.described(id, name)?;
            let dir = self.blob_dir();
            sync_dir(&dir).map_err(|e| SaveError::io(&dir, e))?;
        }
        let _lock = self.lock_index()?;
        let descriptor = id.map(|id| self.described(id, name)).transpose()?;
        let mut index = self.index()?;
        let before = index.manifests.iter().find(|it| it.name() == Some(name)).cloned();
        let journal = before.as_ref().and_then(|it| self.lock_journal(it));
        self.compare(name, before.as_ref(), journal.as_ref(), expected)?;
        if let (ExpectedName::Folded(from, _), Some(to)) = (expected, id) {
            for other in index.names_of(from) {
                index.rename(&other, Some(self.described(to, &other)?));
            }
        }
        index.rename(name, descriptor);
        let bytes = index.bytes()?;
        let named = |it: &Descriptor| index.manifests.iter().any(|other| other.digest == it.digest);
        let unnamed = before.filter(|it| !named(it));
        if let (Some(session), None) = (&unnamed, &journal) {
            self.close_remote_turns(session)?;
        }
        self.put_file(INDEX_FILE, &bytes)?;
        if let Some(journal) = journal
            && unnamed.is_some_and(|it| journal.belongs_to(&it))
        {
            point();
            // A file that cannot be removed is left to `gc`; appends to it fail from now on.
            let _ = fs::remove_file(&journal.path);
        }
        Ok(())
    }

    /// Refuses a target that is not the expected one.
    fn compare(
        &self,
        name: &str,
        before: Option<&Descriptor>,
        journal: Option<&LockedJournal>,
        expected: ExpectedName,
    ) -> Result<(), SaveError> {
        let means = before.and_then(|it| it.digest.parse::<Sha256>().ok());
        let same = match expected {
            ExpectedName::Any => true,
            ExpectedName::Manifest(id) => means == id,
            ExpectedName::Session(id, end) | ExpectedName::Folded(id, end) => {
                means == Some(id)
                    && match journal {
                        Some(journal) => journal.len(id)? == end,
                        None => false,
                    }
            }
        };
        if same || is(Bug::Expected) { Ok(()) } else { Err(self.moved(name)) }
    }

    /// The error for a name that has another target than expected.
    pub(crate) fn moved(&self, name: &str) -> SaveError {
        SaveError::Moved(self.root().join(name))
    }

    /// The descriptor of `id` under `name`. Every blob of it must exist.
    fn described(&self, id: Sha256, name: &str) -> Result<Descriptor, SaveError> {
        let size = |id: Sha256| {
            let path = self.blob_path(id);
            fs::metadata(&path).map(|it| it.len()).map_err(|e| SaveError::io(&path, e))
        };
        let descriptor = Descriptor::named(id, size(id)?, name);
        // The manifest of another tool names its blobs in its own way.
        let Ok(manifest) = read_manifest(self, id) else { return Ok(descriptor) };
        for part in manifest.layers.iter().chain([&manifest.config]) {
            size(part.digest("the manifest")?)?;
        }
        if let Some(journal) = manifest.journal()?
            && !self.journal_path(journal).exists()
        {
            return Err(OpenError::NoJournal { journal: journal.to_owned() }.into());
        }
        Ok(descriptor)
    }

    /// Locks the journal of a session, after every append under way.
    fn lock_journal(&self, session: &Descriptor) -> Option<LockedJournal> {
        let manifest = read_manifest(self, session.digest("`index.json`").ok()?).ok()?;
        let path = self.journal_path(manifest.journal().ok()??);
        let lock = open_file(&path).ok()?;
        point();
        lock.lock().ok()?;
        Some(LockedJournal { path, lock })
    }

    /// Closes a session whose turns are files of a remote in this directory. Its writers take no
    /// lock here.
    fn close_remote_turns(&self, session: &Descriptor) -> Result<(), SaveError> {
        let Ok(id) = session.digest("`index.json`") else { return Ok(()) };
        // The manifest of another tool has no turns, and one that is missing has none that open.
        let Ok(manifest) = read_manifest(self, id) else { return Ok(()) };
        let Ok(Some(journal)) = manifest.journal() else { return Ok(()) };
        let path = self.journal_path(journal);
        match fs::symlink_metadata(&path) {
            // The journal of this store cannot be opened.
            Ok(meta) if !meta.is_dir() => Ok(()),
            _ => close_turns(&path, id, &self.blob_dir()).map_err(|e| SaveError::io(&path, e)),
        }
    }

    /// The target of `name` that a change made from `snapshot` replaces: `snapshot` where it was
    /// opened by that name, or the name means it; any other otherwise.
    pub(crate) fn replaced_by(&self, name: &str, snapshot: &Snapshot) -> ExpectedName {
        let by = snapshot.opened_by();
        let opened = by.is_some_and(|(root, by)| by == name && same_file(root, self.root()));
        let means = || self.index().ok().and_then(|index| index.target(name));
        match snapshot.turns() {
            _ if !opened && means() != Some(snapshot.id()) => ExpectedName::Any,
            Some(turns) => ExpectedName::Session(snapshot.id(), turns.bytes),
            None => ExpectedName::Manifest(Some(snapshot.id())),
        }
    }
}

impl LockedJournal {
    /// Whether its turns follow on this session. The manifest of another one may name it, too.
    fn belongs_to(&self, session: &Descriptor) -> bool {
        session.digest.parse().is_ok_and(|base| JournalFile::is_of(&self.lock, base))
    }

    /// Bytes of whole turns.
    fn len(&self, base: Sha256) -> Result<u64, SaveError> {
        // A killed writer may have left a part of a turn behind them.
        Ok(JournalFile::read(&self.path, base)?.len())
    }
}
