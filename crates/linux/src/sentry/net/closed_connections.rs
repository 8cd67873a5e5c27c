//! Addresses of connections that this machine closed first. No socket can bind to them for a while
//! (`TIME_WAIT`).
//!
//! Promises: their number is limited. They are not in snapshots: time passes while a guest is
//! frozen.

mod closing;

use std::collections::VecDeque;

use crate::sentry::net::sockets::Address;

/// Maximum number of addresses; later ones replace the oldest.
pub(in crate::sentry) const MAX_ADDRESSES: usize = 4096;

/// An address that a connection had.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ClosedConnection {
    address: Address,
    /// Whether it was for the newer protocol alone.
    only: bool,
    /// Whether its socket let others use the address (`SO_REUSEADDR`).
    reuses: bool,
    /// Seconds since 1970.
    until: i64,
}

/// The addresses of all closed connections, by time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClosedConnections(VecDeque<ClosedConnection>);
