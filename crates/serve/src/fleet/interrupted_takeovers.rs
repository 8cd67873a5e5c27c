//! Entries that name a life that is over although its host has noted them for a later life: the
//! host is keeping or taking them at this moment, or was interrupted.
//!
//! Promises: a takeover is interrupted once neither the entry nor its note has changed for
//! [`InterruptedTakeovers::timeout`] by this host's own clock, which is not set. A host that keeps
//! sandboxes writes a new note at each attempt, several in a lease. The release names the revision
//! that was seen both times, so a host that changes the entry in between keeps the sandbox.

use std::collections::HashMap;
use std::time::Duration;

use super::policy::{LeaseParameters, MonotonicTime};

/// The least time that an entry is unchanged: longer than requests of NATS are under way.
const MIN_TAKEOVER_TIMEOUT: Duration = Duration::from_secs(30);

/// The revisions of an entry and its note.
pub(super) type SeenRevisions = (u64, u64);

/// Entries whose takeover may be interrupted, by their keys.
#[derive(Debug, Default)]
pub(super) struct InterruptedTakeovers {
    seen: HashMap<String, (SeenRevisions, MonotonicTime)>,
}

impl InterruptedTakeovers {
    /// How long an entry and its note are unchanged before the takeover counts as interrupted: two
    /// leases at least.
    pub(super) fn timeout(parameters: LeaseParameters) -> Duration {
        (parameters.time * 2).max(MIN_TAKEOVER_TIMEOUT)
    }

    /// The entry and its note were read, in answers that had arrived at `now`. Returns whether the
    /// takeover was interrupted.
    pub(super) fn observe(
        &mut self,
        key: &str,
        seen: SeenRevisions,
        now: MonotonicTime,
        parameters: LeaseParameters,
    ) -> bool {
        match self.seen.get(key) {
            Some((known, first)) if *known == seen => now >= *first + Self::timeout(parameters),
            _ => {
                self.seen.insert(key.to_owned(), (seen, now));
                false
            }
        }
    }

    /// The entry does not name such a life any more.
    pub(super) fn forget(&mut self, key: &str) {
        self.seen.remove(key);
    }

    /// This host was cut off, and others may have been too: entries that did not change then prove
    /// nothing.
    pub(super) fn reset(&mut self) {
        self.seen.clear();
    }

    /// Makes every sighting older.
    #[cfg(test)]
    pub(super) fn age(&mut self, by: Duration) {
        for (_, first) in self.seen.values_mut() {
            *first = first.saturating_sub(by);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_takeover_is_interrupted_once_an_entry_and_its_note_are_unchanged_for_two_leases() {
        let at = Duration::from_secs;
        let parameters = LeaseParameters { time: at(100) };
        let mut interrupted = InterruptedTakeovers::default();
        assert!(!interrupted.observe("a", (1, 1), at(10), parameters));
        assert!(!interrupted.observe("a", (1, 1), at(209), parameters));
        // The host tried again, and changed the entry after that.
        assert!(!interrupted.observe("a", (1, 2), at(210), parameters));
        assert!(!interrupted.observe("a", (3, 2), at(400), parameters));
        assert!(!interrupted.observe("a", (3, 2), at(599), parameters));
        assert!(interrupted.observe("a", (3, 2), at(600), parameters));
        interrupted.forget("a");
        assert!(!interrupted.observe("a", (3, 2), at(900), parameters));
        interrupted.reset();
        assert!(!interrupted.observe("a", (3, 2), at(2000), parameters));
        assert_eq!(
            InterruptedTakeovers::timeout(LeaseParameters { time: at(1) }),
            MIN_TAKEOVER_TIMEOUT
        );
    }
}
