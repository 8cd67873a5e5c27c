//! Sandboxes over HTTP: live sessions that clients create, run code in, save, fork and roll back.
//!
//! What it promises: the shape is E2B's, so its clients work as they are; what goes beyond is in `openapi.json`.
//! A call that is cut short (a trap, a time limit) is undone: the sandbox is as it was before it. A sandbox that was
//! acknowledged as paused, and each snapshot, outlives the process. A client sees the sandboxes of its own key's
//! tenant, and nobody else's. What may break it: a store that is changed from outside while the server runs.

mod background;
mod beyond;
mod commands;
mod config;
mod connect;
mod control;
mod ending;
mod envd;
mod execute;
mod keys;
mod ledger;
#[cfg(feature = "linux")]
mod lines;
#[cfg(feature = "fleet")]
mod moving;
mod one;
mod overview;
mod pieces;
#[cfg(feature = "linux")]
mod port;
mod process;
mod quota;
mod record;
mod registry;
mod snapshots;
mod speaker;
mod telling;
mod template;

pub use config::{SandboxConfig, Template};
pub use keys::Keys;
#[cfg(feature = "fleet")]
pub(crate) use one::milliseconds;
#[cfg(feature = "fleet")]
pub(crate) use record::{SandboxRecord, SnapshotRecord};
pub(crate) use registry::Sandboxes;
pub(crate) use routes::Routes;

mod routes;
