//! The export names that rewriting adds to a module.
//!
//! Every name starts with [`PREFIX`]; a module that already exports such a name is refused, so an
//! added export never hides a guest export.

/// The guest's own export that takes fresh entropy, `(param i64 i64)`: the host calls it after
/// every restore.
pub const RESEED: &str = "afresh_reseed";

/// As [`RESEED`], of a component: `func(lo: u64, hi: u64)` in its world.
pub const RESEED_COMPONENT: &str = "afresh-reseed";

/// The interface that gives a component a generation and entropy for each clone.
pub const CLONES: &str = "afresh:host/clones@0.1.0";

/// The guest's own export that makes room for an input, `(param i32) (result i32)`: the host calls
/// it before a handler that takes bytes.
pub const BUFFER: &str = "afresh_buffer";

/// The guest's own exports that may be its allocator, `(param i32) (result i32)`, in order of
/// preference: the host calls it for bytes that it passes to a handler which takes an address, or
/// that a host function returns.
pub const ALLOCATORS: [&str; 4] = ["afresh_alloc", "host_alloc", "alloc", "malloc"];

/// The guest's own exports that the host calls by itself; roots wherever they exist.
pub const HOOKS: [&str; 6] =
    [RESEED, BUFFER, ALLOCATORS[0], ALLOCATORS[1], ALLOCATORS[2], ALLOCATORS[3]];

/// The prefix of library exports.
const LIBRARY: &str = "library:";

/// The prefix of every added export.
pub const PREFIX: &str = "afresh:";

/// The name that a module of a component imports its shim's table from ([`crate::direct_calls`]).
pub(crate) const SHIM: &str = "afresh:shim";

/// `(func (result i32))`: stores the present state as the one to come back to. 0 is success;
/// any other value means that a shadow table could not grow, and nothing may be restored.
pub const SAVE: &str = "afresh:save";

/// `(func (result i32))`: brings globals, tables and dropped segments back to the saved state.
/// 0 is success; any other value means that a table was grown, which cannot be undone in place:
/// the instance must be replaced. As any guest code it consumes fuel and heeds the epoch: set both
/// before the call, and treat a trap as a failed restore.
pub const RESTORE: &str = "afresh:restore";

/// `(func)`: the module's start function, which a prepared module that can be restored or baked
/// runs only when the host calls it: once, in the instance that is warmed, before [`SAVE`].
pub const START: &str = "afresh:start";

/// The name of a library export in the whole that modules are linked into [over
/// it](crate::link_over).
#[must_use]
pub fn of_library(library: &str, export: &str) -> String {
    format!("{LIBRARY}{library}.{export}")
}

/// Whether the host calls an export by itself, independent of the declared calls.
#[must_use]
pub fn is_hook(export: &str) -> bool {
    HOOKS.contains(&export) || export.starts_with(LIBRARY)
}

/// The export of memory `index`.
#[must_use]
pub fn memory(index: u32) -> String {
    format!("{PREFIX}memory:{index}")
}

/// The export of mutable global `index`.
#[must_use]
pub fn global(index: u32) -> String {
    format!("{PREFIX}global:{index}")
}

/// The export of table `index`.
#[must_use]
pub fn table(index: u32) -> String {
    format!("{PREFIX}table:{index}")
}

/// The export of function `index`, so that a host can recognise a reference to it.
#[must_use]
pub fn func(index: u32) -> String {
    format!("{PREFIX}func:{index}")
}

/// The export of the `i32` global that is nonzero once data segment `index` is dropped.
#[must_use]
pub fn data_dropped(index: u32) -> String {
    format!("{PREFIX}data-dropped:{index}")
}

/// The export of the `i32` global that is nonzero once element segment `index` is dropped.
#[must_use]
pub fn elem_dropped(index: u32) -> String {
    format!("{PREFIX}elem-dropped:{index}")
}

/// The export through which an opened component shows the state of its core instances; a component
/// that has such an export already is refused.
pub const STATE: &str = "afresh-state";
