//! Garbage collection in object stores: removes objects that are unreachable from names, while
//! others write.
//!
//! Promises: a snapshot with a name, or one that gets a name while a collection runs, stays
//! complete. Nothing waits for a lock that a killed process could hold. Three rules make that so:
//! * A writer takes an object for sent only while it is younger than `TRUSTED`; an older one it
//!   sends again, which makes it young. Only what is older than the grace, twice that at least, is
//!   removed. So the objects of a writer are not removed before they have a name, if that takes
//!   less than the difference, and clocks differ by less than it.
//! * Objects are listed before the names are read. No writer that names an object later relied on
//!   it without a name then. The names are read again when they are older than [`NAMES_TIMEOUT`]:
//!   an object that got a name since, and is as old as the grace, was sent before they were read.
//! * An object may become young between the last look at it and its removal. A collector therefore
//!   leaves a mark while it removes a few; a writer looks for marks when all is sent, waits until
//!   they are removed, and looks whether all is there still.
//!
//! May break it: writers of versions that know nothing of this, and clocks that are wrong by a day.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};

use super::backend::CONNECTIONS;
use super::stored_object::{NAMED_WITHIN, StoredObject};
use super::{Cause, Remote, RemoteError};
use crate::disk::two_clocks::TwoClocks;
use crate::format::manifest::parse;
use crate::local::collect::CollectionReport;
use crate::local::live_set::{LiveSet, MAX_FOREIGN, reach};
use crate::local::remote_turns::TURN_GRACE;
use crate::turn::NAMED_FOR;
use crate::{OpenError, Sha256};

/// Minimum age of an object without a name that is removed.
pub const GRACE_PERIOD: Duration = TURN_GRACE;
/// How long names hold that a collection has read. With [`NAMED_WITHIN`] and `TRUSTED` it stays
/// below [`GRACE_PERIOD`].
const NAMES_TIMEOUT: Duration = Duration::from_secs(3600);
// A writer looks for the name of its session before the frame that closed it is removed.
const _: () = assert!(4 * NAMED_FOR.as_secs() <= GRACE_PERIOD.as_secs());
/// Objects that are removed under one mark.
const BATCH: usize = 256;
/// Maximum repetitions of a writer because of a concurrent collection.
const ROUNDS: usize = 5;

/// A program that refers to objects of a store by digest, and stores these references elsewhere.
pub struct GcRoot<'a> {
    /// As in [`Remote::claim`].
    pub name: &'a str,
    /// Reads all its names.
    pub names: &'a mut dyn FnMut() -> Result<Vec<Sha256>, Cause>,
}

impl Remote {
    /// Declares that references to objects of this remote are stored elsewhere, so that a
    /// collection without them is refused.
    ///
    /// # Errors
    /// [`RemoteError`] by cause.
    pub fn claim(&self, keeper: &str) -> Result<(), RemoteError> {
        self.block_on(self.backend.claim(keeper))
    }

    /// Removes objects that are older than `grace` and reachable neither from a name of this remote
    /// nor from a reference of its keeper. Other processes may read and write during that. An
    /// opened snapshot without a name loses the parts that it has not read.
    ///
    /// # Errors
    /// [`RemoteError`] by cause: above all when objects are named by another user, or by no user.
    /// Nothing reached the objects that were removed until then.
    pub fn gc(
        &self,
        mut keeper: Option<GcRoot<'_>>,
        grace: Duration,
    ) -> Result<CollectionReport, RemoteError> {
        if grace < GRACE_PERIOD {
            return Err(RemoteError::Grace { grace, least: GRACE_PERIOD });
        }
        let stored = self.block_on(self.backend.stored())?;
        let own = keeper.as_ref().map(|keeper| keeper.name);
        let keepers = self.block_on(self.backend.keepers())?;
        if let Some(other) = keepers.into_iter().find(|name| Some(name.as_str()) != own) {
            return Err(RemoteError::Kept { by: other });
        }
        let mut read = TwoClocks::now();
        let mut live = self.named(keeper.as_mut())?;
        // A journal is one thing: as young as its last turn.
        let young: HashSet<&str> = stored
            .iter()
            .filter(|object| object.age < grace)
            .filter_map(StoredObject::journal)
            .collect();
        let dead = |object: &&StoredObject| {
            let young = object.journal().is_some_and(|journal| young.contains(journal));
            object.age >= grace && !young && !object.is_live(&live)
        };
        let dead: Vec<StoredObject> = stored.iter().filter(dead).cloned().collect();
        let (mut collected, mut gone) = (CollectionReport::default(), 0);
        for batch in dead.chunks(BATCH) {
            if read.is_older_than(NAMES_TIMEOUT) {
                read = TwoClocks::now();
                live = self.named(keeper.as_mut())?;
            }
            let batch: Vec<StoredObject> =
                batch.iter().filter(|object| !object.is_live(&live)).cloned().collect();
            for object in self.block_on(self.backend.sweep(&batch, grace))? {
                collected.files += 1;
                collected.bytes += object.size;
                gone += usize::from(object.journal().is_none());
            }
        }
        let blobs = stored.iter().filter(|object| object.journal().is_none()).count();
        collected.kept = blobs - gone;
        Ok(collected)
    }

    /// Everything that the names reach: those in `index.json` and the keeper's.
    fn named(&self, keeper: Option<&mut GcRoot<'_>>) -> Result<LiveSet, RemoteError> {
        let names = match keeper {
            Some(keeper) => (keeper.names)().map_err(RemoteError::Names)?,
            None => Vec::new(),
        };
        let index = self.block_on(self.backend.index_json())?;
        if index.is_none() && names.is_empty() {
            return Err(RemoteError::NoNames);
        }
        self.block_on(self.live(names, index))
    }

    /// Everything that these names reach, and those in `index.json`.
    async fn live(
        &self,
        names: Vec<Sha256>,
        index: Option<serde_json::Value>,
    ) -> Result<LiveSet, RemoteError> {
        let (mut live, mut next) = (LiveSet::default(), names);
        live.blobs.extend(&next);
        if let Some(index) = index {
            reach(&index, &mut live, &mut next);
            let all = index["manifests"].as_array().into_iter().flatten();
            next.extend(all.filter_map(|one| one["digest"].as_str()?.parse::<Sha256>().ok()));
        }
        let mut seen = HashSet::new();
        while !next.is_empty() {
            next.retain(|id| seen.insert(*id));
            let fetched = next.drain(..).map(|id| async move {
                match self.backend.blob("a manifest", id, MAX_FOREIGN).await {
                    Ok(bytes) if Sha256::of(&bytes) == id => Ok(Some(bytes)),
                    Ok(_) => Err(OpenError::Digest { what: "a manifest", expected: id }.into()),
                    // A missing object needs nothing.
                    Err(error) if error.is_not_found() => Ok(None),
                    Err(error) => Err(error),
                }
            });
            let fetched: Vec<Option<Vec<u8>>> =
                stream::iter(fetched).buffer_unordered(CONNECTIONS).try_collect().await?;
            for bytes in fetched.into_iter().flatten() {
                match parse("a manifest", &bytes) {
                    Ok(manifest) => reach(&manifest, &mut live, &mut next),
                    Err(error @ OpenError::TooLarge { .. }) => return Err(error.into()),
                    // Other bytes than JSON name nothing.
                    Err(_) => {}
                }
            }
        }
        Ok(live)
    }

    /// Has `work` send objects, again if need be, until all of them are there and no collection
    /// removes any before it is named. Returns the time before which none of them was looked at:
    /// they are named within [`NAMED_WITHIN`] of it.
    pub(super) fn lasting<T>(
        &self,
        work: impl FnMut() -> Result<T, RemoteError>,
    ) -> Result<(TwoClocks, T), RemoteError> {
        self.lasting_since(TwoClocks::now, work)
    }

    fn lasting_since<T>(
        &self,
        mut now: impl FnMut() -> TwoClocks,
        mut work: impl FnMut() -> Result<T, RemoteError>,
    ) -> Result<(TwoClocks, T), RemoteError> {
        for _ in 0..ROUNDS {
            let begun = now();
            let done = work()?;
            if self.block_on(self.backend.settled())? && !begun.is_older_than(NAMED_WITHIN) {
                return Ok((begun, done));
            }
        }
        Err(RemoteError::Collected)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::super::RetryPolicy;
    use super::super::stored_object::TRUSTED;
    use super::*;
    use crate::local::naming::ExpectedName;

    const HOUR: Duration = Duration::from_secs(3600);

    fn remote() -> Remote {
        let prefix = object_store::path::Path::from("team");
        Remote::with_objects(Arc::new(InMemory::new()), prefix, RetryPolicy::default()).unwrap()
    }

    #[test]
    fn names_are_read_again_before_a_named_object_is_as_old_as_the_grace() {
        assert!(NAMES_TIMEOUT + NAMED_WITHIN + TRUSTED < GRACE_PERIOD);
    }

    #[test]
    fn objects_are_looked_at_again_after_the_host_was_suspended() {
        let mut times = vec![TwoClocks::now(), TwoClocks::now().before_suspension(NAMED_WITHIN)];
        let mut looks = 0;
        let work = || {
            looks += 1;
            Ok(())
        };
        let (begun, ()) = remote().lasting_since(|| times.pop().unwrap(), work).unwrap();
        assert_eq!(looks, 2);
        assert!(!begun.is_older_than(HOUR));
    }

    #[test]
    fn a_name_is_not_changed_long_after_its_objects_were_looked_at() {
        let remote = remote();
        let name = |begun, manifest: &str| {
            let (id, manifest) = (Sha256::of(manifest.as_bytes()), manifest.as_bytes().to_vec());
            let publish = remote.backend.publish("a", id, manifest, (ExpectedName::Any, begun));
            remote.block_on(publish).map(|()| id)
        };
        let id = name(TwoClocks::now(), "{}").unwrap();
        let begun = TwoClocks::now().before_suspension(NAMED_WITHIN);
        assert!(matches!(name(begun, "[]"), Err(RemoteError::Collected)));
        assert_eq!(remote.resolve("a").unwrap(), id);
    }
}
