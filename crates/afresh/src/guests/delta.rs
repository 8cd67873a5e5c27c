//! Deltas: the changes of a session since another state, as bytes that another process applies.
//!
//! Promises: a delta applies to every state that equals, byte for byte, the one it was made since,
//! and gives exactly the state that it was made from. It is refused elsewhere, with nothing
//! changed. Input from a stranger is checked before use.
//!
//! May break it: a channel where others can change a delta; sign or seal it there.

use afresh_memory::Image;
use afresh_pager::{SnapshotMemory, turn_applied, turn_since};
use afresh_snapshot::{SnapshotId, TreeError};
use afresh_store::{Limits, Turn, TurnError};

use super::backend::{FrozenGuest, WarmGuest, dispatch};
use super::digest_base::DigestBase;
use super::session::State;
use super::{Checkpoint, Guest, Session, SessionError};
use crate::{Cause, describe_error};

impl Guest {
    /// A session in the warm state with a delta applied. The delta must be one of
    /// [`Session::delta`] since the first state of its tree.
    ///
    /// # Errors
    /// As [`Session::apply`].
    pub fn apply(&self, delta: &[u8]) -> Result<Session, SessionError> {
        let mut session = self.session()?;
        session.apply(delta)?;
        Ok(session)
    }
}

impl Session {
    /// The changes of the session since a state of its tree, as bytes. They can be applied to an
    /// equal state ([`Session::apply`], [`Guest::apply`]) in this process or another. The present
    /// state becomes one of the tree, as by [`Session::save_turn`].
    ///
    /// The first delta of a guest reads its whole warm state once; later ones cost the changes.
    ///
    /// # Errors
    /// [`SessionError::Tree`] for an unknown state; [`SessionError::State`] when a state cannot be
    /// kept.
    pub fn delta<'c>(&mut self, since: impl Into<Checkpoint<'c>>) -> Result<Vec<u8>, SessionError> {
        self.check()?;
        let since = self.find(since.into())?;
        let before = self.frozen(since).map_err(|cause| match cause.downcast::<TreeError>() {
            Ok(error) => SessionError::Tree(*error),
            Err(cause) => SessionError::State(cause),
        })?;
        // Held while the present state takes the place of the last one that was kept for a delta.
        let now = self.frozen_guest().map_err(SessionError::State)?;
        self.delta_of(&*before, &*now).map_err(SessionError::State)
    }

    fn delta_of(&self, before: &dyn FrozenGuest, now: &dyn FrozenGuest) -> Result<Vec<u8>, Cause> {
        let (state_before, state) = (before.timeless_bytes()?, now.bytes()?);
        let parent = self.digest(before.image(), &state_before)?;
        let turn = turn_since((before.image(), &state_before), now.image(), &state, parent)?;
        Ok(turn.bytes().to_vec())
    }

    /// The digest of a state of this session.
    fn digest(&self, image: &Image, state: &[u8]) -> Result<[u8; 32], Cause> {
        let made = &self.guest.inner().digest_base;
        let base = match made.get() {
            Some(base) => base,
            // Made on first use, because it reads all of the warm state.
            None => {
                let base = DigestBase::new(self.warm()?.image().clone())?;
                made.get_or_init(|| base)
            }
        };
        Ok(base.digest(image, state)?)
    }

    /// The guest's warm state.
    fn warm(&self) -> Result<Box<dyn FrozenGuest>, Cause> {
        dispatch!(Backend, &self.guest.inner().backend, warm => warm.freeze_root())
    }

    /// Applies a delta to the present state. The result is a state of the tree without a name. The
    /// present state must equal the one since which the delta was made.
    ///
    /// # Errors
    /// [`SessionError::Delta`] for one that was made since another state, or is damaged;
    /// [`SessionError::State`] when it cannot be applied. The session is as it was before.
    pub fn apply(&mut self, delta: &[u8]) -> Result<SnapshotId, SessionError> {
        self.check()?;
        let turn = Turn::parse(delta, &self.limits())?;
        let now = self.frozen_guest().map_err(SessionError::State)?;
        let state = now.timeless_bytes().map_err(SessionError::State)?;
        let digest = self.digest(now.image(), &state).map_err(SessionError::State)?;
        if digest != *turn.parent() || turn.before() != now.image().pages() {
            return Err(TurnError::Parent.into());
        }
        let state = turn.state(&state)?;
        let made = turn_applied(&turn, now.image()).map_err(|e| SessionError::State(e.into()))?;
        self.move_to(made, &state)
    }

    /// Limits of a delta: as for a snapshot of the guest.
    fn limits(&self) -> Limits {
        self.guest.origin().map_or_else(Limits::default, |origin| *origin.snapshot.limits())
    }

    /// Goes to a state that came from elsewhere.
    fn move_to(&mut self, image: Image, state: &[u8]) -> Result<SnapshotId, SessionError> {
        let (memory, guest) = (SnapshotMemory::from(image), self.guest.inner());
        let made = self.backend.insert(memory, state, &guest.backend, &guest.options);
        let made = made.map_err(SessionError::State)?;
        let moved = self.backend.rollback_to(&made, false);
        if let Err(error) = &moved {
            self.state = State::Failed(describe_error(error));
        }
        moved.map(|()| made.id())
    }
}
