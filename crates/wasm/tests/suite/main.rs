//! The crate's tests, in one program that is linked once.

mod asynchronous;
mod background;
mod bytes;
mod clones;
mod dirs;
mod embedder;
mod extism;
mod files;
mod fork;
mod fresh;
mod frozen;
mod golden;
mod handles;
#[cfg(feature = "call-hook")]
mod hook;
mod large;
mod linked;
mod lost_pages;
mod memory_layouts;
mod memory_limit;
mod nested;
mod owned_leases;
#[cfg(feature = "p3")]
mod p3;
mod passthrough;
mod preview2;
mod registry;
mod reset;
mod roots;
mod scarce_memory;
mod stacks;
mod store;
mod stubs;
mod wait;
mod warm_state;
mod watch;
