//! Records of sandboxes and snapshots, and the stores that keep them.

pub(crate) mod creation_key;
pub(crate) mod directory;
pub(crate) mod directory_store;
#[cfg(feature = "fleet")]
pub(crate) mod hosting;
mod json_digest;
pub(crate) mod memory_directory;
pub(crate) mod record;
pub(crate) mod remote_usage;
pub(crate) mod store;
pub(crate) mod tenant_use;
