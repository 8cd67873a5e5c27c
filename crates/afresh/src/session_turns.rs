//! Sessions that are saved turn by turn: what a turn changed is stored, below the page, behind what was saved before.
//!
//! What it promises: a turn that was saved is on disk, and opens in any process as the state that the session had.
//! Whoever is killed at any moment leaves the turn before or this one. The cost follows what the turn changed; now
//! and then the turns are folded into a layer of pages, so that opening stays cheap however long a session lives.
//!
//! What may break it: two sessions that are saved under one name. The second notices, and is refused.

use afresh_memory::Image;
use afresh_pager::turn_since;
use afresh_store::{FoldOptions, Journal, Sha256, Store};

use crate::guest::Ready;
use crate::save::Frozen;
use crate::session::{Line, Session, unmoved};
use crate::{Cause, LATEST, Place, Reference, SaveError, SaveOptions, access};

/// Turns that follow on a snapshot before they are folded into it.
const MOST_TURNS: usize = 256;
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
    store: Store,
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
        if self.journal.turns() < MOST_TURNS && self.journal.size() < MOST_BYTES {
            return Ok(());
        }
        let snapshot = access::load(&self.store, self.to.name(), opened)?;
        if snapshot.id() != self.journal.base() {
            // The name means something else by now, and the next turn will say so.
            return Ok(());
        }
        let folded = self.store.folded(&snapshot, &options.fold())?;
        self.journal = self.store.begin_turns(self.to.name(), &folded)?;
        Ok(())
    }
}

impl Session {
    /// Saves what the session became since it was last saved there, which may be never: [`open`](crate::open) opens
    /// the name as the session is now. The first time in a directory takes a snapshot, unless the session's guest
    /// came out of one there; from then on a turn costs what it changed, in bytes and in time, and one write to disk.
    ///
    /// The state becomes one of the tree, without a name; the next turn drops it again.
    ///
    /// Elsewhere than in a directory the session is saved whole, as by [`Session::save`].
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
        if !matches!(to.place(), Place::Directory(_)) {
            let saved = frozen.write(to, None, options, &self.guest.inner().options)?;
            return Ok(SavedTurn { id: saved.id, turns: 0, bytes: 0, pages: 0 });
        }
        let to = &Reference::new(to.place().clone(), to.target(LATEST)?)?;
        let mut saving = match self.saving.take().filter(|saving| saving.to == *to) {
            Some(saving) => saving,
            None => match self.go_on(to, options).map_err(failed)? {
                Some(saving) => saving,
                None => {
                    let saved = frozen.write(to, None, options, &self.guest.inner().options)?;
                    let store = to.place().create()?;
                    let journal = store.begin_turns(to.name(), &saved.snapshot);
                    let journal = journal.map_err(|e| failed(e.into()))?;
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
        let store = to.place().store()?;
        let same = origin.reference.name() == to.name()
            && store.resolve(to.name()).is_ok_and(|id| id == snapshot.id());
        let resumed = match same && !options.seals() {
            true => store.resume_turns(snapshot)?,
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
