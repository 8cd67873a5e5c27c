//! A moment of a guest, which is saved while the guest runs.
//!
//! Promises: the snapshot has the state of that moment, whatever the guest does meanwhile. The
//! guest stops while its changes are copied, and runs while they are written.

use super::backend::FrozenGuest;
use super::save::Parent;
use super::{Guest, Lease, SaveError, SaveOptions, SavedSnapshot, Session};
use crate::{Cause, Place, Reference};

/// The state of a guest at one moment. It does not borrow the guest: another thread can save it.
///
/// It holds the pages that the guest has written to since it was warm.
#[must_use]
pub struct SavePoint {
    frozen: Box<dyn FrozenGuest>,
    guest: Guest,
}

impl std::fmt::Debug for SavePoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SavePoint").field("pages", &self.frozen.image().pages()).finish()
    }
}

impl SavePoint {
    pub(super) fn new(frozen: Box<dyn FrozenGuest>, guest: Guest) -> Self {
        Self { frozen, guest }
    }

    /// Saves it as a snapshot, as [`Lease::save`] does with the present state.
    ///
    /// A session that saves turns under the same name in a remote does not learn of it, and refuses
    /// its next turn.
    ///
    /// # Errors
    /// As [`Guest::save`].
    pub fn save(&self, to: &Reference, options: &SaveOptions) -> Result<SavedSnapshot, SaveError> {
        let parent = self.guest.origin().filter(|origin| {
            matches!(origin.reference.place(), Place::Directory(_))
                && origin.reference.place() == to.place()
                // The pages of a guest that has shrunk cannot form a delta.
                && self.frozen.image().pages() >= origin.snapshot.pages()
        });
        let parent = parent.map(|origin| {
            let changed = origin.memory.pages().differing_content(self.frozen.image());
            let changed = changed.map_err(|error| SaveError::Freeze(error.into()))?;
            Ok::<_, SaveError>(Parent::new(origin.snapshot.clone(), changed))
        });
        self.frozen.write(to, parent.transpose()?, options, &self.guest.inner().options)
    }
}

impl Session {
    /// The present state, to be saved while the session continues.
    ///
    /// # Errors
    /// [`SaveError::Freeze`] for a session that failed, or a state that cannot be kept.
    pub fn save_point(&mut self) -> Result<SavePoint, SaveError> {
        let freeze = |cause: Cause| SaveError::Freeze(cause);
        self.check().map_err(|error| freeze(error.into()))?;
        let mut lease: Lease<'_> = self.lend().map_err(|error| freeze(error.into()))?;
        lease.save_point()
    }
}
