//! A state of a session to return to that no relative can drop.
//!
//! Promises: [`Session::rollback`](crate::Session::rollback) to a mark finds its state, whatever
//! was dropped meanwhile; a state that was made for a mark leaves the tree with it. May break it:
//! nothing in safe code.

use std::any::Any;

use afresh_snapshot::{SnapshotId, StateHold};

/// A state of a session to return to, made by [`Session::mark`](crate::Session::mark).
///
/// Its pages are kept until the mark is dropped. [`Session::diff`](crate::Session::diff) and
/// [`Session::delta`](crate::Session::delta) find a mark by its id, and fail once a relative has
/// dropped the state. A call that may be undone starts with a mark:
///
/// ```no_run
/// # use afresh::{Call, Session, SessionError};
/// # fn attempt(session: &mut Session, call: &Call) -> Result<(), SessionError> {
/// let before = session.mark()?;
/// if session.invoke(call).is_err() {
///     session.rollback(&before)?;
/// }
/// # Ok(())
/// # }
/// ```
pub struct Mark {
    id: SnapshotId,
    /// The `StateHold` of the branch, whose type depends on the kind of guest.
    pub(crate) hold: Box<dyn Any + Send + Sync>,
}

impl Mark {
    /// The mark that keeps this hold.
    pub(crate) fn new<S: Send + Sync + 'static>(hold: StateHold<S>) -> Self {
        Self { id: hold.id(), hold: Box::new(hold) }
    }

    /// The state, as [`Session::tree`](crate::Session::tree) lists it unless it was dropped.
    #[must_use]
    pub fn id(&self) -> SnapshotId {
        self.id
    }
}

impl std::fmt::Debug for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mark").field("id", &self.id).finish_non_exhaustive()
    }
}

impl PartialEq for Mark {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for Mark {}
