//! Interest sets of `epoll`, and the limits on sets within sets.
//!
//! Promises: a question about readiness looks at each interest once, however sets contain each
//! other. May break it: a set that becomes part of another and is not in the inner sets of that.

use crate::sentry::Kernel;
use crate::sentry::kernel::fd_table::{DESCRIPTORS, FileObject};
use crate::sentry::kernel::readiness::{IN, OUT, PortCaller, RDHUP};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

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
    pub(crate) told: Option<u64>,
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

/// Sets that one question about readiness has looked at, and their answers. So it looks at each set
/// once, in however many others that is.
#[derive(Debug, Default)]
pub(in crate::sentry) struct ReadySets(BTreeMap<u64, bool>);

/// Maximum sets of a guest.
pub(in crate::sentry) const MAX_SETS: usize = 1024;

/// Interests of all sets beyond which no set grows by more than [`INTERESTS_UNCHECKED`].
pub(in crate::sentry) const MAX_INTERESTS: usize = 1 << 17;

/// A set is compared with [`MAX_INTERESTS`] each time that it has so many more interests.
pub(in crate::sentry) const INTERESTS_UNCHECKED: usize = 64;

/// Sets that may contain each other, one in the next (`EP_MAX_NESTS`).
pub(in crate::sentry) const MAX_NESTING: usize = 4;

impl Kernel {
    /// The sets of all processes.
    pub(in crate::sentry) fn sets(&self) -> impl Iterator<Item = &EpollSet> + '_ {
        self.set_ids().filter_map(|id| self.set(id))
    }

    /// Their descriptions.
    fn set_ids(&self) -> impl Iterator<Item = u64> + '_ {
        let sets = |open: &FileObject| matches!(open, FileObject::Epoll(_));
        self.table.descriptions().filter(move |(_, d)| sets(&d.open)).map(|(id, _)| id)
    }

    /// The set of a description, if it is one.
    fn set(&self, id: u64) -> Option<&EpollSet> {
        match &self.table.description(id)?.open {
            FileObject::Epoll(set) => Some(set),
            _ => None,
        }
    }

    pub(in crate::sentry) fn all_interests(&self) -> usize {
        self.sets().map(EpollSet::len).sum()
    }

    /// Whether there are no more sets and interests than a guest may have.
    pub(in crate::sentry) fn are_interests_bounded(&self) -> bool {
        let most = MAX_INTERESTS + MAX_SETS * INTERESTS_UNCHECKED;
        self.sets().count() <= MAX_SETS && self.all_interests() <= most
    }

    /// Finds the sets in each set, of a state from a snapshot.
    pub(in crate::sentry) fn find_inner_sets(&mut self) {
        let sets: BTreeSet<u64> = self.set_ids().collect();
        for id in &sets {
            let found = self.table.description_mut(*id).map(|found| &mut found.open);
            let Some(FileObject::Epoll(set)) = found else { continue };
            set.inner.clear();
            for interest in set.interests.values() {
                if sets.contains(&interest.description) {
                    *set.inner.entry(interest.description).or_default() += 1;
                }
            }
        }
    }

    /// Refuses sets in sets as Linux does.
    ///
    /// # Errors
    /// `ELOOP` for a set that contains itself, or too many levels.
    pub(in crate::sentry) fn check_nesting(&self) -> Result<(), Errno> {
        let mut heights = BTreeMap::new();
        self.set_ids().try_for_each(|id| self.height(id, 0, &mut heights).map(drop))
    }

    /// Levels of sets in a set that is in `depth` levels of others; those that were found before
    /// are in `heights`.
    fn height(
        &self,
        id: u64,
        depth: usize,
        heights: &mut BTreeMap<u64, usize>,
    ) -> Result<usize, Errno> {
        let height = match (heights.get(&id), self.set(id)) {
            (Some(height), _) => *height,
            (None, Some(set)) if depth <= MAX_NESTING => {
                let mut height = 0;
                for inner in set.inner.keys() {
                    // It may be closed.
                    if self.set(*inner).is_some() {
                        height = height.max(1 + self.height(*inner, depth + 1, heights)?);
                    }
                }
                heights.insert(id, height);
                height
            }
            _ => MAX_NESTING + 1,
        };
        if depth + height > MAX_NESTING { Err(Errno::LOOP) } else { Ok(height) }
    }

    /// Whether a set has an event; `sets` has the answers so far.
    pub(in crate::sentry) fn is_set_ready(
        &self,
        asker: PortCaller<'_>,
        id: u64,
        set: &EpollSet,
        sets: &mut ReadySets,
    ) -> bool {
        if let Some(ready) = sets.0.get(&id) {
            return *ready;
        }
        // No set contains itself.
        sets.0.insert(id, false);
        let ready = set.interests().any(|interest| self.concern(asker, interest, sets).is_some());
        sets.0.insert(id, ready);
        ready
    }
}

/// Events without other names for them.
pub(in crate::sentry) fn plain(events: u16) -> u16 {
    let also = |name: u16, event: u16| if events & name != 0 { event } else { 0 };
    events & (IN | OUT | RDHUP) | also(READ_TOO, IN) | also(WRITE_TOO, OUT)
}
