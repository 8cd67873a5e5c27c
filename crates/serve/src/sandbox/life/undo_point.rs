//! The state that a sandbox rolls back to when its work is cut short.

use std::time::{Duration, Instant};

use afresh::Session;
use afresh::snapshot::SnapshotId;

use crate::error_response::ErrorResponse;
use crate::sandbox::agent::output_router::OutputRouter;
use crate::sandbox::http::session_error::refused;

/// The name of the internal states in which pieces of code began.
pub(crate) const MARK: &str = "";

/// Age of connection data that a rollback may undo.
#[cfg(feature = "linux")]
const DELIVERY_TIME: Duration = Duration::from_secs(1);

/// Why a sandbox has a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// It is called.
    Call,
    /// A client connects to a program in it.
    #[cfg(feature = "linux")]
    Connection,
    /// It does background work, if it is live.
    Slice,
}

/// The state that a sandbox rolls back to when its work is cut short.
#[derive(Default)]
pub(crate) struct UndoPoint {
    pub(crate) state: Option<SnapshotId>,
    /// The last call ended there; otherwise it began there.
    pub(crate) after: bool,
    /// When.
    pub(crate) put: Option<Instant>,
}

impl UndoPoint {
    /// The next work follows this. Calls are not to be undone, and data of connections would cost a
    /// checkpoint each.
    pub(crate) fn followed_by(&mut self, turn: Operation) {
        self.after &= match turn {
            Operation::Call => false,
            #[cfg(feature = "linux")]
            Operation::Connection => self.put.is_some_and(|put| put.elapsed() < DELIVERY_TIME),
            Operation::Slice => true,
        };
    }

    /// Puts it where the session is now.
    pub(crate) fn set_mark(
        &mut self,
        session: &mut Session,
        after: bool,
    ) -> Result<SnapshotId, ErrorResponse> {
        let here = session.checkpoint(MARK).map_err(|error| refused(&error))?;
        (self.after, self.put) = (after, Some(Instant::now()));
        if let Some(old) = self.state.replace(here) {
            // A rollback may have dropped it.
            let _ = session.drop_checkpoint(old);
        }
        Ok(here)
    }
}

pub(crate) fn undo(
    session: &mut Session,
    to: SnapshotId,
    speaker: &OutputRouter,
) -> Result<(), ErrorResponse> {
    speaker.undone();
    session.rollback(to).map(drop).map_err(|error| refused(&error))
}
