//! Sessions that are saved turn by turn in an object store: a turn is one object, and one request.
//!
//! Promises: a turn that was appended is there, whole, and opens as the state that the session had.
//! Of two writers that append to the same turn one is refused: a store that ignores conditions of
//! writes takes no session. A session that is saved whole replaces the target that its writer
//! knows, with no further turns, or fails. If the answer is lost, it can be saved again. May break
//! it: as for local journals, a writer that removes the last turns makes it the same session,
//! earlier.

use std::sync::Arc;

use super::push::Progress;
use super::{Remote, RemoteError};
use crate::disk::two_clocks::TwoClocks;
use crate::format::index::Encoding;
use crate::format::manifest::{Manifest, print};
use crate::turn::{Journal, RemoteJournal, TurnObjects, new_journal_id};
use crate::{ReplacedName, SaveError, Sha256, Snapshot, Store};

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

    /// Copies `snapshot` as [`Remote::push`] does, makes `name` mean it with turns to follow, and
    /// returns the journal to append them to.
    ///
    /// # Errors
    /// As [`Remote::push`]; [`SaveError::Moved`] when the name does not mean what is to be
    /// replaced.
    pub fn push_turns(
        &self,
        local: &Store,
        snapshot: &Snapshot,
        name: &str,
        encoding: Encoding,
        replaced: ReplacedName<'_>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Journal, RemoteError> {
        self.backend.check_name(name)?;
        let sent = self.lasting(|| self.send(local, snapshot, encoding, progress))?;
        self.follow(name, sent, snapshot, replaced)
    }

    /// Makes `name` mean `snapshot`, which was opened from this remote and is no session's, with
    /// turns to follow.
    ///
    /// # Errors
    /// As [`Remote::push_turns`]; `name` is unchanged then.
    pub fn begin_turns(
        &self,
        name: &str,
        snapshot: &Snapshot,
        replaced: ReplacedName<'_>,
    ) -> Result<Journal, RemoteError> {
        self.backend.check_name(name)?;
        let (begun, ()) = self.lasting(|| self.renew(snapshot))?;
        self.follow(name, (begun, snapshot.manifest().clone()), snapshot, replaced)
    }

    /// Names a manifest with turns to follow, whose objects were looked at since `begun`.
    fn follow(
        &self,
        name: &str,
        (begun, manifest): (TwoClocks, Manifest),
        snapshot: &Snapshot,
        replaced: ReplacedName<'_>,
    ) -> Result<Journal, RemoteError> {
        let journal = new_journal_id()?;
        let manifest = print(&manifest.with_journal(Some(&journal)))?;
        let id = Sha256::of(&manifest);
        let named_at = TwoClocks::now();
        self.unanswered.publish(name, id, replaced.expected(), |expected| {
            self.block_on(self.backend.publish(name, id, manifest.clone(), (expected, begun)))
        })?;
        let journal = RemoteJournal::new(Arc::new(self.clone()), journal, false, named_at);
        Ok(Journal::in_remote(journal, id, snapshot.key().cloned()))
    }
}

impl TurnObjects for Remote {
    fn put_turn(&self, journal: &str, number: usize, turn: &[u8]) -> Result<bool, SaveError> {
        Ok(self.block_on(self.backend.put_turn(journal, number, turn))?)
    }

    fn has_name(&self, base: Sha256) -> Result<bool, SaveError> {
        let index = self.block_on(self.backend.index_json())?.unwrap_or_default();
        let base = base.to_string();
        let mut all = index["manifests"].as_array().into_iter().flatten();
        Ok(all.any(|one| one["digest"].as_str() == Some(&*base)))
    }
}
