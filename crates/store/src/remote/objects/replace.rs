//! Setting a name of an object store to another target: the session of the old one is closed first.
//!
//! Promises: a turn that was appended belongs to the target that a change replaces, or its append
//! fails. The frame that closes a journal takes the place of its next turn, and the store writes
//! each place once. May break it: a store that ignores the conditions of writes, which `conditions`
//! refuses.

use object_store::{ObjectMeta, ObjectStoreExt};

use super::super::RemoteError;
use super::super::backend::Backend;
use super::{JOURNALS, Objects, ROUNDS};
use crate::Sha256;
use crate::format::layout::IndexJson;
use crate::format::manifest::{MAX_MANIFEST, Manifest};
use crate::local::naming::ExpectedName;
use crate::turn::{CLOSING_LEN, JOURNAL_HEADER, closing_frame};

/// Maximum objects of a journal that are listed. Writers put at most 4096 turns there.
const MAX_TURNS: usize = 1 << 16;

impl Objects {
    /// Whether `name` has the expected target. Closes the session that it means, unless another
    /// name means it, too.
    pub(super) async fn replaces(
        &self,
        index: &IndexJson,
        name: &str,
        expected: ExpectedName,
    ) -> Result<bool, RemoteError> {
        let means = index.target(name);
        if expected != ExpectedName::Any && means != expected.manifest() {
            return Ok(false);
        }
        let Some(before) = means else { return Ok(true) };
        let length = match expected {
            ExpectedName::Session(_, length) | ExpectedName::Folded(_, length) => Some(length),
            // Its other names keep the session.
            _ if index.names_of(before).len() > 1 => return Ok(true),
            // No turn is expected.
            ExpectedName::Manifest(_) => Some(JOURNAL_HEADER as u64),
            ExpectedName::Any => None,
        };
        self.close_session(before, length).await
    }

    /// Closes the journal of the manifest `id`, if there is one. False if it has not the expected
    /// length.
    async fn close_session(&self, id: Sha256, expected: Option<u64>) -> Result<bool, RemoteError> {
        let manifest = match self.get("the manifest", &self.blob_path(id), MAX_MANIFEST).await {
            Ok((manifest, _)) => Manifest::parse(&manifest).ok(),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(error),
        };
        // The manifest of another tool has no turns.
        let Some(manifest) = manifest else { return Ok(true) };
        let Some(journal) = manifest.journal()? else { return Ok(true) };
        if self.is_local_journal(journal).await? {
            return Ok(expected.is_none());
        }
        for _ in 0..ROUNDS {
            let mut turns = self.list_turns(journal).await?;
            let closed = turns.last().is_some_and(|last| last.size == CLOSING_LEN);
            turns.truncate(turns.len() - usize::from(closed));
            let length = JOURNAL_HEADER as u64 + turns.iter().map(|turn| turn.size).sum::<u64>();
            if expected.is_some_and(|expected| expected != length) {
                return Ok(false);
            }
            let number = turns.len();
            if closed || self.put_turn(journal, number, &closing_frame(&id, number)).await? {
                return Ok(true);
            }
        }
        Err(RemoteError::Contended(journal.to_owned()))
    }

    /// Whether a journal is a file of a local store. Its writers compare the name at each append.
    async fn is_local_journal(&self, journal: &str) -> Result<bool, RemoteError> {
        if self.lock.is_none() {
            return Ok(false);
        }
        let path = self.path(&format!("{JOURNALS}/{journal}"));
        match self.attempt(path.as_ref(), || self.objects.head(&path)).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The objects of a journal, in the order of their numbers.
    pub(super) async fn list_turns(&self, journal: &str) -> Result<Vec<ObjectMeta>, RemoteError> {
        let what = format!("{JOURNALS}/{journal}");
        let prefix = self.path(&what);
        let mut found = self.list_at_most(&what, &prefix, MAX_TURNS).await?;
        found.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(found)
    }
}
