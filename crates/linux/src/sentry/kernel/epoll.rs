//! Interest sets of `epoll`, and the limits on sets within sets.

use crate::sentry::Kernel;
use crate::sentry::kernel::fd_table::{DESCRIPTORS, FileObject};
use crate::sentry::kernel::readiness::{IN, OUT, RDHUP};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

/// A set of interests (`epoll`), by descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EpollSet(pub(in crate::sentry) BTreeMap<u32, EpollInterest>);

impl EpollSet {
    pub(crate) fn interests(&self) -> impl Iterator<Item = &EpollInterest> + '_ {
        self.0.values()
    }

    /// Whether a guest could have made it.
    pub(crate) fn is_sound(&self) -> bool {
        self.0.keys().all(|number| *number < DESCRIPTORS)
    }
}

/// Maximum sets of a guest.
pub(in crate::sentry) const MAX_SETS: usize = 1024;

/// Interests of all sets beyond which no set grows by more than [`INTERESTS_UNCHECKED`].
pub(in crate::sentry) const MAX_INTERESTS: usize = 1 << 17;

/// A set is compared with [`MAX_INTERESTS`] each time that it has so many more interests.
pub(in crate::sentry) const INTERESTS_UNCHECKED: usize = 64;

/// Sets that may contain each other, one in the next (`EP_MAX_NESTS`).
pub(in crate::sentry) const MAX_NESTING: usize = 4;

/// Maximum interests that an answer for one set takes: those of a set that is reached in several
/// ways count each time.
pub(in crate::sentry) const MAX_STEPS: usize = 1 << 14;

impl Kernel {
    /// The sets of all processes.
    pub(in crate::sentry) fn sets(&self) -> impl Iterator<Item = &EpollSet> + '_ {
        self.table.descriptions().filter_map(|(_, description)| match &description.open {
            FileObject::Epoll(set) => Some(set),
            _ => None,
        })
    }

    pub(in crate::sentry) fn all_interests(&self) -> usize {
        self.sets().map(|set| set.0.len()).sum()
    }

    /// Whether there are no more sets and interests than a guest may have.
    pub(in crate::sentry) fn are_interests_bounded(&self) -> bool {
        let most = MAX_INTERESTS + MAX_SETS * INTERESTS_UNCHECKED;
        self.sets().count() <= MAX_SETS && self.all_interests() <= most
    }

    /// Whether a set contains another one.
    pub(in crate::sentry) fn contains_sets(&self, set: &EpollSet) -> bool {
        set.interests().any(|interest| {
            let found = self.table.description(interest.description);
            matches!(found.map(|found| &found.open), Some(FileObject::Epoll(_)))
        })
    }

    /// Refuses sets in sets that cost too much to answer for, as Linux does. A set without others
    /// may have any number of interests.
    ///
    /// # Errors
    /// `ELOOP` for a set that contains itself, or too many levels; `EINVAL` for too many paths.
    pub(in crate::sentry) fn check_nesting(&self) -> Result<(), Errno> {
        let mut nested = self.sets().filter(|set| self.contains_sets(set));
        nested.try_for_each(|set| self.count_steps(set, 0, &mut 0))
    }

    pub(in crate::sentry) fn count_steps(
        &self,
        set: &EpollSet,
        depth: usize,
        steps: &mut usize,
    ) -> Result<(), Errno> {
        if depth > MAX_NESTING {
            return Err(Errno::LOOP);
        }
        *steps += 1 + set.0.len();
        if *steps > MAX_STEPS {
            return Err(Errno::INVAL);
        }
        set.0.values().try_for_each(|interest| {
            match self.table.description(interest.description).map(|found| &found.open) {
                Some(FileObject::Epoll(inner)) => self.count_steps(inner, depth + 1, steps),
                _ => Ok(()),
            }
        })
    }
}

/// Events without other names for them.
pub(in crate::sentry) fn plain(events: u16) -> u16 {
    let also = |name: u16, event: u16| if events & name != 0 { event } else { 0 };
    events & (IN | OUT | RDHUP) | also(READ_TOO, IN) | also(WRITE_TOO, OUT)
}
