//! The native half of the npm package `afresh`: guests, sessions, commands, and the host side of
//! interpreters.
//!
//! JavaScript starts an operation with a number, a request in JSON and bytes. The operation runs on
//! another thread and ends with one event for that number. Values stay in CBOR here: JavaScript
//! encodes and decodes them.
//!
//! Promises: no operation runs on a thread of JavaScript, and no other thread enters an environment
//! that has begun to end. May break it: a function of Node-API that does not behave as documented.

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
