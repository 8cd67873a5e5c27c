//! Why a host refuses a request.

use std::io;

use super::host::{MAX_DOORS, MAX_NAME};
use super::listener::ListenError;

/// A door could not be opened or closed, or a VMM is not known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The name of a door is not usable.
    #[error("a door cannot be called {0:?}: use 1 to {MAX_NAME} letters, digits, `-` and `_`")]
    Name(String),
    /// There is such a door.
    #[error("there is a door called {0}: choose another name, or remove it first")]
    Taken(String),
    /// Too many doors.
    #[error("{MAX_DOORS} doors are open: remove one first")]
    TooMany,
    /// There is no such door.
    #[error("no door is called {name}; there are: {there}")]
    NoDoor {
        /// The name.
        name: String,
        /// Names of the doors.
        there: String,
    },
    /// There is no such VMM.
    #[error("no VMM is called {name}; there are: {there}")]
    NoVm {
        /// The name.
        name: String,
        /// Names of the VMMs.
        there: String,
    },
    /// The socket could not be made.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A thread could not be started.
    #[error("starting a thread: {0}")]
    Thread(io::Error),
    /// The keeper has ended.
    #[error("the process that would close the memory of VMMs has ended: restart the pager ({0})")]
    Keeper(io::Error),
    /// The host is being stopped.
    #[error("the pager is being stopped")]
    Stopping,
}
