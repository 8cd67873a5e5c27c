//! Limits of this process that the owners of guests share.
//!
//! Promises: no more places are taken than there are. An owner that has places gets another only
//! while it leaves at least a third as many free as it has then. So one owner has at most three
//! quarters of the places, and one that has none gets a free one at once. While `n` owners take all
//! that they get, each has `3 / (3 n + 1)` of the places once their connections have taken turns.
//! May break it: seven owners that keep thousands of places, which they took one after the other.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::owner::ConnectionOwner;

/// Places of an owner for each one that it leaves free.
const RESERVE_FACTOR: usize = 3;

/// A limit of this process.
#[derive(Debug)]
pub struct SharedLimit {
    places: usize,
    counts: Mutex<BTreeMap<ConnectionOwner, usize>>,
}

/// A place within a limit. It is free again when it is dropped.
#[derive(Debug)]
pub struct SharedPlace {
    limit: &'static SharedLimit,
    owner: ConnectionOwner,
}

/// A place that an owner did not get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitReached {
    owner: ConnectionOwner,
    taken: usize,
    places: usize,
}

impl fmt::Display for LimitReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, taken, places } = self;
        write!(
            f,
            "{owner} has {taken} of the {places} of this process, and the rest is for others; \
             close some, or try again"
        )
    }
}

impl SharedLimit {
    /// A limit of so many places.
    #[must_use]
    pub const fn new(places: usize) -> Self {
        Self { places, counts: Mutex::new(BTreeMap::new()) }
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<ConnectionOwner, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for an owner.
    ///
    /// # Errors
    /// When the owner has its share, or all places are taken.
    pub fn take(&'static self, owner: &ConnectionOwner) -> Result<SharedPlace, LimitReached> {
        let mut counts = self.counts();
        let taken = counts.get(owner).copied().unwrap_or(0);
        let free = self.places.saturating_sub(counts.values().sum());
        if free == 0 || taken > 0 && taken + 1 > (free - 1) * RESERVE_FACTOR {
            return Err(LimitReached { owner: owner.clone(), taken, places: self.places });
        }
        counts.insert(owner.clone(), taken + 1);
        Ok(SharedPlace { limit: self, owner: owner.clone() })
    }

    /// The owner with the most places, if `owner` would still have fewer with one of them.
    pub(crate) fn owner_with_more(&self, owner: &ConnectionOwner) -> Option<ConnectionOwner> {
        let counts = self.counts();
        let taken = counts.get(owner).copied().unwrap_or(0);
        let (richest, most) = counts.iter().max_by_key(|(_, count)| **count)?;
        (taken + 1 < *most).then(|| richest.clone())
    }
}

/// Takes a place from the count of an owner.
fn release(counts: &mut BTreeMap<ConnectionOwner, usize>, owner: &ConnectionOwner) {
    if let Some(count) = counts.get_mut(owner) {
        *count -= 1;
        if *count == 0 {
            counts.remove(owner);
        }
    }
}

impl SharedPlace {
    /// The owner that has it.
    #[must_use]
    pub fn owner(&self) -> &ConnectionOwner {
        &self.owner
    }

    /// The same place, for another owner.
    pub(crate) fn moved_to(mut self, owner: &ConnectionOwner) -> Self {
        let mut counts = self.limit.counts();
        release(&mut counts, &self.owner);
        *counts.entry(owner.clone()).or_default() += 1;
        drop(counts);
        self.owner = owner.clone();
        self
    }
}

impl Drop for SharedPlace {
    fn drop(&mut self) {
        release(&mut self.limit.counts(), &self.owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(places: usize) -> &'static SharedLimit {
        Box::leak(Box::new(SharedLimit::new(places)))
    }

    fn fill(limit: &'static SharedLimit, owner: &ConnectionOwner) -> Vec<SharedPlace> {
        std::iter::from_fn(|| limit.take(owner).ok()).collect()
    }

    #[test]
    fn an_owner_leaves_places_to_others() {
        let limit = limit(64);
        let owners: Vec<_> = (0..5).map(|n| ConnectionOwner::new(n.to_string())).collect();
        let held: Vec<_> = owners.iter().map(|owner| fill(limit, owner)).collect();
        let lens: Vec<_> = held.iter().map(Vec::len).collect();
        assert_eq!(lens, [48, 12, 3, 1, 0]);
        let refusal = limit.take(&owners[0]).unwrap_err().to_string();
        assert!(refusal.contains("the owner `0` has 48 of the 64"), "{refusal}");
        drop(held);
        assert!(limit.counts().is_empty());
    }

    #[test]
    fn owners_whose_connections_take_turns_come_to_equal_shares() {
        let limit = limit(64);
        let (one, two) = (ConnectionOwner::new("one"), ConnectionOwner::default());
        let (mut first, mut second) = (fill(limit, &one), fill(limit, &two));
        for _ in 0..100 {
            first.pop();
            second.extend(fill(limit, &two));
            first.extend(fill(limit, &one));
        }
        assert!(first.len().abs_diff(second.len()) <= 2, "{} {}", first.len(), second.len());
    }

    #[test]
    fn a_limit_of_one_place_has_one_owner_at_a_time() {
        let limit = limit(1);
        let place = limit.take(&ConnectionOwner::default()).unwrap();
        assert_eq!(place.owner(), &ConnectionOwner::default());
        assert!(limit.take(&ConnectionOwner::new("other")).is_err());
        drop(place);
        assert!(limit.take(&ConnectionOwner::new("other")).is_ok());
    }
}
