//! The server's tests, in one program that is linked once.

mod access;
mod audit;
#[cfg(linux_guests)]
mod background_memory;
mod budgets;
mod code;
mod common;
mod cpu_limits;
mod creation_keys;
mod fairness;
mod full_disk;
mod handlers;
mod hostile;
#[cfg(feature = "oidc")]
mod oidc;
mod output;
mod sandbox;
mod serve;
#[path = "../../../store/tests/suite/support/small_disk.rs"]
mod small_disk;
mod tenants;
#[cfg(feature = "tls")]
mod tls;
