//! The state that a sandbox rolls back to when its work is cut short.

use std::time::{Duration, Instant};

use afresh::{Mark, Session};

use crate::error_response::ErrorResponse;
use crate::sandbox::agent::output_router::OutputRouter;
use crate::sandbox::http::session_error::refused;

/// Age of connection data that a rollback may undo.
#[cfg(linux_guests)]
const DELIVERY_TIME: Duration = Duration::from_secs(1);

/// Why a sandbox has a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// It is called.
    Call,
    /// A client connects to a program in it.
    #[cfg(linux_guests)]
    Connection,
    /// It does background work, if it is live.
    Slice,
}

/// The state that a sandbox rolls back to when its work is cut short.
#[derive(Default)]
pub(crate) struct UndoPoint {
    mark: Option<Mark>,
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
            #[cfg(linux_guests)]
            Operation::Connection => self.put.is_some_and(|put| put.elapsed() < DELIVERY_TIME),
            Operation::Slice => true,
        };
    }

    /// Puts it where the session is now.
    pub(crate) fn set_mark(
        &mut self,
        session: &mut Session,
        after: bool,
    ) -> Result<(), ErrorResponse> {
        self.mark = Some(session.mark().map_err(|error| refused(&error))?);
        (self.after, self.put) = (after, Some(Instant::now()));
        Ok(())
    }

    /// Whether the last call ended there, and nothing followed that is not to be undone.
    #[cfg(linux_guests)]
    pub(crate) fn is_after_call(&self) -> bool {
        self.after && self.is_set()
    }

    /// Whether it holds a state.
    #[cfg(any(test, linux_guests))]
    pub(crate) fn is_set(&self) -> bool {
        self.mark.is_some()
    }

    /// Takes the session back there.
    pub(crate) fn undo(
        &self,
        session: &mut Session,
        router: &OutputRouter,
    ) -> Result<(), ErrorResponse> {
        router.undone(self.put);
        let Some(mark) = &self.mark else { return Ok(()) };
        session.rollback(mark).map(drop).map_err(|error| refused(&error))
    }
}
