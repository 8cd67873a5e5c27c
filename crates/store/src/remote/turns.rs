//! Sessions that are saved turn by turn in an object store: a turn is one object, and one request.
//!
//! What it promises: a turn that was appended is there, whole, and opens as the state that the session had. Of two who
//! go on from the same turn one is refused, where the store can tell that an object is there already; the large ones can.
//! What may break it: as for local journals, whoever removes the last turns makes it the same session, earlier.

use super::push::Progress;
use super::{Remote, RemoteError};
use crate::index::Encoding;
use crate::manifest::{Manifest, print};
use crate::turn::{Journal, new_journal_id};
use crate::{SaveError, Sha256, Snapshot, Store};

impl From<RemoteError> for SaveError {
    fn from(error: RemoteError) -> Self {
        match error {
            RemoteError::Save(error) => error,
            RemoteError::Open(error) => error.into(),
            other => Self::Remote(other.into()),
        }
    }
}

impl Remote {
    /// Whether sessions can be saved here turn by turn: in object stores, not in registries.
    #[must_use]
    pub fn keeps_turns(&self) -> bool {
        self.backend.keeps_turns()
    }

    /// The id of the snapshot that a name means.
    ///
    /// # Errors
    /// [`RemoteError`] by cause.
    pub fn resolve(&self, name: &str) -> Result<Sha256, RemoteError> {
        Ok(self.block_on(self.backend.resolve(name))?.id)
    }

    /// Copies `snapshot` as [`Remote::push`] does, makes `name` mean it with turns to follow, and returns the journal to
    /// append them to.
    ///
    /// # Errors
    /// As [`Remote::push`].
    pub fn push_turns(
        &self,
        local: &Store,
        snapshot: &Snapshot,
        name: &str,
        encoding: Encoding,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Journal, RemoteError> {
        self.backend.check_name(name)?;
        let manifest = self.lasting(|| self.send(local, snapshot, encoding, progress))?;
        self.follow(name, &manifest, snapshot)
    }

    /// Makes `name` mean `snapshot`, which was opened from this remote and is no session's, with turns to follow.
    ///
    /// # Errors
    /// [`RemoteError`] by cause; `name` means then what it meant before.
    pub fn begin_turns(&self, name: &str, snapshot: &Snapshot) -> Result<Journal, RemoteError> {
        self.backend.check_name(name)?;
        self.lasting(|| self.renew(snapshot))?;
        self.follow(name, snapshot.manifest(), snapshot)
    }

    fn follow(
        &self,
        name: &str,
        manifest: &Manifest,
        snapshot: &Snapshot,
    ) -> Result<Journal, RemoteError> {
        let journal = new_journal_id()?;
        let manifest = print("the manifest", &manifest.with_journal(Some(&journal)))?;
        let id = Sha256::of(&manifest);
        self.block_on(self.backend.publish(name, id, manifest))?;
        Ok(Journal::in_remote(self.clone(), journal, id, snapshot.key().cloned()))
    }

    /// Appends a turn. False if somebody else has appended one there.
    pub(crate) fn put_turn(
        &self,
        journal: &str,
        number: usize,
        turn: Vec<u8>,
    ) -> Result<bool, RemoteError> {
        self.block_on(self.backend.put_turn(journal, number, turn))
    }
}
