//! Sandboxes over HTTP: live sessions that clients create, run code in, save, fork and roll back.
//!
//! Promises: the shape is E2B's, so its clients work as they are; extensions are in `openapi.json`.
//! A call that is cut short (a trap, a time limit) is undone: the sandbox is as it was before it. A
//! sandbox that was acknowledged as paused, and each snapshot, outlives the process. A client sees
//! only the sandboxes of its tenant, which its key selects. May break it: a store that is changed
//! from outside while the server runs.

mod accounts;
mod admission;
mod answer;
mod authorization;
mod background;
mod base_guest;
mod base_state;
mod budgets;
mod build;
mod build_request;
mod builds;
mod byte_channel;
mod charge;
mod commands;
mod config;
mod connect;
#[cfg(feature = "linux")]
mod connection_audit;
mod contexts;
mod control;
mod creation;
mod directory;
mod directory_store;
mod downloads;
mod entry_size;
mod envd;
mod execute;
mod extensions;
mod file_access;
mod file_body;
mod file_entry;
mod file_metadata;
mod file_transfer;
mod form;
#[cfg(feature = "fleet")]
mod hosting;
mod keys;
mod lifecycle;
mod listing;
mod memory;
mod memory_directory;
mod network;
mod network_policy;
mod network_rules;
mod network_update;
mod output_router;
mod overview;
#[cfg(feature = "linux")]
mod port;
mod process;
mod quota;
mod random;
mod record;
mod registry;
mod request_host;
mod request_record;
mod requests;
mod restart;
#[expect(clippy::module_inception, reason = "the file of the type `Sandbox`")]
mod sandbox;
mod sandbox_metrics;
mod saving;
mod session_error;
mod signature;
mod snapshots;
pub(crate) mod store;
mod stored_elsewhere;
mod streaming;
mod tasks;
mod template;
mod templates;
mod tenant_queue;
mod tenant_use;
#[cfg(test)]
mod tests;
#[cfg(feature = "linux")]
mod tunnels;
mod undo_point;
mod unknown_fields;
mod usage;
mod usage_report;
mod user;
mod watch_requests;
mod watchers;

pub use budgets::{Budgets, Limits};
pub use config::{SandboxConfig, Template};
pub use keys::Keys;
pub(crate) use keys::Scope;
#[cfg(feature = "oidc")]
pub(crate) use keys::{Identity, KeyError, Scopes};
pub(crate) use registry::Sandboxes;
pub(crate) use routes::Routes;
pub(crate) use tenant_queue::MAX_WEIGHT;
pub(crate) use usage_report::sample_tenant_metrics;

mod routes;
