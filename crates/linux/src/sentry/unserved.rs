//! System calls that are not served, counted for the report of a guest.

use std::collections::BTreeMap;

use rustix::io::Errno;

use super::{Sentry, SyscallResult};

/// Maximum call numbers that are counted as not served.
pub(in crate::sentry) const MAX_UNSERVED: usize = 1024;

/// Counts `more` calls of a number that is not served. A guest can try any number of 32 bits, in
/// each of its calls others: further ones are not counted.
pub(crate) fn count_unserved(counts: &mut BTreeMap<i64, u64>, number: i64, more: u64) {
    if counts.len() < MAX_UNSERVED || counts.contains_key(&number) {
        let count = counts.entry(number).or_default();
        *count = count.saturating_add(more);
    }
}

impl Sentry {
    /// Refuses a call that is not served.
    pub(in crate::sentry) fn refuse_unknown(&mut self, number: i64) -> SyscallResult {
        count_unserved(&mut self.unserved, number, 1);
        Err(Errno::NOSYS.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_beyond_the_maximum_are_not_counted_and_earlier_ones_are() {
        let mut counts = BTreeMap::new();
        for number in 0..10 * MAX_UNSERVED as i64 {
            count_unserved(&mut counts, number, 1);
        }
        count_unserved(&mut counts, 7, u64::MAX);
        assert_eq!((counts.len(), counts[&7], counts[&8]), (MAX_UNSERVED, u64::MAX, 1));
    }
}
