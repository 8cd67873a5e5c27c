//! Entries that name a life that is over although its host has noted them for a later life: the
//! host is keeping or taking them at this moment, or that was torn.
//!
//! Promises: an entry is torn once neither it nor its note has changed for [`TornTakes::timeout`]
//! by this host's own clock, which is not set. A host that keeps sandboxes writes a new note at
//! each attempt, several in a lease. The release names the revision that was seen both times, so a
//! host that changes the entry in between keeps the sandbox.

use std::collections::HashMap;
use std::time::Duration;

use super::policy::{Moment, Terms};

/// The least time that an entry is unchanged: longer than requests of NATS are under way.
const MIN_TORN_TIMEOUT: Duration = Duration::from_secs(30);

/// The revisions of an entry and its note.
pub(super) type SeenRevisions = (u64, u64);

/// Entries that may be torn, by their keys.
#[derive(Debug, Default)]
pub(super) struct TornTakes {
    seen: HashMap<String, (SeenRevisions, Moment)>,
}

impl TornTakes {
    /// How long an entry and its note are unchanged before the entry is torn: two leases at least.
    pub(super) fn timeout(terms: Terms) -> Duration {
        (terms.time * 2).max(MIN_TORN_TIMEOUT)
    }

    /// The entry and its note were read, in answers that had arrived at `now`. Returns whether the
    /// entry is torn.
    pub(super) fn saw(
        &mut self,
        key: &str,
        seen: SeenRevisions,
        now: Moment,
        terms: Terms,
    ) -> bool {
        match self.seen.get(key) {
            Some((known, first)) if *known == seen => now >= *first + Self::timeout(terms),
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
    fn an_entry_is_torn_once_it_and_its_note_are_unchanged_for_two_leases() {
        let at = Duration::from_secs;
        let terms = Terms { time: at(100) };
        let mut torn = TornTakes::default();
        assert!(!torn.saw("a", (1, 1), at(10), terms));
        assert!(!torn.saw("a", (1, 1), at(209), terms));
        // The host tried again, and changed the entry after that.
        assert!(!torn.saw("a", (1, 2), at(210), terms));
        assert!(!torn.saw("a", (3, 2), at(400), terms));
        assert!(!torn.saw("a", (3, 2), at(599), terms));
        assert!(torn.saw("a", (3, 2), at(600), terms));
        torn.forget("a");
        assert!(!torn.saw("a", (3, 2), at(900), terms));
        torn.reset();
        assert!(!torn.saw("a", (3, 2), at(2000), terms));
        assert_eq!(TornTakes::timeout(Terms { time: at(1) }), MIN_TORN_TIMEOUT);
    }
}
