//! Sessions that are saved turn by turn: what a turn changed is stored, below the page, behind what was saved before.
//!
//! What it promises: a turn that was saved is on disk, and opens in any process as the state that the session had.
//! Whoever is killed at any moment leaves the turn before or this one. The cost follows what the turn changed; now
//! and then the turns are folded into a layer of pages, so that opening stays cheap however long a session lives.
//!
//! What may break it: two sessions that are saved under one name. The second notices, and is refused.

use afresh_memory::Image;
use afresh_pager::turn_since;
use afresh_store::{FoldOptions, Journal, Sha256, Snapshot, Store};

use crate::guest::Ready;
use crate::save::Frozen;
use crate::session::{Line, Session, unmoved};
use crate::{Cause, LATEST, Options, Place, Reference, SaveError, SaveOptions, access};

/// Turns that follow on a snapshot before they are folded into it.
const MOST_TURNS: usize = 256;
/// In a remote, where each takes a request to open it.
#[cfg(feature = "remote")]
const MOST_DISTANT: usize = 64;
/// Bytes of turns that follow on a snapshot before they are folded into it: what is read to open it.
const MOST_BYTES: u64 = 1 << 20;

/// What it took to save a session.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SavedTurn {
    /// The snapshot that the turn follows on, in the place it was saved to.
    pub id: Sha256,
    /// Turns that follow on the snapshot now; none when it is the session itself.
    pub turns: usize,
    /// Bytes that the turn took. Of a session that was saved whole, 0.
    pub bytes: u64,
    /// Pages that the turn changed.
    pub pages: usize,
}

/// Where a session is saved turn by turn, and what it was when it was last.
pub(crate) struct Saving {
    to: Reference,
    /// The directory that it is in, if it is one.
    store: Option<Store>,
    journal: Journal,
    image: Image,
    state: Vec<u8>,
}

impl Saving {
    /// Appends what became of the session.
    fn append(&mut self, frozen: &Frozen, options: &SaveOptions) -> Result<SavedTurn, Cause> {
        let (image, state) = (frozen.image().clone(), frozen.bytes()?);
        let before = (&self.image, &self.state[..]);
        let turn = turn_since(before, &image, &state, self.journal.last())?;
        let bytes = options.append(&mut self.journal, &turn)?;
        (self.image, self.state) = (image, state);
        Ok(SavedTurn {
            id: self.journal.base(),
            turns: self.journal.turns(),
            bytes,
            pages: turn.changed_pages(),
        })
    }

    /// Makes a layer of the turns when there are many.
    fn fold(&mut self, options: &SaveOptions, opened: &access::Access) -> Result<(), Cause> {
        let Some(store) = &self.store else { return Ok(()) };
        if self.journal.turns() < MOST_TURNS && self.journal.size() < MOST_BYTES {
            return Ok(());
        }
        let snapshot = access::load(store, self.to.name(), opened)?;
        if snapshot.id() != self.journal.base() {
            // The name means something else by now, and the next turn will say so.
            return Ok(());
        }
        let folded = store.folded(&snapshot, &options.fold())?;
        self.journal = store.begin_turns(self.to.name(), &folded)?;
        Ok(())
    }

    /// Whether so many turns follow in a remote that the session is better saved whole there.
    fn is_long(&self) -> bool {
        #[cfg(feature = "remote")]
        if self.store.is_none() {
            return self.journal.turns() >= MOST_DISTANT || self.journal.size() >= MOST_BYTES;
        }
        false
    }
}

/// What to go on with: the journal, and the directory that it is in, if it is in one.
type Begun = (Option<Store>, Journal);

/// Whether a session can be saved turn by turn in a place.
fn keeps_turns(place: &Place) -> Result<bool, SaveError> {
    match place {
        Place::Directory(_) => Ok(true),
        #[cfg(feature = "remote")]
        Place::Remote(_) => Ok(place.remote()?.keeps_turns()),
        _ => Ok(false),
    }
}

/// Goes on from a snapshot that is in the same directory.
fn go_on_here(
    snapshot: &Snapshot,
    to: &Reference,
    options: &SaveOptions,
    same: impl Fn(Sha256) -> bool,
) -> Result<Option<Begun>, Cause> {
    let store = to.place().store()?;
    let resumed = match store.resolve(to.name()).is_ok_and(same) && !options.seals() {
        true => snapshot.resume_turns()?,
        false => None,
    };
    let journal = match resumed {
        Some(journal) => journal,
        // What is there is not written as it is to be.
        None if options.shapes() => return Ok(None),
        None => {
            let plain = store.folded(snapshot, &FoldOptions::default())?;
            store.begin_turns(to.name(), &plain)?
        }
    };
    Ok(Some((Some(store), journal)))
}

/// Goes on from a snapshot that is in the same remote.
#[cfg(feature = "remote")]
fn go_on_there(
    snapshot: &Snapshot,
    to: &Reference,
    options: &SaveOptions,
    same: impl Fn(Sha256) -> bool,
) -> Result<Option<Begun>, Cause> {
    if options.seals() {
        return Ok(None);
    }
    let remote = to.place().remote()?;
    let journal = if snapshot.turns().is_some() {
        // A session under another name is saved whole.
        match remote.resolve(to.name()).is_ok_and(same) {
            true => snapshot.resume_turns()?,
            false => None,
        }
    } else if options.shapes() {
        None
    } else {
        Some(remote.begin_turns(to.name(), snapshot)?)
    };
    Ok(journal.map(|journal| (None, journal)))
}

impl Frozen {
    /// Saves it whole, with turns to follow.
    fn begin(
        &self,
        to: &Reference,
        options: &SaveOptions,
        opened: &Options,
    ) -> Result<Begun, SaveError> {
        #[cfg(feature = "remote")]
        if matches!(to.place(), Place::Remote(_)) {
            return Ok((None, self.write_turns(to, options, opened)?));
        }
        let saved = self.write(to, None, options, opened)?;
        let store = to.place().create()?;
        let journal = store.begin_turns(to.name(), &saved.snapshot).map_err(|source| {
            SaveError::Write { reference: to.to_string(), source: source.into() }
        })?;
        Ok((Some(store), journal))
    }
}

impl Session {
    /// Saves what the session became since it was last saved there, which may be never: [`open`](crate::open) opens
    /// the name as the session is now. The first time in a directory takes a snapshot, unless the session's guest
    /// came out of one there; from then on a turn costs what it changed, in bytes and in time, and one write to disk.
    ///
    /// The state becomes one of the tree, without a name; the next turn drops it again.
    ///
    /// So it does in an object store, where a turn is one request. Elsewhere (a registry, an archive) the session is
    /// saved whole, as by [`Session::save`].
    ///
    /// # Errors
    /// As [`Session::save`]. [`SaveError::Write`] also when another session was saved under the same name since.
    pub fn save_turn(
        &mut self,
        to: &Reference,
        options: &SaveOptions,
    ) -> Result<SavedTurn, SaveError> {
        let freeze = |cause: Cause| SaveError::Freeze(cause);
        self.check().map_err(|error| freeze(error.into()))?;
        let frozen = self.stand().map_err(freeze)?;
        let failed = |source: Cause| SaveError::Write { reference: to.to_string(), source };
        let own = options.own_access(&self.guest.inner().options);
        // Whoever is asked opens the remote for it.
        let known = self.saving.as_ref().is_some_and(|saving| saving.to.place() == to.place());
        if !known && !keeps_turns(to.place())? {
            let saved = frozen.write(to, None, options, &self.guest.inner().options)?;
            return Ok(SavedTurn { id: saved.id, turns: 0, bytes: 0, pages: 0 });
        }
        let to = &Reference::new(to.place().clone(), to.target(LATEST)?)?;
        let mine = self.saving.take().filter(|saving| saving.to == *to && !saving.is_long());
        let mut saving = match mine {
            Some(saving) => saving,
            None => match self.go_on(to, options).map_err(failed)? {
                Some(saving) if !saving.is_long() => saving,
                _ => {
                    let opened = &self.guest.inner().options;
                    let (store, journal) = frozen.begin(to, options, opened)?;
                    let (image, state) = (frozen.image().clone(), frozen.bytes().map_err(failed)?);
                    let turn = SavedTurn { id: journal.base(), turns: 0, bytes: 0, pages: 0 };
                    let to = to.clone();
                    self.saving = Some(Box::new(Saving { to, store, journal, image, state }));
                    return Ok(turn);
                }
            },
        };
        let saved = saving.append(&frozen, options).map_err(failed);
        // What is on disk is whole, though it stays long; the next turn tries again.
        if saved.is_ok() {
            let _ = saving.fold(options, &own);
        }
        // Also after a failure: what was saved last is still what the next turn follows on.
        self.saving = Some(saving);
        saved
    }

    /// Goes on from the snapshot that the session's guest came out of, if that is in the same store.
    fn go_on(&self, to: &Reference, options: &SaveOptions) -> Result<Option<Box<Saving>>, Cause> {
        let Some(origin) = self.guest.origin().filter(|it| it.reference.place() == to.place())
        else {
            return Ok(None);
        };
        let snapshot = &origin.snapshot;
        let same = |id: Sha256| origin.reference.name() == to.name() && id == snapshot.id();
        let begun = match to.place() {
            #[cfg(feature = "remote")]
            Place::Remote(_) => go_on_there(snapshot, to, options, same)?,
            _ => go_on_here(snapshot, to, options, same)?,
        };
        let Some((store, journal)) = begun else { return Ok(None) };
        let (image, state) = (origin.memory.pages().clone(), snapshot.state().to_vec());
        let to = to.clone();
        Ok(Some(Box::new(Saving { to, store, journal, image, state })))
    }

    /// Makes the present state one of the tree, unless it is one, and freezes it.
    pub(crate) fn stand(&mut self) -> Result<Frozen, Cause> {
        let before = self.at();
        let own = self.passing.take() == Some(before);
        let now = match &mut self.line {
            #[cfg(feature = "wasm")]
            Line::Module(branch) => branch.here().map_err(unmoved)?,
            #[cfg(feature = "vm")]
            Line::Machine(branch) => branch.here().map_err(unmoved)?,
            #[cfg(feature = "linux")]
            Line::Program(branch) => branch.here().map_err(unmoved)?,
        };
        if now != before {
            self.passing = Some(now);
            if own {
                // Somebody else may have dropped it.
                let _ = self.drop_checkpoint(before);
            }
        } else if own {
            self.passing = Some(now);
        }
        self.frozen(now)
    }

    /// Any state of the tree, frozen. Shares the memory.
    pub(crate) fn frozen(&self, id: afresh_snapshot::SnapshotId) -> Result<Frozen, Cause> {
        Ok(match (&self.line, &self.guest.inner().ready) {
            #[cfg(feature = "wasm")]
            (Line::Module(branch), Ready::Module(warm)) => {
                Frozen::Module(warm.freeze_state(&branch.tree().get(id)?)?)
            }
            #[cfg(feature = "vm")]
            (Line::Machine(branch), Ready::Machine(machines)) => {
                let state = branch.tree().get(id)?;
                Frozen::Machine(machines.pristine.sibling(&state)?.freeze()?)
            }
            #[cfg(feature = "linux")]
            (Line::Program(branch), Ready::Program(_)) => {
                Frozen::Program(afresh_linux::Warm::freeze_state(&branch.tree().get(id)?)?)
            }
            #[allow(unreachable_patterns, reason = "a session is of its guest's kind")]
            _ => return Err("the session is of another guest".into()),
        })
    }
}
