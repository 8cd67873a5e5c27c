//! Names and numbers that are the same in every guest.

/// The release of the kernel. Programs choose calls by it: those that Linux 6.12 has and guests
/// lack return `ENOSYS`, as in a kernel that was built without them.
pub(in crate::sentry) const RELEASE: &str = "6.12.0";

pub(in crate::sentry) const VERSION: &str = "#1";

/// The PID of the first process and thread of a guest.
pub(crate) const PID: u64 = 2;

/// The guest's first process.
pub(crate) const FIRST: u32 = PID as u32;

/// The user and group of a guest, unless it was started as another user. States before version 16
/// have no other.
pub(crate) const DEFAULT_OWNER: [u32; 2] = [1000; 2];
