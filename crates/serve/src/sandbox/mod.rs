//! Sandboxes over HTTP: live sessions that clients create, run code in, save, fork and roll back.
//!
//! Promises: the shape is E2B's, so its clients work as they are; extensions are in `openapi.json`. A call that is
//! cut short (a trap, a time limit) is undone: the sandbox is as it was before it. A sandbox that was acknowledged as
//! paused, and each snapshot, outlives the process. A client sees only the sandboxes of its tenant, which its key
//! selects. May break it: a store that is changed from outside while the server runs.

mod accounts;
mod admission;
mod background;
mod budgets;
mod byte_channel;
mod charge;
mod commands;
mod config;
mod connect;
mod contexts;
mod control;
mod directory;
mod envd;
mod execute;
mod extensions;
mod file_access;
mod file_body;
mod file_metadata;
mod file_transfer;
mod form;
mod keys;
mod ledger;
mod lifecycle;
mod listing;
mod memory;
mod memory_directory;
#[cfg(feature = "fleet")]
mod migration;
mod output_router;
mod overview;
#[cfg(feature = "linux")]
mod port;
mod process;
mod quota;
mod record;
mod registry;
mod request_record;
mod requests;
#[expect(clippy::module_inception, reason = "the file of the type `Sandbox`")]
mod sandbox;
mod saving;
mod signature;
mod snapshots;
mod streaming;
mod template;
mod tenant_queue;
#[cfg(feature = "linux")]
mod tunnels;
mod usage;
mod usage_report;
mod user;
mod watchers;

#[cfg(feature = "fleet")]
pub(crate) use self::sandbox::milliseconds;
pub use budgets::{Budgets, Limits};
pub use config::{SandboxConfig, Template};
pub use keys::Keys;
pub(crate) use keys::Scope;
#[cfg(feature = "fleet")]
pub(crate) use record::{SandboxRecord, SnapshotRecord};
pub(crate) use registry::Sandboxes;
pub(crate) use routes::Routes;
pub(crate) use tenant_queue::MAX_WEIGHT;
pub(crate) use usage_report::sample_tenant_metrics;

mod routes;
