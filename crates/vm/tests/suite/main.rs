//! The crate's tests, in one program that is linked once.

mod boundary;
mod common;
mod fork;
mod frozen;
mod golden;
mod leftovers;
mod oracle;
mod processors;
mod refused;
mod sandbox;
mod snapshots;
mod trackers;
