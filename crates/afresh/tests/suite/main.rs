//! The front door's tests, in one program that is linked once.

mod common;
#[cfg(feature = "wasm")]
mod cost;
#[cfg(all(feature = "wasm", feature = "vm", feature = "arena"))]
mod examples;
#[cfg(feature = "wasm")]
mod leases;
#[cfg(all(feature = "linux", target_os = "linux", target_arch = "x86_64"))]
mod linux;
#[cfg(feature = "guests")]
mod names;
#[cfg(all(feature = "wasm", feature = "seal", feature = "remote"))]
mod open;
#[cfg(all(feature = "wasm", feature = "vm"))]
mod session;
#[cfg(feature = "wasm")]
mod session_files;
#[cfg(all(feature = "wasm", feature = "vm", feature = "linux"))]
mod session_turns;
