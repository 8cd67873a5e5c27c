//! Internal crate of `afresh`. The measurements behind afresh's figures. Every table holds its
//! rivals in the same run.
//!
//! A shared machine drifts, so the contestants of a case take turns: round after round, each runs a
//! batch, and the report gives the median over rounds, with the smallest and the 99th percentile.

pub mod arena;
pub mod code_cache;
#[cfg(feature = "http")]
pub mod component;
pub mod density;
#[cfg(feature = "linux")]
pub mod eryx;
#[cfg(feature = "arena")]
pub mod fault;
#[cfg(feature = "fleet")]
pub mod fleet;
mod foreign_rows;
pub mod fuzz;
#[cfg(feature = "linux")]
mod groundhog;
pub mod grow;
#[cfg(feature = "linux")]
pub mod gvisor;
pub mod js;
#[cfg(feature = "linux")]
mod linux;
#[cfg(feature = "linux")]
mod linux_calls;
#[cfg(feature = "linux")]
mod linux_files;
#[cfg(feature = "linux")]
mod linux_starts;
#[cfg(feature = "linux")]
pub mod linux_table;
pub mod live;
pub mod modules;
pub mod python;
mod python_rival;
pub mod report;
pub mod restore;
mod rival_process;
pub mod rivals;
pub mod row;
pub mod sandbox;
pub mod serve;
pub mod session;
mod session_files;
mod session_saved;
pub mod start;
pub mod steady;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[cfg(feature = "vm")]
pub mod vm;
pub mod wago;
pub mod wasm;

pub use row::{Contestant, Options, Row, Sink, contest};
