//! The server as its fleet sees it.

use std::sync::Arc;

use async_trait::async_trait;
use axum::body::Body;
use axum::response::Response;
use hyper::Request;

use crate::sandbox::records::store::SandboxHost;

/// A server that answers requests of other hosts.
#[async_trait]
pub(crate) trait FleetHost: Send + Sync {
    /// Requests that guests answer now, and their limit.
    fn busy(&self) -> (usize, usize);

    /// Routes of its guests, as [`route_of`](super::route_of) writes them.
    fn routes(&self) -> Vec<String>;

    /// Its sandboxes, if it serves any.
    fn sandboxes(&self) -> Option<Arc<dyn SandboxHost>>;

    /// Answers a request that another host has sent here. `take` permits it to take a sandbox
    /// without an owner. `None` if the sandbox is not here.
    async fn answer_other(&self, request: Request<Body>, take: bool) -> Option<Response>;

    /// Ends the server once it has answered every request that reached it.
    fn shutdown(&self);
}
