//! Internal crate of `afresh` (`afresh::wasm`). Warm Wasm guests, pristine for every call.
//!
//! A [`Guest`] is a module or component. [`Guest::warm`] instantiates it, runs its warm-up once and
//! keeps the resulting state: memories as images of the engine, globals and tables in the module.
//! [`Warm::lease`] then returns instances that all start from exactly that state. Dropping the
//! lease resets the instance, which costs the pages that its calls wrote.
//!
//! Two modes separate calls from one another:
//!
//! * [`Mode::Reset`]: the same live instance, with its memories, globals, tables and dropped
//!   segments restored. It is for modules whose analysis proves that a call can change nothing
//!   else, and refuses others with the reason.
//! * [`Mode::Fresh`]: a new `Store` and instance for every lease, over memory that already holds
//!   the warm image. It works for every Wasm feature of wasmtime, and for components.
//!
//! A [`Session`] is a live instance whose calls build on one another, and that can move to any
//! state of a tree.
//!
//! ```
//! use afresh_wasm::{Engine, EngineConfig, Guest, Val, WarmUp};
//!
//! let engine = Engine::new(EngineConfig::default())?;
//! let module = wat::parse_str(r#"(module
//!     (memory 1)
//!     (global $calls (mut i32) (i32.const 0))
//!     (func (export "warm") (i32.store (i32.const 8) (i32.const 40)))
//!     (func (export "next") (result i32)
//!         (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
//!         (i32.store (i32.const 8) (i32.add (i32.load (i32.const 8)) (global.get $calls)))
//!         (i32.load (i32.const 8))))"#)?;
//! let warm = Guest::new(&engine, &module)?.warm(WarmUp::new().call("warm", &[]))?;
//! for _ in 0..3 {
//!     let answer = warm.lease()?.call("next", &[])?;
//!     assert!(matches!(answer[..], [Val::I32(41)]));
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod call;
mod component;
mod engine;
mod error;
mod guest;
mod host;
mod lease;
mod session;
mod warm;

pub use afresh_files;
pub use afresh_pager::SnapshotOptions;
pub use afresh_pool::{Budget, LimitPolicy, Limits, NextItem, PoolStats, ProcessLimits, Usage};
pub use afresh_rewrite::{Analysis, LinkError, Refusal, Roots, link};
pub use call::bytes_entry::BytesEntry;
pub use call::entry::Entry;
pub use call::lease_options::{CallOptions, LeaseLimits, LeaseOptions};
pub use call::values::{ArgumentError, parse_arguments, show_value};
pub use component::WarmComponent;
pub use component::lease::{ComponentLease, OwnedComponentLease};
pub use engine::{Engine, EngineConfig, EpochSource, ZeroMemory, memory_reservation};
pub use error::{CallError, FreezeError, LoadError, ThawError, WarmError};
pub use guest::extism::{
    Extism, LogLevel, extism_bytes, extism_bytes_async, extism_handle, extism_handle_async,
};
pub use guest::{Guest, GuestOptions, Imports, Mode, WarmUp};
pub use host::files::Files;
pub use host::hand_over::{hand_over, hand_over_async};
#[cfg(feature = "call-hook")]
pub use host::hook::Hook;
pub use host::uniqueness::entropy_bytes;
pub use host::watch::{StopHandle, Watch};
pub use host::{Host, Limiter, Output, OutputHandler, StandardStream, State, Wasi};
pub use lease::{Lease, OwnedLease};
pub use session::{Session, SessionError, SessionState};
pub use warm::compare::Comparison;
pub use warm::frozen::{Frozen, FrozenState};
pub use warm::{Warm, WarmReport};
pub use wasmtime::{self, Val};
