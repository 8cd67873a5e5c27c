//! When another host's lease may be broken.
//!
//! Promises: only an entry that was seen unchanged for the whole time of a lease is given up, by
//! this host's own clock, and sightings from before this host itself lost touch do not count.
//! Breaking is a compare-and-set on the revision that was seen, so an owner that renews in between
//! keeps it.

use std::collections::HashMap;

use super::{LeaseParameters, MonotonicTime};

/// Observations of other hosts' leases.
#[derive(Clone, Debug)]
pub struct FailureDetector {
    parameters: LeaseParameters,
    seen: HashMap<String, (u64, MonotonicTime)>,
}

/// The verdict on a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may hold for at least so long, if it is not renewed.
    Holds(MonotonicTime),
    /// It may be broken.
    Over,
}

impl FailureDetector {
    /// Nothing is known.
    #[must_use]
    pub fn new(parameters: LeaseParameters) -> Self {
        Self { parameters, seen: HashMap::new() }
    }

    /// The entry of `host` was seen with this number, in an answer that had arrived at `now`.
    pub fn observe(&mut self, host: &str, revision: u64, now: MonotonicTime) -> Verdict {
        let first = match self.seen.get(host) {
            Some((known, first)) if *known == revision => *first,
            _ => {
                self.seen.insert(host.to_owned(), (revision, now));
                now
            }
        };
        let over = first + self.parameters.time;
        if now >= over { Verdict::Over } else { Verdict::Holds(over - now) }
    }

    /// Stops watching a host that has left.
    pub fn forget(&mut self, host: &str) {
        self.seen.remove(host);
    }

    /// This host was cut off: entries that did not change then prove nothing.
    pub fn reset(&mut self) {
        self.seen.clear();
    }

    /// Those that are watched.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        self.seen.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_what_stays_the_same_for_the_whole_time_is_given_up() {
        let at = Duration::from_millis;
        let mut suspicion = FailureDetector::new(LeaseParameters { time: at(1000) });
        assert_eq!(suspicion.observe("a", 5, at(10)), Verdict::Holds(at(1000)));
        assert_eq!(suspicion.observe("a", 5, at(1009)), Verdict::Holds(at(1)));
        assert_eq!(suspicion.observe("a", 6, at(1010)), Verdict::Holds(at(1000)));
        assert_eq!(suspicion.observe("a", 6, at(2010)), Verdict::Over);
        suspicion.reset();
        assert_eq!(suspicion.observe("a", 6, at(2011)), Verdict::Holds(at(1000)));
        suspicion.forget("a");
        assert_eq!(suspicion.hosts().count(), 0);
    }
}
