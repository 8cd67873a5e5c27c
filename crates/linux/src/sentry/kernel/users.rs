//! The user and group of a guest, and the numbers that processes have changed to.
//!
//! Promises: the numbers exist in the guest alone, and none has a right over the host. Frozen ones
//! are checked before use. May break it: a right over the host that depends on them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::sentry::kernel::identity::DEFAULT_OWNER;

/// Maximum supplementary groups of a process.
pub(in crate::sentry) const MAX_GROUPS: usize = 1024;
/// The number of a user or group that is not mapped.
pub(in crate::sentry) const UNMAPPED: u32 = 65534;
/// Places in the numbers of a process: the real one, the effective one, the saved one, and the one
/// for files.
pub(in crate::sentry) const REAL: usize = 0;
pub(in crate::sentry) const EFFECTIVE: usize = 1;
pub(in crate::sentry) const SAVED: usize = 2;
pub(in crate::sentry) const FOR_FILES: usize = 3;

/// The users and groups of a process, as numbers of the first namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessIds {
    pub(in crate::sentry) user: [u32; 4],
    pub(in crate::sentry) group: [u32; 4],
    /// Supplementary groups.
    pub(in crate::sentry) groups: Vec<u32>,
}

/// The user and group of a guest, and processes with other numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Users {
    /// Those of the first process, and of files without a recorded owner.
    pub(in crate::sentry) owner: [u32; 2],
    changed: BTreeMap<u32, ProcessIds>,
}

impl Default for Users {
    fn default() -> Self {
        Self::of_owner(DEFAULT_OWNER)
    }
}

impl ProcessIds {
    /// Those of no process: a user and a group without rights.
    pub(in crate::sentry) fn nobody() -> Self {
        Self { user: [UNMAPPED; 4], group: [UNMAPPED; 4], groups: Vec::new() }
    }

    /// Whether a file of this group belongs to a group that the process has.
    pub(in crate::sentry) fn is_in_group(&self, group: u32) -> bool {
        self.group[FOR_FILES] == group || self.groups.contains(&group)
    }

    /// Whether a process with these numbers may send signals to one with others, without a
    /// capability.
    pub(in crate::sentry) fn may_signal(&self, other: &Self) -> bool {
        let own = [self.user[REAL], self.user[EFFECTIVE]];
        [other.user[REAL], other.user[SAVED]].iter().any(|user| own.contains(user))
    }
}

impl Users {
    pub(crate) fn of_owner(owner: [u32; 2]) -> Self {
        Self { owner, changed: BTreeMap::new() }
    }

    fn first(&self) -> ProcessIds {
        let [user, group] = self.owner;
        ProcessIds { user: [user; 4], group: [group; 4], groups: Vec::new() }
    }

    /// The numbers of a process that exists.
    pub(in crate::sentry::kernel) fn of(&self, process: u32) -> ProcessIds {
        self.changed.get(&process).cloned().unwrap_or_else(|| self.first())
    }

    /// Whether a process has the same numbers as the first process of its guest.
    pub(in crate::sentry) fn is_first(&self, process: u32) -> bool {
        !self.changed.contains_key(&process)
    }

    pub(in crate::sentry) fn set(&mut self, process: u32, ids: ProcessIds) {
        self.changed.remove(&process);
        if ids != self.first() {
            self.changed.insert(process, ids);
        }
    }

    /// Gives a child the numbers of its parent.
    pub(in crate::sentry) fn fork(&mut self, parent: u32, child: u32) {
        self.set(child, self.of(parent));
    }

    /// Drops the numbers of processes that do not exist any more.
    pub(in crate::sentry::kernel) fn keep(&mut self, exists: impl Fn(u32) -> bool) {
        self.changed.retain(|process, _| exists(*process));
    }

    /// Whether a guest could have them: only user 0 changes its numbers.
    pub(in crate::sentry) fn is_sound(&self, exists: impl Fn(u32) -> bool) -> bool {
        let is_number = |number: &u32| *number != u32::MAX;
        self.owner.iter().all(is_number)
            && (self.owner[0] == 0 || self.changed.is_empty())
            && self.changed.iter().all(|(process, ids)| {
                let mut numbers = ids.user.iter().chain(&ids.group).chain(&ids.groups);
                exists(*process) && ids.groups.len() <= MAX_GROUPS && numbers.all(is_number)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_no_guest_can_have_are_refused() {
        let mut sound = Users::of_owner([0, 0]);
        let other = ProcessIds { user: [0, 33, 33, 33], group: [33; 4], groups: vec![4] };
        sound.set(2, other.clone());
        let check = |users: &Users| users.is_sound(|id| id == 2);
        assert!(check(&sound) && !sound.is_first(2) && !sound.is_sound(|_| false));
        let odd: [fn(&mut Users); 6] = [
            |users| users.owner = [1000, 0],
            |users| users.owner = [0, u32::MAX],
            |users| users.fork(2, 3),
            |users| users.changed.values_mut().for_each(|ids| ids.user[SAVED] = u32::MAX),
            |users| users.changed.values_mut().for_each(|ids| ids.group[REAL] = u32::MAX),
            |users| users.changed.values_mut().for_each(|ids| ids.groups = vec![1; MAX_GROUPS + 1]),
        ];
        for (index, change) in odd.iter().enumerate() {
            let mut users = sound.clone();
            change(&mut users);
            assert!(!check(&users), "{index}");
        }
        sound.set(2, Users::of_owner([0, 0]).of(2));
        assert!(sound.is_first(2));
    }

    #[test]
    fn a_process_may_signal_those_of_its_real_or_effective_user() {
        let ids = |user| ProcessIds { user, group: [0; 4], groups: Vec::new() };
        let own = ids([33, 34, 0, 0]);
        for (other, may) in [
            ([33, 0, 0, 0], true),
            ([0, 33, 0, 33], false),
            ([0, 0, 34, 0], true),
            ([0, 0, 0, 0], false),
        ] {
            assert_eq!(own.may_signal(&ids(other)), may, "{other:?}");
        }
    }
}
