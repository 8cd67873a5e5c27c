//! Names and numbers that are the same in every guest.

/// The name of the kernel.
pub(in crate::sentry) const RELEASE: &str = "6.1.0";

pub(in crate::sentry) const VERSION: &str = "#1";

/// The PID of the first process and thread of a guest.
pub(crate) const PID: u64 = 2;

/// The guest's first process.
pub(crate) const FIRST: u32 = PID as u32;

/// The user and group of a guest, unless it was started as another user. States before version 16
/// have no other.
pub(crate) const DEFAULT_OWNER: [u32; 2] = [1000; 2];
