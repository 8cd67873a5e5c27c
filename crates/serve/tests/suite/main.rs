//! The server's tests, in one program that is linked once.

mod code;
mod common;
mod handlers;
mod hostile;
mod output;
mod sandbox;
mod serve;
mod tenants;
#[cfg(feature = "tls")]
mod tls;
