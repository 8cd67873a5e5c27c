//! The kernel state of a guest: plain data.
//!
//! Promises: a copy shares what does not change, and is equal to its original. May break it: a
//! field that refers to the host.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use afresh_files::{Node, Tree};

use crate::base::Base;
use crate::sentry::fs::seals::Seals;
use crate::sentry::kernel::channels::Channels;
use crate::sentry::kernel::cpu_time::system::SystemTimes;
use crate::sentry::kernel::exit_statuses::ExitStatuses;
use crate::sentry::kernel::fd_table::FdTable;
use crate::sentry::kernel::file_locks::FileLocks;
use crate::sentry::kernel::keys::Keys;
use crate::sentry::kernel::message_queues::MessageQueues;
use crate::sentry::kernel::posix_queues::PosixQueues;
use crate::sentry::kernel::process_table::ProcessTable;
use crate::sentry::kernel::process_tunables::ProcessTunables;
use crate::sentry::kernel::queue_notices::QueueNotices;
use crate::sentry::kernel::semaphores::Semaphores;
use crate::sentry::kernel::shared_parts::SharedParts;
use crate::sentry::kernel::signals::UNTOUCHABLE;
use crate::sentry::kernel::timer_slack::DefaultSlacks;
use crate::sentry::kernel::user_namespaces::UserNamespaces;
use crate::sentry::mm::layout::Layout;
use crate::sentry::mm::shared_segments::SharedSegments;
use crate::sentry::net::closed_connections::ClosedConnections;
use crate::sentry::net::dns::ResolvedNames;
use crate::sentry::tty::terminals::Terminals;

/// The kernel state of a guest: everything but memory and registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) layout: Layout,
    pub(crate) tree: Tree,
    /// The image below the file tree.
    pub(crate) base: Option<Arc<Base>>,
    /// Host directories below the file tree.
    pub(in crate::sentry) layers: Arc<[PathBuf]>,
    pub(crate) table: FdTable,
    /// The current process and the others.
    pub(crate) processes: ProcessTable,
    pub(in crate::sentry) channels: Channels,
    pub(in crate::sentry) terminals: Terminals,
    /// Locks on files.
    pub(in crate::sentry) locks: FileLocks,
    pub(in crate::sentry) seals: Seals,
    /// Descriptors that watch files, and how often a name was given away for their sake.
    pub(in crate::sentry) watchers: u32,
    pub(in crate::sentry) moves: u32,
    /// Files that are held because memory is shared through them.
    pub(in crate::sentry) shares: BTreeSet<Node>,
    /// Bytes of them that processes have mapped, each once.
    pub(in crate::sentry) shared_bytes: u64,
    /// Bytes of live files that the tree stores, which `shared_bytes` has as well.
    pub(in crate::sentry) stored_shares: u64,
    pub(in crate::sentry) system_v: SharedSegments,
    pub(in crate::sentry) semaphores: Semaphores,
    pub(in crate::sentry) queues: MessageQueues,
    pub(in crate::sentry) named_queues: PosixQueues,
    /// Notices of their messages over sockets.
    pub(in crate::sentry) queue_notices: QueueNotices,
    pub(in crate::sentry) namespaces: UserNamespaces,
    pub(in crate::sentry) tunables: ProcessTunables,
    /// Lists of mappings that were opened (`/proc/<process>/maps`), and their memories.
    pub(in crate::sentry) map_files: BTreeMap<Node, u32>,
    /// Timer slacks that processes began with.
    pub(in crate::sentry) slacks: DefaultSlacks,
    /// Statuses of reaped processes.
    pub(in crate::sentry) exits: ExitStatuses,
    /// System times of processes.
    pub(in crate::sentry) system_times: SystemTimes,
    /// Parts that processes share.
    pub(in crate::sentry) shared_parts: SharedParts,
    pub(in crate::sentry) keys: Keys,
    /// Resolved host names.
    pub(in crate::sentry) names: ResolvedNames,
    /// Addresses of closed connections.
    pub(in crate::sentry) closed: ClosedConnections,
}

impl Kernel {
    /// The state of a program that starts with these files, and with the same user unless it has
    /// another.
    pub(crate) fn with_files(&self, layout: Layout, user: Option<[u32; 2]>) -> Self {
        let user = user.unwrap_or(self.namespaces.users.owner);
        Self::new(layout, self.tree.clone(), self.base.clone(), self.layers.to_vec()).owned_by(user)
    }

    /// The user and group of the guest.
    pub(crate) fn user(&self) -> [u32; 2] {
        self.namespaces.users.owner
    }

    /// The same with this user and group, before it runs.
    pub(crate) fn owned_by(mut self, owner: [u32; 2]) -> Self {
        self.namespaces = UserNamespaces::of_owner(owner);
        self
    }

    /// Gives the first process a file mode mask, and has it ignore signals.
    pub(crate) fn inherit(&mut self, umask: u32, ignored: impl Iterator<Item = u64>) {
        let current = self.current_mut();
        current.umask = umask;
        for signal in ignored.filter(|signal| UNTOUCHABLE & 1 << (signal - 1) == 0) {
            let mut action = [0; 32];
            action[0] = libc::SIG_IGN as u8;
            current.handlers.insert(signal, action);
        }
    }

    /// The file mode mask of the current process, and the signals that it ignores, a bit for each.
    #[cfg(test)]
    pub(crate) fn inherited(&self) -> (u32, u64) {
        let [ignored, _] = self.current().action_sets();
        (self.current().umask, ignored)
    }

    /// The state of a program that starts in the root of `tree`, over `base` and `layers`.
    pub(crate) fn new(
        layout: Layout,
        tree: Tree,
        base: Option<Arc<Base>>,
        layers: Vec<PathBuf>,
    ) -> Self {
        Self {
            layout,
            tree,
            base,
            layers: layers.into(),
            table: FdTable::new(),
            processes: ProcessTable::new(),
            channels: Channels::default(),
            terminals: Terminals::default(),
            locks: FileLocks::default(),
            seals: Seals::default(),
            watchers: 0,
            moves: 0,
            shares: BTreeSet::new(),
            shared_bytes: 0,
            stored_shares: 0,
            system_v: SharedSegments::default(),
            semaphores: Semaphores::default(),
            queues: MessageQueues::default(),
            named_queues: PosixQueues::default(),
            queue_notices: QueueNotices::default(),
            namespaces: UserNamespaces::default(),
            tunables: ProcessTunables::default(),
            map_files: BTreeMap::new(),
            slacks: DefaultSlacks::default(),
            exits: ExitStatuses::default(),
            system_times: SystemTimes::default(),
            shared_parts: SharedParts::default(),
            keys: Keys::default(),
            names: ResolvedNames::default(),
            closed: Default::default(),
        }
    }
}
