//! A moment of a guest, which is saved while the guest runs.
//!
//! Promises: the snapshot has the state of that moment, whatever the guest does meanwhile, or the
//! save fails. A Wasm guest stops while the pages that it has written are protected, and runs while
//! they are copied and written; with a [`SavePreparation`] most of them are protected before.
//! Guests of Linux programs, virtual machines and components stop while their changes are copied.

use afresh_memory::FreezePreparation;
use afresh_store::ReplacedName;

use super::backend::FrozenGuest;
use super::save::Parent;
use super::{Guest, Lease, SaveError, SaveOptions, SavedSnapshot, Session};
use crate::{Cause, Place, Reference};

/// The part of a save point that runs beside the guest, in any thread. Written pages are protected
/// again: a system call of a host function that writes to guest memory may fail with `EFAULT`.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let guest = afresh::open("guest.wasm", &afresh::Options::new())?;
/// # let mut session = guest.session()?;
/// let preparation = session.prepare_save_point()?;
/// let work = std::thread::spawn(move || preparation.run());
/// // … calls of the session …
/// let point = session.save_point()?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "a save point is prepared when its work is done"]
pub struct SavePreparation(Vec<FreezePreparation>);

impl SavePreparation {
    pub(super) fn new(work: Vec<FreezePreparation>) -> Self {
        Self(work)
    }

    /// Does the work: a system call for each run of pages that the guest has written. It ends early
    /// if the save point is taken, or the guest moves to another state. Work that fails or is
    /// dropped is done when the save point is taken.
    pub fn run(&self) {
        for memory in &self.0 {
            let _ = memory.run();
        }
    }

    /// Whether there is nothing to do, because the guest stops while its changes are copied.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(FreezePreparation::is_empty)
    }
}

/// The state of a guest at one moment. It does not borrow the guest: another thread can save it.
///
/// It holds the pages that the guest has written since the warm state.
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

    /// Saves it as a snapshot, as [`Lease::save`] saves the present state.
    ///
    /// A session that saves turns under the same name is not notified, and refuses its next turn.
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
        let opened = &self.guest.inner().options;
        self.frozen.write(to, parent.transpose()?, options, opened, ReplacedName::Any)
    }
}

impl Session {
    /// Begins a save point, for which [`Session::save_point`] then stops the session for less time.
    ///
    /// A system call of a host function that writes to guest memory may fail with `EFAULT` from
    /// here on. Read into a buffer of the host, and copy from there.
    ///
    /// # Errors
    /// As [`Session::save_point`].
    pub fn prepare_save_point(&mut self) -> Result<SavePreparation, SaveError> {
        let freeze = |cause: Cause| SaveError::Freeze(cause);
        self.check().map_err(|error| freeze(error.into()))?;
        let mut lease: Lease<'_> = self.lend().map_err(|error| freeze(error.into()))?;
        lease.prepare_save_point()
    }

    /// The present state, to be saved while the session continues.
    ///
    /// From here on, a system call of a host function that writes to guest memory
    /// may fail with `EFAULT`, also where the function touched that memory before. Read into a
    /// buffer of the host, and copy from there.
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
