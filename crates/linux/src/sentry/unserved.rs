//! System calls that are not served, counted for the report of a guest.

use rustix::io::Errno;

use super::{Sentry, SyscallResult};

/// Maximum call numbers that are counted as not served.
pub(in crate::sentry) const MAX_UNSERVED: usize = 1024;

impl Sentry {
    /// Refuses a call that is not served.
    pub(in crate::sentry) fn refuse_unknown(&mut self, number: i64) -> SyscallResult {
        // A guest can try any number of 32 bits.
        if self.unserved.len() < MAX_UNSERVED || self.unserved.contains_key(&number) {
            *self.unserved.entry(number).or_default() += 1;
        }
        Err(Errno::NOSYS.into())
    }
}
