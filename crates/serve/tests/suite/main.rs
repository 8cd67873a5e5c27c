//! The server's tests, in one program that is linked once.

mod common;
mod sandbox;
mod serve;
#[cfg(feature = "tls")]
mod tls;
