//! The native half of the npm package `afresh`: guests, sessions, commands, and the host side of
//! interpreters.
//!
//! JavaScript starts an operation with a number, a request in JSON and bytes. The operation runs on
//! another thread and ends with one event for that number. Values stay in CBOR here: JavaScript
//! encodes and decodes them.
//!
//! Promises: no operation runs on a thread of JavaScript, and no other thread enters an environment
//! that has begun to end. May break it: a function of Node-API that does not behave as documented.

// `afresh::linux` is missing elsewhere, and the errors of missing names would not give the reason.
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!(
    "the npm package of afresh has Linux programs, so it builds for Linux on x86_64 and aarch64 only"
);

mod call;
mod environment;
mod error;
mod exec;
mod mailbox;
mod node_api;
mod objects;
mod operation;
mod outcome;
mod program;
mod reply;
mod session;
mod threads;
mod warm;
