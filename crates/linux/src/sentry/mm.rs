//! Memory of guest processes: layout, shared mappings and copies in and out.

pub(super) mod file_backing;
pub(super) mod file_part;
pub(super) mod layout;
pub(super) mod memory_peak;
pub(super) mod past_end;
pub(super) mod remap;
pub(super) mod shared;
pub(super) mod shared_segments;
mod sparse_touches;
pub(super) mod stub_calls;
pub(super) mod user_memory;
