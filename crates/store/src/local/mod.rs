//! The store in a directory: names, locks, the blobs of writers, and garbage collection.

pub(crate) mod collect;
pub(crate) mod list;
pub(crate) mod live_set;
pub(crate) mod load;
pub(crate) mod naming;
pub(crate) mod remote_turns;
pub(crate) mod replaced_name;
#[cfg(feature = "seal")]
pub(crate) mod signing;
pub(crate) mod staging;
pub(crate) mod store;
