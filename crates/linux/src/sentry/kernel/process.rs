//! A process of a guest: all of it except memory, registers and descriptors.

use std::collections::BTreeMap;

use afresh_files::{Node, Tree};
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::process_info::ProcessInfo;
use crate::sentry::kernel::signals::PendingSignals;
use crate::sentry::kernel::threads::{Thread, Threads};
use crate::sentry::kernel::timers::Timers;

/// The state of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) info: ProcessInfo,
    pub(crate) directory: Node,
    /// Its root directory, if that is not the root of the tree. Version 17 of the state stores it
    /// behind the rest.
    #[serde(skip)]
    pub(in crate::sentry) root: Option<Node>,
    pub(in crate::sentry) umask: u32,
    /// Handlers by signal, as the program set them.
    pub(in crate::sentry) handlers: BTreeMap<u64, [u8; 32]>,
    /// Signals for any thread that takes them.
    pub(in crate::sentry) pending: PendingSignals,
    pub(in crate::sentry) timers: Timers,
    pub(crate) threads: Threads,
}

impl Process {
    /// The first process of a guest, in the root directory.
    pub(in crate::sentry) fn first() -> Self {
        Self {
            info: ProcessInfo::first(),
            directory: Tree::ROOT,
            root: None,
            umask: 0o022,
            handlers: BTreeMap::new(),
            pending: PendingSignals::default(),
            timers: Timers::default(),
            threads: Threads::new(),
        }
    }

    /// Its root directory.
    pub(in crate::sentry) fn root(&self) -> Node {
        self.root.unwrap_or(Tree::ROOT)
    }

    /// Whether a signal has come that ends a wait of its thread.
    pub(in crate::sentry) fn wakes(&self, thread: &Thread) -> bool {
        (thread.pending.set() | self.pending.set()) & !thread.blocked != 0
    }

    /// The signals that it ignores and those that it handles, as sets.
    pub(in crate::sentry) fn action_sets(&self) -> [u64; 2] {
        let mut sets = [0, 0];
        for (number, action) in &self.handlers {
            let ignored = action[..8] == 1u64.to_le_bytes();
            if action[..8] != [0; 8] {
                sets[usize::from(!ignored)] |= 1 << (number - 1);
            }
        }
        sets
    }

    /// Whether a guest could have a process with these settings.
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        self.info.is_sound()
            && self.handlers.keys().all(|number| (1..=64).contains(number))
            && self.pending.is_sound()
            && self.timers.is_sound()
            && self.umask & !0o777 == 0
    }
}
