//! Interest sets of `epoll`: plain data.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::sentry::kernel::poll_events::{IN, OUT, RDHUP};
use crate::sentry::kernel::resource_limits::DESCRIPTORS;

pub(in crate::sentry) const EDGE: u32 = 1 << 31;

pub(in crate::sentry) const ONCE: u32 = 1 << 30;

/// `POLLRDNORM` and `POLLWRNORM`, which mean no more than the plain ones.
pub(in crate::sentry) const READ_TOO: u16 = 0x40;

pub(in crate::sentry) const WRITE_TOO: u16 = 0x100;

/// An interest of a set in an open description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EpollInterest {
    pub(crate) description: u64,
    /// The events and flags that were given.
    pub(in crate::sentry) wanted: u32,
    pub(in crate::sentry) data: u64,
    /// The state of the description at its last event.
    pub(crate) reported: Option<u64>,
    /// Disabled after one event (`EPOLLONESHOT`).
    pub(in crate::sentry) off: bool,
}

impl EpollInterest {
    pub(crate) fn events(&self) -> u16 {
        plain(self.wanted as u16)
    }

    pub(crate) fn is_edge(&self) -> bool {
        self.wanted & EDGE != 0
    }

    pub(crate) fn is_off(&self) -> bool {
        self.off
    }
}

/// A set of interests (`epoll`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EpollSet {
    /// By descriptor.
    interests: BTreeMap<u32, EpollInterest>,
    /// Descriptions that are sets as well, and their interests.
    #[serde(skip)]
    inner: BTreeMap<u64, u32>,
}

impl EpollSet {
    pub(crate) fn interests(&self) -> impl Iterator<Item = &EpollInterest> + '_ {
        self.interests.values()
    }

    /// The interests, by descriptor.
    pub(in crate::sentry) fn iter(&self) -> impl Iterator<Item = (u32, &EpollInterest)> + '_ {
        self.interests.iter().map(|(&number, interest)| (number, interest))
    }

    pub(in crate::sentry) fn len(&self) -> usize {
        self.interests.len()
    }

    pub(in crate::sentry) fn get(&self, number: u32) -> Option<&EpollInterest> {
        self.interests.get(&number)
    }

    pub(in crate::sentry) fn get_mut(&mut self, number: u32) -> Option<&mut EpollInterest> {
        self.interests.get_mut(&number)
    }

    /// Finds the descriptions among `sets` that it has interests in.
    pub(in crate::sentry) fn find_inner_sets(&mut self, sets: &BTreeSet<u64>) {
        self.inner.clear();
        for interest in self.interests.values() {
            if sets.contains(&interest.description) {
                *self.inner.entry(interest.description).or_default() += 1;
            }
        }
    }

    /// The descriptions of sets that it has interests in.
    pub(in crate::sentry) fn inner_sets(&self) -> impl Iterator<Item = u64> + '_ {
        self.inner.keys().copied()
    }

    /// Whether it has an interest in the set of this description.
    pub(in crate::sentry) fn contains_set(&self, description: u64) -> bool {
        self.inner.contains_key(&description)
    }

    /// Sets the interest of a descriptor. The descriptor may be that of a set.
    pub(in crate::sentry) fn insert(&mut self, number: u32, interest: EpollInterest, is_set: bool) {
        self.remove(number);
        if is_set {
            *self.inner.entry(interest.description).or_default() += 1;
        }
        self.interests.insert(number, interest);
    }

    /// Removes the interest of a descriptor.
    pub(in crate::sentry) fn remove(&mut self, number: u32) {
        let Some(interest) = self.interests.remove(&number) else { return };
        if let Entry::Occupied(mut count) = self.inner.entry(interest.description) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Whether a guest could have made it.
    pub(crate) fn is_sound(&self) -> bool {
        self.interests.keys().all(|number| *number < DESCRIPTORS)
    }
}

#[cfg(test)]
impl FromIterator<(u32, EpollInterest)> for EpollSet {
    fn from_iter<T: IntoIterator<Item = (u32, EpollInterest)>>(interests: T) -> Self {
        Self { interests: interests.into_iter().collect(), inner: BTreeMap::new() }
    }
}

/// Events without other names for them.
pub(in crate::sentry) fn plain(events: u16) -> u16 {
    let also = |name: u16, event: u16| if events & name != 0 { event } else { 0 };
    events & (IN | OUT | RDHUP) | also(READ_TOO, IN) | also(WRITE_TOO, OUT)
}
