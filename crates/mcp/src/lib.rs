//! Internal crate of `afresh`. Sandboxes for agents that speak the Model Context Protocol: they run
//! code and commands, fork, and roll back.
//!
//! [`Server`] holds the sandboxes of one client or one team. [`Server::serve_stdio`] answers a
//! client on standard input and output, and [`Server::serve_http`] answers clients over HTTP. The
//! protocol itself is `rmcp`'s.
//!
//! Promises: every sandbox starts from the warm state of the guest. Code that is cut short (a time
//! limit, a cancellation, a trap) is undone, and the result says so. A command that is cut short is
//! killed, and its effects stay until a rollback. Results have bounded sizes. May break it: one
//! server is one trust domain, so every client with its token reaches every sandbox.

mod answering_service;
mod arguments;
mod bounded_sessions;
mod collector;
mod connections;
mod displayed;
mod http;
mod lines;
mod message_limit;
mod progress;
mod registry;
mod results;
mod sandbox;
mod server;
mod state_memory;
mod stdio;
mod tools;

pub use collector::OutputCollector;
pub use server::{Config, Server};
