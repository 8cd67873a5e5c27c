//! A Kubernetes controller that serves the custom resources of agent-sandbox (`Sandbox`,
//! `SandboxTemplate`, `SandboxClaim`, `SandboxWarmPool`) by sandboxes of `afresh serve`.
//!
//! A pod template with the runtime class `afresh` names a template of the server as its image. A
//! `Sandbox` is one sandbox of that template, and is ready within milliseconds.

pub mod claim;
pub mod condition;
pub mod context;
pub mod controller;
pub mod fields;
pub mod health;
pub mod interest;
pub mod json;
pub mod lease;
pub mod metrics;
#[cfg(test)]
mod mock;
pub mod operations;
pub mod pool;
pub mod queue;
pub mod resource;
pub mod sandbox;
pub mod section;
pub mod server;
pub mod sweep;
pub mod tenant;
#[cfg(test)]
mod tests;
pub mod watch;
