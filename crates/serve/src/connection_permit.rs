//! The permit of a connection, which ends with the last request that holds it.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

/// The place of a connection among those that the server accepts. Each request of the connection
/// has a copy, because another protocol may follow HTTP there and last longer than the request.
#[derive(Clone)]
pub(crate) struct ConnectionPermit {
    _permit: Arc<OwnedSemaphorePermit>,
}

impl ConnectionPermit {
    /// The permit of a new connection.
    pub(crate) fn new(permit: OwnedSemaphorePermit) -> Self {
        Self { _permit: Arc::new(permit) }
    }
}
