//! User namespaces, and the credentials of processes in them.
//!
//! A guest begins with one user and one group. A namespace gives each at most one number: an
//! unprivileged process can map no other, and numbers without a map are 65534 inside. A process
//! that makes a namespace has all capabilities there. They give rights over files, once the owner
//! of all files has numbers in the namespace. They give none over other resources of a guest, which
//! belong to the first namespace.
//!
//! Promises: in the first namespace only processes of a guest of user 0 have capabilities, and only
//! those over its files, users, signals and root directories. Frozen namespaces are checked before
//! use. May break it: a call that asks for a capability without saying in which namespace.

use std::collections::{BTreeMap, BTreeSet};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::prctl_state::CAPABILITIES;
use crate::sentry::kernel::users::Users;

/// The namespace that a guest begins in.
pub(in crate::sentry) const INITIAL: u32 = 0;
/// Namespaces of a guest, and how deep they may be nested.
pub(in crate::sentry) const MAX_NAMESPACES: usize = 1024;
const MAX_LEVEL: usize = 32;
/// Every capability.
pub(in crate::sentry) const ALL_CAPABILITIES: u64 = (1 << (CAPABILITIES + 1)) - 1;
/// The capabilities of user 0 in the first namespace: `CAP_CHOWN`, `CAP_DAC_OVERRIDE`,
/// `CAP_DAC_READ_SEARCH`, `CAP_FOWNER`, `CAP_FSETID`, `CAP_KILL`, `CAP_SETGID`, `CAP_SETUID`,
/// `CAP_NET_BIND_SERVICE` and `CAP_SYS_CHROOT`. They are among those of root in a container.
pub(in crate::sentry) const ROOT_CAPABILITIES: u64 = 0b1111_1111 | 1 << 10 | 1 << SYS_CHROOT;
/// The capability to change the root directory (`CAP_SYS_CHROOT`).
pub(in crate::sentry) const SYS_CHROOT: u32 = 18;
/// The capability to give files to another user (`CAP_CHOWN`).
pub(in crate::sentry) const CHOWN: u32 = 0;
/// The capability to pass permission bits (`CAP_DAC_OVERRIDE`).
pub(in crate::sentry) const DAC_OVERRIDE: u32 = 1;
/// The capabilities to change files of others (`CAP_FOWNER`) and to send signals to others
/// (`CAP_KILL`).
pub(in crate::sentry) const FOWNER: u32 = 3;
pub(in crate::sentry) const KILL: u32 = 5;
/// The capability that most rights over a namespace take (`CAP_SYS_ADMIN`), and those to map users
/// and groups.
pub(in crate::sentry) const SYS_ADMIN: u32 = 21;
pub(in crate::sentry) const SETGID: u32 = 6;
/// The capability to look into processes (`CAP_SYS_PTRACE`).
pub(in crate::sentry) const SYS_PTRACE: u32 = 19;
pub(in crate::sentry) const SETUID: u32 = 7;

/// A user namespace other than the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct UserNamespace {
    pub(in crate::sentry) parent: u32,
    /// The numbers of the only user and group in it, once they are mapped.
    pub(in crate::sentry) user: Option<u32>,
    pub(in crate::sentry) group: Option<u32>,
    /// Whether `setgroups` is denied.
    pub(in crate::sentry) denies_groups: bool,
}

/// The namespace of a process, and its capabilities there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct Credentials {
    pub(in crate::sentry) namespace: u32,
    pub(in crate::sentry) effective: u64,
    pub(in crate::sentry) permitted: u64,
    pub(in crate::sentry) inheritable: u64,
    /// Whether capabilities are kept where the user changes, which it never does
    /// (`PR_SET_KEEPCAPS`).
    pub(in crate::sentry) keeps: bool,
}

impl Credentials {
    /// Those of a process of this user that has entered no namespace.
    fn first(user: u32) -> Self {
        let permitted = if user == 0 { ROOT_CAPABILITIES } else { 0 };
        Self { effective: permitted, permitted, ..Self::default() }
    }

    /// Those of a process that enters a namespace.
    pub(in crate::sentry) fn within(namespace: u32) -> Self {
        let (effective, permitted) = (ALL_CAPABILITIES, ALL_CAPABILITIES);
        Self { namespace, effective, permitted, inheritable: 0, keeps: false }
    }

    /// Whether a process of a guest of this user can have them.
    fn is_sound(&self, user: u32) -> bool {
        let held = self.effective | self.permitted | self.inheritable;
        let allowed = match self.namespace {
            INITIAL => Self::first(user).permitted,
            _ => ALL_CAPABILITIES,
        };
        held & !allowed == 0 && self.effective & !self.permitted == 0
    }
}

/// The user namespaces of a guest, and the credentials of its processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UserNamespaces {
    /// The users in the first namespace. Version 16 of the state stores them behind the rest.
    #[serde(skip)]
    pub(in crate::sentry) users: Users,
    all: BTreeMap<u32, UserNamespace>,
    /// Processes with credentials other than the first process's.
    members: BTreeMap<u32, Credentials>,
    /// The last number that was given.
    last: u32,
}

impl UserNamespaces {
    /// Those of a guest with this user and group.
    pub(crate) fn of_owner(owner: [u32; 2]) -> Self {
        Self { users: Users::of_owner(owner), ..Self::default() }
    }

    /// The credentials of a process that has changed none.
    pub(in crate::sentry) fn first_credentials(&self) -> Credentials {
        Credentials::first(self.users.owner[0])
    }

    pub(in crate::sentry) fn get(&self, id: u32) -> Option<&UserNamespace> {
        self.all.get(&id)
    }

    pub(in crate::sentry) fn get_mut(&mut self, id: u32) -> Option<&mut UserNamespace> {
        self.all.get_mut(&id)
    }

    /// The credentials of a process.
    pub(in crate::sentry) fn of(&self, process: u32) -> Credentials {
        self.members.get(&process).copied().unwrap_or_else(|| self.first_credentials())
    }

    pub(in crate::sentry) fn set(&mut self, process: u32, credentials: Credentials) {
        self.members.remove(&process);
        if credentials != self.first_credentials() {
            self.members.insert(process, credentials);
        }
    }

    /// Gives a child the credentials of its parent.
    pub(in crate::sentry) fn fork(&mut self, parent: u32, child: u32) {
        self.set(child, self.of(parent));
        self.users.fork(parent, child);
    }

    /// Drops the credentials of a process that has ended.
    pub(in crate::sentry) fn leave(&mut self, process: u32) {
        self.members.remove(&process);
    }

    /// A namespace and those around it, without the first.
    fn ancestry(&self, id: u32) -> impl Iterator<Item = u32> + '_ {
        let up = |id: &u32| self.get(*id).map(|namespace| namespace.parent);
        std::iter::successors(Some(id), up).filter(|id| *id != INITIAL)
    }

    /// The number of the only user, or group, in a namespace.
    pub(in crate::sentry) fn number(&self, id: u32, group: bool) -> Option<u32> {
        match self.get(id) {
            Some(namespace) if group => namespace.group,
            Some(namespace) => namespace.user,
            None => Some(self.users.owner[usize::from(group)]),
        }
    }

    /// Whether a process with these credentials has a capability over a namespace: its own ones,
    /// and all over namespaces within its own, whose owner it is.
    pub(in crate::sentry) fn has(&self, own: Credentials, over: u32, capability: u32) -> bool {
        match own.namespace == over {
            true => own.effective & 1 << capability != 0,
            false if own.namespace == INITIAL => true,
            false => self.ancestry(over).any(|id| id == own.namespace),
        }
    }

    /// Refuses a namespace within `parent` that would be nested too deeply, or that is made by a
    /// process without a number there.
    pub(in crate::sentry) fn check_new(&self, parent: u32) -> Result<(), Errno> {
        if [false, true].map(|group| self.number(parent, group)).contains(&None) {
            return Err(Errno::PERM);
        }
        let deep = self.ancestry(parent).count() > MAX_LEVEL;
        if deep { Err(Errno::NOSPC) } else { Ok(()) }
    }

    /// Whether a further one fits.
    pub(in crate::sentry) fn has_room(&self) -> bool {
        self.all.len() < MAX_NAMESPACES && self.last < u32::MAX
    }

    /// Puts a process into a new namespace within `parent`.
    pub(in crate::sentry) fn enter_new(&mut self, process: u32, parent: u32) -> Result<(), Errno> {
        let denies_groups = self.get(parent).is_some_and(|parent| parent.denies_groups);
        let number = self.last.checked_add(1).ok_or(Errno::NOSPC)?;
        let new = UserNamespace { parent, user: None, group: None, denies_groups };
        self.last = number;
        self.all.insert(number, new);
        self.set(process, Credentials::within(number));
        Ok(())
    }

    /// Drops the namespaces that no process uses and that are not in `used`, or around those.
    pub(in crate::sentry) fn drop_unused(&mut self, mut used: BTreeSet<u32>) {
        used.extend(self.members.values().map(|own| own.namespace));
        let used: BTreeSet<u32> = used.into_iter().flat_map(|id| self.ancestry(id)).collect();
        self.all.retain(|id, _| used.contains(id));
    }

    /// Whether a guest could have made them. `used` are the namespaces that descriptors mean.
    pub(in crate::sentry) fn is_sound(
        &self,
        lives: impl Fn(u32) -> bool,
        mut used: impl Iterator<Item = u32>,
    ) -> bool {
        let known = |id: u32| id == INITIAL || self.all.contains_key(&id);
        let namespaces = self.all.iter().all(|(&id, namespace)| {
            // Parents are older, so that no namespace is within itself.
            let numbers = namespace.user.into_iter().chain(namespace.group);
            namespace.parent < id
                && id <= self.last
                && known(namespace.parent)
                && numbers.into_iter().all(|number| number != u32::MAX)
        });
        namespaces
            && self.all.len() <= MAX_NAMESPACES
            && self
                .all
                .keys()
                .all(|id| self.ancestry(*id).take(MAX_LEVEL + 2).count() <= MAX_LEVEL + 1)
            && self.members.iter().all(|(process, own)| {
                lives(*process) && known(own.namespace) && own.is_sound(self.users.owner[0])
            })
            && used.all(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(parent: u32) -> UserNamespace {
        UserNamespace { parent, user: None, group: None, denies_groups: false }
    }

    #[test]
    fn an_owner_has_all_capabilities_over_namespaces_within_its_own_and_none_above() {
        let mut all = UserNamespaces::default();
        all.all.extend([(1, new(INITIAL)), (2, new(1)), (3, new(INITIAL))]);
        let first = Credentials::default();
        let inner = Credentials::within(1);
        let weak = Credentials { effective: 0, ..inner };
        for (own, over, expected) in [
            (first, INITIAL, false),
            (first, 2, true),
            (inner, INITIAL, false),
            (inner, 1, true),
            (weak, 1, false),
            (weak, 2, true),
            (inner, 3, false),
            (Credentials::within(2), 1, false),
        ] {
            assert_eq!(all.has(own, over, SYS_ADMIN), expected, "{own:?} over {over}");
        }
    }

    #[test]
    fn namespaces_that_no_guest_can_have_are_refused() {
        let mut sound = UserNamespaces { last: 2, ..Default::default() };
        sound.all.extend([(1, new(INITIAL)), (2, new(1))]);
        sound.set(2, Credentials::within(2));
        let check = |all: &UserNamespaces| all.is_sound(|id| id == 2, [1].into_iter());
        assert!(check(&sound) && !sound.is_sound(|_| true, [3].into_iter()));
        let odd: [fn(&mut UserNamespaces); 8] = [
            |all| all.last = 1,
            |all| all.all.extend([(1, new(2))]),
            |all| all.all.extend([(1, new(1))]),
            |all| all.all.retain(|id, _| *id != 1),
            |all| all.all.extend([(1, UserNamespace { user: Some(u32::MAX), ..new(0) })]),
            |all| all.members.extend([(3, Credentials::within(1))]),
            |all| all.members.extend([(2, Credentials::within(INITIAL))]),
            |all| all.members.extend([(2, Credentials { permitted: 0, ..Credentials::within(1) })]),
        ];
        for (index, change) in odd.iter().enumerate() {
            let mut all = sound.clone();
            change(&mut all);
            assert!(!check(&all), "{index}");
        }
        let mut deep = UserNamespaces { last: 40, ..Default::default() };
        deep.all.extend((1..=33).map(|id| (id, new(id - 1))));
        assert!(deep.is_sound(|_| true, [].into_iter()));
        deep.all.insert(34, new(33));
        assert!(!deep.is_sound(|_| true, [].into_iter()));
    }
}
