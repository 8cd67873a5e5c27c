//! The credentials of the current process: its user namespace, its capabilities there, and the
//! numbers that the only user and group have for it.

use rustix::io::Errno;

use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::user_namespaces::{ALL_CAPABILITIES, Credentials};

/// The number of a user or group that is not mapped.
const UNMAPPED: u32 = 65534;

impl Kernel {
    /// The credentials of the current process.
    pub(in crate::sentry) fn credentials(&self) -> Credentials {
        self.namespaces.of(self.processes.current_id())
    }

    /// The number of the only user, as the current process sees it.
    pub(crate) fn user_id(&self) -> u32 {
        self.namespaces.number(self.credentials().namespace, false).unwrap_or(UNMAPPED)
    }

    /// The number of the only group, as the current process sees it.
    pub(crate) fn group_id(&self) -> u32 {
        self.namespaces.number(self.credentials().namespace, true).unwrap_or(UNMAPPED)
    }

    /// The numbers of the user and group of every file, as the current process sees them.
    pub(crate) fn owner(&self) -> [u32; 2] {
        [self.user_id(), self.group_id()]
    }

    /// Whether the current process has a capability over files, whose user and group must have
    /// numbers in its namespace.
    pub(in crate::sentry) fn has_over_files(&self, capability: u32) -> bool {
        let own = self.credentials();
        let is_mapped = |group| self.namespaces.number(own.namespace, group).is_some();
        self.namespaces.has(own, own.namespace, capability) && is_mapped(false) && is_mapped(true)
    }

    /// Refuses a further namespace within the current process's where there is no room.
    pub(in crate::sentry) fn make_room_for_namespace(&mut self) -> Result<(), Errno> {
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

    /// The current process runs another program. One that is no `root` in its namespace loses its
    /// capabilities; one that is has all of them, unless it may not gain any.
    pub(in crate::sentry) fn reset_capabilities(&mut self) {
        let id = self.processes.current_id();
        let mut own = self.credentials();
        let gains = !self.processes.current.info.traits.unprivileged;
        own.permitted = match self.user_id() == 0 {
            true if gains => ALL_CAPABILITIES,
            true => own.permitted,
            false => 0,
        };
        (own.effective, own.keeps) = (own.permitted, false);
        self.namespaces.set(id, own);
    }
}
