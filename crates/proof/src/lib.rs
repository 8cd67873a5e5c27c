//! Internal crate of `afresh`. Suites that hold warm guests against plain wasmtime.
//!
//! * [`spec`]: the WebAssembly specification's own tests; every assertion again after a reset.
//! * [`differential`]: random modules made of state ([`stateful`]), on every kind of instance that
//!   a guest can have: first, recycled, new, replaced, thawed and forked.
//!
//! Host functions of the random modules change guest state and the store that they are called in
//! ([`meddling`]).
//!
//! Promises: the reference is an instance of the original module in an engine of plain wasmtime,
//! which shares no code with ours. Both suites count what they met, so that they cannot pass on
//! nothing.
//!
//! `cargo xtask soak` drives both for a given time; the tests run a sample of the random modules
//! and all of the specification.

pub mod differential;
pub mod meddling;
pub mod outcome;
pub mod random;
pub mod reference;
pub mod spec;
pub mod stateful;
