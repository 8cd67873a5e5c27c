//! The credentials of the current process: its user namespace, its capabilities there, and the
//! numbers that users and groups have for it.

use rustix::io::Errno;

use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::peer_credentials::PeerCredentials;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::user_namespaces::{
    ALL_CAPABILITIES, Credentials, INITIAL, KILL, ROOT_CAPABILITIES, SYS_PTRACE,
};
use crate::sentry::kernel::users::{EFFECTIVE, FOR_FILES, ProcessIds, REAL, SAVED, UNMAPPED};

impl Kernel {
    /// The credentials of the current process.
    pub(in crate::sentry) fn credentials(&self) -> Credentials {
        self.namespaces.of(self.processes.current_id())
    }

    /// The users and groups of the current process, in the first namespace.
    pub(in crate::sentry) fn ids(&self) -> ProcessIds {
        self.namespaces.users.of(self.processes.current_id())
    }

    /// The users and groups of a process, in the first namespace. Those of one that does not exist
    /// have no rights.
    pub(in crate::sentry) fn ids_of(&self, process: u32) -> ProcessIds {
        match self.processes.exists(process) {
            true => self.namespaces.users.of(process),
            false => ProcessIds::nobody(),
        }
    }

    /// Drops the users and groups of processes that were reaped.
    pub(in crate::sentry::kernel) fn drop_ids(&mut self) {
        let processes = &self.processes;
        self.namespaces.users.keep(|id| processes.exists(id));
        self.system_times.keep(|id| processes.exists(id));
    }

    /// The current process with its user and group, the real or the effective ones.
    pub(in crate::sentry) fn own_credentials(&self, place: usize) -> PeerCredentials {
        let (process, ids) = (self.processes.current_id(), self.ids());
        let user = [ids.user[place], ids.group[place]];
        PeerCredentials { process, user: (user != self.namespaces.users.owner).then_some(user) }
    }

    /// A number of the first namespace, as the current process sees it. Other namespaces map only
    /// the user and group that own the guest.
    fn visible_number(&self, number: u32, group: bool) -> u32 {
        match self.credentials().namespace {
            INITIAL => number,
            id if number == self.namespaces.users.owner[usize::from(group)] => {
                self.namespaces.number(id, group).unwrap_or(UNMAPPED)
            }
            _ => UNMAPPED,
        }
    }

    /// The users and groups of a process, as the current process sees them.
    pub(in crate::sentry) fn seen_ids(&self, process: u32) -> ProcessIds {
        let ProcessIds { user, group, groups } = self.ids_of(process);
        ProcessIds {
            user: user.map(|number| self.visible_number(number, false)),
            group: group.map(|number| self.visible_number(number, true)),
            groups: groups.into_iter().map(|number| self.visible_number(number, true)).collect(),
        }
    }

    /// The real and the effective user of the current process, and its groups, as it sees them.
    pub(crate) fn real_and_effective(&self) -> [[u32; 2]; 2] {
        let ids = self.seen_ids(self.processes.current_id());
        [ids.user, ids.group].map(|all| [all[REAL], all[EFFECTIVE]])
    }

    /// The owner of a file in the first namespace: the recorded one, or the guest's user.
    pub(in crate::sentry) fn owner_of(&self, recorded: Option<[u32; 2]>) -> [u32; 2] {
        recorded.unwrap_or(self.namespaces.users.owner)
    }

    /// The user and group of a file, as the current process sees them.
    pub(crate) fn seen_owner(&self, recorded: Option<[u32; 2]>) -> [u32; 2] {
        let [user, group] = self.owner_of(recorded);
        [self.visible_number(user, false), self.visible_number(group, true)]
    }

    /// Whether the current process has a capability over files of this owner, whose user and group
    /// must have numbers in its namespace.
    pub(in crate::sentry) fn has_over(&self, owner: Option<[u32; 2]>, capability: u32) -> bool {
        self.have_over(self.credentials(), owner, capability)
    }

    /// As [`Self::has_over`], with these credentials.
    pub(in crate::sentry) fn have_over(
        &self,
        own: Credentials,
        owner: Option<[u32; 2]>,
        capability: u32,
    ) -> bool {
        let first = self.namespaces.users.owner;
        let is_mapped = |group| self.namespaces.number(own.namespace, group).is_some();
        let is_known = own.namespace == INITIAL
            || self.owner_of(owner) == first && is_mapped(false) && is_mapped(true);
        self.namespaces.has(own, own.namespace, capability) && is_known
    }

    /// Whether the current process has a capability over a namespace. One that has changed its user
    /// or group has none over those that it is not in.
    pub(in crate::sentry) fn has_over_namespace(&self, over: u32, capability: u32) -> bool {
        let own = self.credentials();
        let is_first = self.namespaces.users.is_first(self.processes.current_id());
        (own.namespace == over || is_first) && self.namespaces.has(own, over, capability)
    }

    /// Whether the current process may send a signal to another that exists. `SIGCONT` may be sent
    /// within a session.
    pub(in crate::sentry) fn may_signal(&self, target: u32, signal: u64) -> bool {
        let own = &self.processes.current.info;
        let session = self.processes.info(target).map(|info| info.session);
        own.id == target
            || signal == libc::SIGCONT as u64 && session == Some(own.session)
            || self.ids().may_signal(&self.ids_of(target))
            || self.has_over_namespace(self.namespaces.of(target).namespace, KILL)
    }

    /// Whether the current process may look into another: it is the same, or has the same users and
    /// groups, does not hide, and has no capability that the current one lacks. `place` says which
    /// of the current users and groups counts.
    pub(in crate::sentry) fn may_inspect(&self, target: u32, place: usize) -> bool {
        let (own, other) = (self.credentials(), self.namespaces.of(target));
        let hidden = self.processes.info(target).is_some_and(|info| info.traits.undumpable);
        let has_more = own.namespace != other.namespace || other.permitted & !own.permitted != 0;
        self.processes.current_id() == target
            || !hidden && !has_more && self.has_all_ids_of(target, place)
            || self.has_over_namespace(other.namespace, SYS_PTRACE)
    }

    /// Whether all users and groups of another process are the current one's in `place`.
    pub(in crate::sentry) fn has_all_ids_of(&self, target: u32, place: usize) -> bool {
        let (own, other) = (self.ids(), self.ids_of(target));
        other.user[..=SAVED].iter().all(|user| *user == own.user[place])
            && other.group[..=SAVED].iter().all(|group| *group == own.group[place])
    }

    /// Whether the current process may set how another is scheduled.
    pub(in crate::sentry) fn may_schedule(&self, target: u32) -> bool {
        let (own, other) = (self.ids().user[EFFECTIVE], self.ids_of(target).user);
        self.processes.current_id() == target || [other[REAL], other[EFFECTIVE]].contains(&own)
    }

    /// The owner of the files of a process in `/proc`, as files record it.
    pub(in crate::sentry) fn owner_of_process(&self, process: u32) -> Option<[u32; 2]> {
        let ids = self.ids_of(process);
        let owner = [ids.user[EFFECTIVE], ids.group[EFFECTIVE]];
        (owner != self.namespaces.users.owner).then_some(owner)
    }

    /// Refuses a further namespace within the current process's where there is no room, and to a
    /// process that has changed its user or group.
    pub(in crate::sentry) fn make_room_for_namespace(&mut self) -> Result<(), Errno> {
        if !self.namespaces.users.is_first(self.processes.current_id()) {
            return Err(Errno::PERM);
        }
        self.namespaces.check_new(self.credentials().namespace)?;
        if !self.namespaces.has_room() {
            let used = self.described_namespaces().collect();
            self.namespaces.drop_unused(used);
        }
        if self.namespaces.has_room() { Ok(()) } else { Err(Errno::NOSPC) }
    }

    /// Puts process `id`, which has the current one's namespace, into a new one within it.
    pub(in crate::sentry) fn enter_new_namespace(&mut self, id: u32) -> Result<(), Errno> {
        self.make_room_for_namespace()?;
        self.namespaces.enter_new(id, self.credentials().namespace)
    }

    /// Puts the current process into a namespace that exists.
    pub(in crate::sentry) fn enter_namespace(&mut self, namespace: u32) {
        self.namespaces.set(self.processes.current_id(), Credentials::within(namespace));
    }

    /// The namespaces that descriptors mean.
    pub(in crate::sentry) fn described_namespaces(&self) -> impl Iterator<Item = u32> + '_ {
        let files =
            self.table.descriptions().filter_map(|(_, description)| match description.open {
                FileObject::Proc(file) => Some(file),
                _ => None,
            });
        files.flat_map(|file| [file.opener, file.setting.namespace()])
    }

    /// The capabilities that processes in this namespace can have: those of user 0 in the first
    /// one, if that is the guest's user.
    pub(in crate::sentry) fn bounding_set(&self, namespace: u32) -> u64 {
        let is_root = self.namespaces.users.owner[0] == 0;
        // A process without any has the usual set, which gives nothing.
        if namespace == INITIAL && is_root { ROOT_CAPABILITIES } else { ALL_CAPABILITIES }
    }

    /// The PID of a process, and its user, as in a signal that it sends.
    pub(in crate::sentry) fn sender(&self, process: u32) -> [u32; 2] {
        [process, self.ids_of(process).user[REAL]]
    }

    /// The current process has got other users or groups: its capabilities follow, as in Linux.
    pub(in crate::sentry) fn change_ids(&mut self, new: ProcessIds) {
        let (id, old) = (self.processes.current_id(), self.ids());
        let mut own = self.credentials();
        let has_root = |ids: &ProcessIds| ids.user[..=SAVED].contains(&0);
        if has_root(&old) && !has_root(&new) && !own.keeps {
            (own.permitted, own.effective) = (0, 0);
        }
        match [&old, &new].map(|ids| ids.user[EFFECTIVE] == 0) {
            [true, false] => own.effective = 0,
            [false, true] => own.effective = own.permitted,
            _ => {}
        }
        self.namespaces.set(id, own);
        self.namespaces.users.set(id, new);
    }

    /// The current process runs another program. One that is no `root` in its namespace loses its
    /// capabilities; one that is has all of them, unless it may not gain any.
    pub(in crate::sentry) fn reset_capabilities(&mut self) {
        let id = self.processes.current_id();
        let (mut own, mut ids) = (self.credentials(), self.ids());
        let gains = !self.processes.current.info.traits.unprivileged;
        let [[real, effective], _] = self.real_and_effective();
        own.permitted = match real == 0 || effective == 0 {
            true if gains && own.namespace == INITIAL => {
                self.namespaces.first_credentials().permitted
            }
            true if gains => ALL_CAPABILITIES,
            true => own.permitted,
            false => 0,
        };
        own.effective = if effective == 0 { own.permitted } else { 0 };
        own.keeps = false;
        for numbers in [&mut ids.user, &mut ids.group] {
            numbers[SAVED] = numbers[EFFECTIVE];
            numbers[FOR_FILES] = numbers[EFFECTIVE];
        }
        self.namespaces.set(id, own);
        self.namespaces.users.set(id, ids);
    }
}
