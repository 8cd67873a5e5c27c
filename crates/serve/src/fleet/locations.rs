//! The last known hosts of sandboxes.
//!
//! Promises: the memory of a request is that of a tenant only where the request shows a key of the
//! tenant, or the token of its sandbox or a signature by it.

use std::collections::HashMap;
use std::sync::Arc;

use axum::body::Body;
use hyper::Request;

use super::Fleet;
use crate::body::Meter;
use crate::lock::lock;
use crate::sandbox::records::store::{SandboxAccess, SandboxHost};

/// Maximum sandboxes whose hosts are known.
const MAX_LOCATIONS: usize = 65_536;

/// The last known host of a sandbox.
#[derive(Clone)]
pub(super) struct SandboxLocation {
    /// The life of the host.
    pub(super) life: String,
    /// The proof that requests need, if this host has read the entry.
    pub(super) access: Option<Arc<SandboxAccess>>,
}

/// The last known hosts of sandboxes, by their ids.
#[derive(Default)]
pub(super) struct Locations(HashMap<String, SandboxLocation>);

impl Locations {
    pub(super) fn get(&self, id: &str) -> Option<SandboxLocation> {
        self.0.get(id).cloned()
    }

    pub(super) fn remove(&mut self, id: &str) {
        self.0.remove(id);
    }

    /// Forgets the sandboxes of a life that is over.
    pub(super) fn remove_life(&mut self, life: &str) {
        self.0.retain(|_, known| known.life != life);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    fn insert(&mut self, id: &str, location: SandboxLocation) {
        if self.0.len() >= MAX_LOCATIONS {
            self.0.clear();
        }
        self.0.insert(id.to_owned(), location);
    }
}

impl Fleet {
    /// Notes where a sandbox was found.
    pub(super) fn note_location(&self, id: &str, location: SandboxLocation) {
        // A host whose lease is over has no sandbox.
        if !self.is_over(&location.life) {
            lock(&self.locations).insert(id, location);
        }
    }
}

/// Counts the body of a request in the share of its tenant, as far as the request proves that.
pub(super) fn charge_tenant(
    sandboxes: &dyn SandboxHost,
    request: &Request<Body>,
    access: &SandboxAccess,
    inside: bool,
) {
    if let Some(meter) = request.extensions().get::<Meter>()
        && sandboxes.proves(request, access, inside)
    {
        meter.set_tenant(Some(&access.tenant));
    }
}
