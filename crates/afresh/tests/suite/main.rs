//! The front door's tests, in one program that is linked once.

mod common;
#[cfg(feature = "wasm")]
mod cost;
#[cfg(all(feature = "wasm", vm_guests, feature = "arena"))]
mod examples;
#[cfg(feature = "wasm")]
mod leases;
#[cfg(linux_guests)]
mod linux;
#[cfg(feature = "guests")]
mod names;
#[cfg(all(feature = "wasm", feature = "seal", feature = "remote"))]
mod open;
#[cfg(all(feature = "wasm", vm_guests))]
mod session;
#[cfg(feature = "wasm")]
mod session_files;
#[cfg(all(feature = "wasm", vm_guests, linux_guests))]
mod session_turns;
