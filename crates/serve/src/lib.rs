//! Internal crate of `afresh`. Warm guests behind HTTP.
//!
//! A [`Server`] answers requests with guests that [`afresh::open`] opens: components of the world
//! `wasi:http/proxy`, modules with the byte interface, micro-VMs, and Linux programs. Each request
//! is answered from a pristine copy of the warm guest. A request over a limit of size, time or
//! number is refused with a status for the reason. One guest's flood does not starve another, and
//! guests are exchanged without a lost request.
//!
//! The server is built on hyper and tokio. Wasm runs in the task of its request, on a fiber, and
//! yields every few milliseconds. Other guests occupy a thread while they run.
//!
//! ```no_run
//! # async fn example() -> Result<(), afresh_serve::ServeError> {
//! use afresh_serve::{Config, GuestConfig, Server};
//!
//! let mut config = Config::default();
//! config.guests.push(GuestConfig::new("guest.wasm"));
//! let server = Server::bind(config).await?;
//! let handle = server.handle();
//! tokio::spawn(async move {
//!     // On a signal, say:
//!     handle.shutdown();
//! });
//! let saved = server.run().await;
//! assert!(saved, "the log names the sandboxes that could not be saved");
//! # Ok(())
//! # }
//! ```

// A lock in a `match` lasts to its end, where an arm may take it again.
#![warn(clippy::significant_drop_in_scrutinee)]

mod address_limits;
mod audit;
mod body;
mod body_shares;
mod budget;
mod concurrency;
mod config;
mod connection_permit;
mod cpu_time;
mod deadline;
mod disk_full;
mod error;
mod error_response;
mod failure;
#[cfg(feature = "fleet")]
pub mod fleet;
mod format_version;
mod guest_log;
mod handler;
mod health;
mod health_check;
mod labels;
mod lock;
mod logged_lease;
mod manifest;
mod metrics;
#[cfg(feature = "oidc")]
mod oidc;
#[cfg(feature = "otel")]
pub mod otel;
mod pool_metrics;
mod printable_text;
mod private_directory;
mod proxy;
mod random;
#[doc(hidden)]
pub mod reference;
mod reload;
mod request_ids;
mod resident;
mod reuse;
mod route;
mod routing_table;
mod runner;
mod sandbox;
mod server;
mod service;
mod span;
mod status;
#[cfg(feature = "fleet")]
mod store_metrics;
#[cfg(feature = "tls")]
mod tls;
mod wire;
mod yielding_future;

pub use audit::AuditConfig;
pub use config::{Config, GuestConfig, parse_duration};
pub use error::{ManifestError, ServeError};
pub use handler::{Handler, HandlerError, Reply};
pub use manifest::ConfigFault;
#[cfg(feature = "oidc")]
pub use oidc::OidcConfig;
#[doc(hidden)]
pub use printable_text::printable;
pub use sandbox::{Budgets, Keys, Limits, SandboxConfig, Template};
pub use server::{Handle, Server};
#[cfg(feature = "tls")]
pub use tls::TlsConfig;
