//! Sandboxes over HTTP: live sessions that clients create, run code in, save, fork and roll back.
//!
//! Promises: the shape is E2B's, so its clients work as they are; extensions are in `openapi.json`.
//! A call that is cut short (a trap, a time limit) is undone: the sandbox is as it was before it. A
//! sandbox that was acknowledged as paused, and each snapshot, outlives the process. A client sees
//! only the sandboxes of its tenant, which its key selects. May break it: a store that is changed
//! from outside while the server runs.

pub(crate) mod agent;
pub(crate) mod catalog;
pub(crate) mod connections;
pub(crate) mod http;
pub(crate) mod lifecycle;
pub(crate) mod records;
pub(crate) mod request_body;
pub(crate) mod tenants;
pub(crate) mod transfer;

mod config;
#[cfg(test)]
pub(crate) mod tests;

pub use config::{SandboxConfig, Template};
pub use http::keys::Keys;
pub(crate) use http::keys::Scope;
#[cfg(feature = "oidc")]
pub(crate) use http::keys::{Identity, KeyError, Scopes};
pub(crate) use http::routes::Routes;
pub(crate) use http::usage_report::sample_tenant_metrics;
pub(crate) use lifecycle::registry::Sandboxes;
pub use tenants::budgets::{Budgets, Limits};
pub(crate) use tenants::tenant_queue::MAX_WEIGHT;
