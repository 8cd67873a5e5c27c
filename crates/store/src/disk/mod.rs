//! Files on disk: whole and durable when they get their names, and hashed while they are written.

pub(crate) mod hashing;
pub(crate) mod helper_threads;
pub(crate) mod os;
pub(crate) mod temporary;
#[cfg(feature = "remote")]
pub(crate) mod two_clocks;
