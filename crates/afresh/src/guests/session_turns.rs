//! Sessions that are saved turn by turn: the changes of a turn are stored, at a finer grain than
//! pages, behind the earlier ones.
//!
//! Promises: a turn that was saved is on disk, and opens in any process as the state that the
//! session had. A process that is killed at any moment leaves the turn before or this one. The cost
//! follows the changes of the turn; now and then the turns are folded into a layer of pages, so
//! that opening stays cheap however long a session lives.
//!
//! A turn whose answer an object store lost is put again before the next one: either it is there,
//! and the next turn follows on it, or another writer was faster.
//!
//! A turn replaces no save of another writer: of two sessions that are saved under one name, the
//! later one is refused. May break it: [`Session::save`] and other saves of a whole guest, which
//! replace any meaning of a name.

use afresh_memory::Image;
use afresh_pager::turn_since;
use afresh_snapshot::SnapshotId;
use afresh_store::{Access, Journal, ReplacedName, Sha256, Snapshot, Store};

use super::backend::FrozenGuest;
use super::remote_saves::keeps_turns_remotely;
use super::{SaveError, SaveOptions, Session};
use crate::{Cause, Options, Place, Reference};

/// Turns that follow on a snapshot before they are folded into it.
const MOST_TURNS: usize = 256;
/// In a remote, where each takes a request to open it.
const MOST_DISTANT: usize = 64;
/// Bytes of turns that follow on a snapshot before they are folded into it: opening reads them all.
const MOST_BYTES: u64 = 1 << 20;

/// The cost of saving a session.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SavedTurn {
    /// The snapshot before the turn, in the place of the save.
    pub id: Sha256,
    /// Turns after the snapshot; 0 if the snapshot is the present state.
    pub turns: usize,
    /// Bytes of the turn. 0 if the session was saved whole.
    pub bytes: u64,
    /// Pages that the turn changed.
    pub pages: usize,
}

/// Where a session is saved turn by turn, and its state at the last save.
pub(crate) struct TurnWriter {
    to: Reference,
    /// The directory that it is in, if it is one.
    store: Option<Store>,
    journal: Journal,
    image: Image,
    state: Vec<u8>,
    /// The state at a turn that failed, which a remote may have all the same.
    unanswered: Option<(Image, Vec<u8>)>,
    /// The error of the last fold, until one succeeds.
    unfolded: Option<Cause>,
}

impl TurnWriter {
    /// A writer of turns that follow on the state of `image` and `state`.
    fn new(to: Reference, (store, journal): JournalPlace, image: Image, state: Vec<u8>) -> Self {
        Self { to, store, journal, image, state, unanswered: None, unfolded: None }
    }

    /// Has the next turn follow on the last one if a remote has that, although its answer was lost.
    fn settle(&mut self) -> Result<(), afresh_store::SaveError> {
        if self.journal.settle()?
            && let Some(there) = self.unanswered.take()
        {
            (self.image, self.state) = there;
        }
        Ok(())
    }

    /// Appends the changes of the session.
    fn append(
        &mut self,
        frozen: &dyn FrozenGuest,
        options: &SaveOptions,
    ) -> Result<SavedTurn, Cause> {
        let (image, state) = (frozen.image().clone(), frozen.bytes()?);
        let before = (&self.image, &self.state[..]);
        let turn = turn_since(before, &image, &state, self.journal.last())?;
        let appended = options.append(&mut self.journal, &turn);
        if appended.is_err() {
            self.unanswered = Some((image.clone(), state.clone()));
        }
        let bytes = appended.map_err(|error| {
            // A journal is full only after folds failed, and their cause is more informative.
            match (error, self.unfolded.take()) {
                (afresh_store::SaveError::TooLarge { .. }, Some(cause)) => cause,
                (error, unfolded) => {
                    self.unfolded = unfolded;
                    error.into()
                }
            }
        })?;
        (self.image, self.state) = (image, state);
        Ok(SavedTurn {
            id: self.journal.base(),
            turns: self.journal.turns(),
            bytes,
            pages: turn.changed_pages(),
        })
    }

    /// Makes a layer of the turns when there are many.
    fn fold(&mut self, options: &SaveOptions, opened: &Access) -> Result<(), Cause> {
        let Some(store) = &self.store else { return Ok(()) };
        let long = self.journal.turns() >= MOST_TURNS || self.journal.size() >= MOST_BYTES;
        if !long && !self.journal.is_nearly_full() {
            return Ok(());
        }
        let fold = options.fold();
        self.journal = store.fold_turns(self.to.name(), &self.journal, opened, &fold)?;
        Ok(())
    }

    /// Whether the turns in a remote are so many that the session is better saved whole there.
    fn is_long(&self) -> bool {
        self.store.is_none()
            && (self.journal.turns() >= MOST_DISTANT
                || self.journal.size() >= MOST_BYTES
                || self.journal.is_nearly_full())
    }
}

/// The continuation of a journal: the journal, and the directory that it is in, if it is in one.
type JournalPlace = (Option<Store>, Journal);

/// Whether a session can be saved turn by turn in a place.
fn keeps_turns(place: &Place) -> Result<bool, SaveError> {
    match place {
        Place::Directory(_) => Ok(true),
        Place::Remote(_) => keeps_turns_remotely(place),
        Place::File(_) => Ok(false),
    }
}

/// Continues from a snapshot in the same directory.
fn go_on_here(
    snapshot: &Snapshot,
    to: &Reference,
    options: &SaveOptions,
    same: impl Fn(Sha256) -> bool,
    replaced: ReplacedName<'_>,
) -> Result<Option<JournalPlace>, Cause> {
    let store = to.place().store()?;
    let resumed = match store.resolve(to.name()).is_ok_and(same) && !options.seals() {
        true => snapshot.resume_turns()?,
        false => None,
    };
    let journal = match resumed {
        Some(journal) => journal,
        // The existing snapshot has another form than requested.
        None if options.shapes() => return Ok(None),
        None => store.begin_turns(to.name(), snapshot, replaced)?,
    };
    Ok(Some((Some(store), journal)))
}

impl dyn FrozenGuest + '_ {
    /// Saves it whole, with turns to follow.
    fn begin(
        &self,
        to: &Reference,
        options: &SaveOptions,
        opened: &Options,
        replaced: ReplacedName<'_>,
    ) -> Result<JournalPlace, SaveError> {
        let saved = self.write(to, None, options, opened, replaced)?;
        let store = to.place().create()?;
        let replaced = ReplacedName::Snapshot(&saved.snapshot);
        let journal = store.begin_turns(to.name(), &saved.snapshot, replaced);
        let journal = journal.map_err(|source| SaveError::Write {
            reference: to.to_string(),
            source: source.into(),
        })?;
        Ok((Some(store), journal))
    }
}

impl Session {
    /// Saves the session's changes since its last save there. [`open`](crate::open) then opens the
    /// present state by the name. The first save in a directory is a snapshot, unless the session's
    /// guest was opened from one there. After that the cost of a turn follows its changes, in bytes
    /// and in time, plus one write to disk.
    ///
    /// The state becomes one of the tree, without a name, until the next turn.
    ///
    /// The same holds in an object store, where a turn is one request. In a registry or an archive
    /// the session is saved whole, as by [`Session::save`].
    ///
    /// # Errors
    /// As [`Session::save`]. [`SaveError::Write`] also when another session was saved under the
    /// same name since.
    pub fn save_turn(
        &mut self,
        to: &Reference,
        options: &SaveOptions,
    ) -> Result<SavedTurn, SaveError> {
        let freeze = |cause: Cause| SaveError::Freeze(cause);
        self.check().map_err(|error| freeze(error.into()))?;
        let frozen = self.frozen_guest().map_err(freeze)?;
        let failed = |source: Cause| SaveError::Write { reference: to.to_string(), source };
        let own = options.own_access(&self.guest.inner().options);
        // The check opens the remote.
        let known = self.saving.as_ref().is_some_and(|saving| saving.to.place() == to.place());
        if !known && !keeps_turns(to.place())? {
            let id = self.save_over(&*frozen, to, options)?;
            return Ok(SavedTurn { id, turns: 0, bytes: 0, pages: 0 });
        }
        let to = &to.named()?;
        let mut known = self.known_saving(to, options).map_err(failed)?;
        if let Some(saving) = &mut known
            && let Err(error) = saving.settle()
        {
            self.saving = known;
            return Err(failed(error.into()));
        }
        let mut saving = match known {
            Some(saving) if !saving.is_long() => saving,
            long => {
                let begun = self.save_whole(&*frozen, to, options, long.as_deref());
                // After a failure, a long session is still what the next save replaces.
                let place = match begun {
                    Ok(begun) => begun,
                    Err(error) => {
                        self.saving = long;
                        return Err(error);
                    }
                };
                let (image, state) = (frozen.image().clone(), frozen.bytes().map_err(failed)?);
                let turn = SavedTurn { id: place.1.base(), turns: 0, bytes: 0, pages: 0 };
                self.saving = Some(Box::new(TurnWriter::new(to.clone(), place, image, state)));
                return Ok(turn);
            }
        };
        let saved = saving.append(&*frozen, options).map_err(failed);
        // The session on disk is whole, though it stays long; the next turn tries again.
        if saved.is_ok() {
            saving.unfolded = saving.fold(options, &own).err();
        }
        // Also after a failure: the next turn still follows on the last save.
        self.saving = Some(saving);
        saved
    }

    /// The error of the fold after the last saved turn. The turn itself is saved, and the next one
    /// folds again; a session that cannot be folded is refused further turns once its journal is
    /// full.
    #[must_use]
    pub fn fold_error(&self) -> Option<&(dyn std::error::Error + Send + Sync)> {
        self.saving.as_ref()?.unfolded.as_deref()
    }

    /// The journal that the next turn can be appended to, if it exists.
    fn known_saving(
        &mut self,
        to: &Reference,
        options: &SaveOptions,
    ) -> Result<Option<Box<TurnWriter>>, Cause> {
        match self.saving.take() {
            Some(saving) if saving.to == *to => return Ok(Some(saving)),
            Some(mut other) => {
                // Otherwise a later save under that name is refused.
                let _ = other.settle();
                let TurnWriter { to, journal, .. } = *other;
                self.saved_names.note_session(to, journal);
            }
            None => {}
        }
        if self.saved_names.has(to) {
            // The guest came out of an earlier meaning.
            return Ok(None);
        }
        self.go_on(to, options)
    }

    /// Saves it whole, with turns to follow; in a remote, in place of `long`.
    fn save_whole(
        &self,
        frozen: &dyn FrozenGuest,
        to: &Reference,
        options: &SaveOptions,
        long: Option<&TurnWriter>,
    ) -> Result<JournalPlace, SaveError> {
        if matches!(to.place(), Place::Remote(_)) {
            let long = long.map(|long| &long.journal);
            return Ok((None, self.begin_remote_turns(frozen, to, options, long)?));
        }
        debug_assert!(long.is_none());
        frozen.begin(to, options, &self.guest.inner().options, self.replaced(to))
    }

    /// Saves it whole where no turns can follow.
    fn save_over(
        &mut self,
        frozen: &dyn FrozenGuest,
        to: &Reference,
        options: &SaveOptions,
    ) -> Result<Sha256, SaveError> {
        if matches!(to.place(), Place::Remote(_)) {
            let id = self.save_over_remote(frozen, to, options)?;
            self.saved_names.note_save(to, id)?;
            return Ok(id);
        }
        let options_of_guest = &self.guest.inner().options;
        Ok(frozen.write(to, None, options, options_of_guest, ReplacedName::Any)?.id)
    }

    /// Notes that the session was saved whole.
    pub(super) fn note_save(&mut self, to: &Reference, id: Sha256) -> Result<(), SaveError> {
        let named = to.named()?;
        // Its journal has ended. The next turn follows on the new meaning.
        self.saving.take_if(|saving| saving.to == named);
        self.saved_names.note_save(to, id)?;
        Ok(())
    }

    /// Continues from the snapshot that the session's guest came from, if that is in the same
    /// store.
    fn go_on(
        &self,
        to: &Reference,
        options: &SaveOptions,
    ) -> Result<Option<Box<TurnWriter>>, Cause> {
        let Some(origin) = self.guest.origin().filter(|it| it.reference.place() == to.place())
        else {
            return Ok(None);
        };
        let snapshot = &origin.snapshot;
        let same = |id: Sha256| origin.reference.name() == to.name() && id == snapshot.id();
        let begun = match to.place() {
            Place::Remote(_) => {
                let journal = self.continue_remote_turns(snapshot, to, options, same)?;
                journal.map(|journal| (None, journal))
            }
            _ => go_on_here(snapshot, to, options, same, self.replaced(to))?,
        };
        let Some(place) = begun else { return Ok(None) };
        let (image, state) = (origin.memory.pages().clone(), snapshot.state().to_vec());
        Ok(Some(Box::new(TurnWriter::new(to.clone(), place, image, state))))
    }

    /// Makes the present state one of the tree, unless it is one, and freezes it.
    pub(crate) fn frozen_guest(&mut self) -> Result<Box<dyn FrozenGuest>, Cause> {
        let now = self.backend.current()?;
        self.frozen(now)
    }

    /// Any state of the tree, frozen. Shares the memory.
    pub(crate) fn frozen(&self, id: SnapshotId) -> Result<Box<dyn FrozenGuest>, Cause> {
        self.backend.freeze(id, &self.guest.inner().backend)
    }
}
