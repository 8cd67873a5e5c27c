//! Internal crate of `afresh`. Static analysis and rewriting of Wasm modules, so that an engine can
//! restore everything that a call may have changed.
//!
//! * [`analyze`] finds the state that a module can change, and why it may be impossible to restore.
//! * [`prepare`] moves data segments out into the engine's image and adds functions that save
//!   and restore globals, tables and dropped segments from inside the module.
//! * [`bake`] writes the state of a warm instance into a new module.
//! * [`link`] makes one module of several that import from one another; [`extism`] makes one of an
//!   Extism plug-in.
//! * [`prepare_component`] moves the data segments of nested modules, [`open_component`] shows the
//!   state of its core instances, and [`bake_component`] writes it into a new component.
//!
//! ```
//! use afresh_rewrite::{PrepareOptions, names, prepare};
//!
//! // (module (memory 1) (data (i32.const 8) "hi"))
//! let guest = b"\0asm\x01\0\0\0\x05\x03\x01\0\x01\x0b\x08\x01\0\x41\x08\x0b\x02hi";
//! let prepared = prepare(guest, &PrepareOptions::default())?;
//! assert_eq!(prepared.segments[0].offset, 8);
//! assert_eq!(prepared.segments[0].bytes, b"hi");
//! assert_eq!(guest[prepared.segments[0].place..][..2], *b"hi");
//! assert_eq!(names::memory(0), "afresh:memory:0");
//! # Ok::<(), afresh_rewrite::PrepareError>(())
//! ```
//!
//! Memory content and size are not handled here: they are the engine's. Nothing here runs Wasm
//! code or depends on an engine.

mod analysis;
mod bake;
mod component;
mod convert;
mod direct;
mod effects;
mod emit;
pub mod extism;
mod guard;
mod link;
mod model;
mod name_list;
pub mod names;
mod nesting;
mod place;
mod prepare;
mod refusal;
mod reveal;
mod seal;
mod stack;

/// Identifies the build of this crate: preparations of different builds may differ.
pub const BUILD: &str = env!("AFRESH_REWRITE_BUILD");

pub use analysis::{Analysis, AnalyzeError, Global, Memory, Roots, Segment, Table, analyze};
pub use bake::{BakeError, WarmState, WarmValue, bake};
pub use component::{
    MARK_BYTES, NestedModule, OpenComponent, PrepareComponentError, PreparedComponent,
    bake_component, open_component, prepare_component,
};
pub use convert::ConvertError;
pub use direct::direct_calls;
pub use link::{LinkError, link, link_over};
pub use name_list::name_list;
pub use nesting::InstancePath;
pub use prepare::{
    DataSegment, PrepareError, PrepareOptions, PreparedModule, RestorableState, VisibleState,
    prepare,
};
pub use refusal::{Refusal, Refusals};
pub use stack::linear_stack;
