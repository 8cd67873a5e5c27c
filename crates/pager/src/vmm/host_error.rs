//! Why a host refuses a request.

use std::io;

use super::host::{MAX_ENDPOINTS, MAX_NAME};
use super::listener::ListenError;

/// An endpoint could not be opened or closed, or a VMM is not known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The name of an endpoint is not usable.
    #[error("an endpoint cannot be called {0:?}: use 1 to {MAX_NAME} letters, digits, `-` and `_`")]
    Name(String),
    /// There is such an endpoint.
    #[error("there is an endpoint called {0}: choose another name, or remove it first")]
    Taken(String),
    /// Too many endpoints.
    #[error("{MAX_ENDPOINTS} endpoints are open: remove one first")]
    TooMany,
    /// There is no such endpoint.
    #[error("no endpoint is called {name}; there are: {there}")]
    NoEndpoint {
        /// The name.
        name: String,
        /// Names of the endpoints.
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
    /// The watchdog has ended.
    #[error("the process that would close the memory of VMMs has ended: restart the pager ({0})")]
    Watchdog(io::Error),
    /// The host is being stopped.
    #[error("the pager is being stopped")]
    Stopping,
}
