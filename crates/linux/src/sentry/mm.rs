//! Memory of guest processes: layout, shared mappings and copies in and out.

pub(super) mod layout;
pub(super) mod orders;
pub(super) mod past_end;
pub(super) mod remap;
pub(super) mod share;
pub(super) mod shared;
pub(super) mod shared_segments;
pub(super) mod user_memory;
