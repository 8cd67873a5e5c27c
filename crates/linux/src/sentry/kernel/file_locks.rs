//! Locks on files: those of `fcntl`, by ranges of bytes, which belong to a process or to an open
//! description, and those of `flock`, which belong to an open description and are independent of
//! the others. Plain data, like all else.

use afresh_files::Node;
use serde::{Deserialize, Serialize};

use crate::sentry::Kernel;

/// Locks that a guest may hold.
pub(in crate::sentry) const LOCKS: usize = 1 << 14;

/// The owner of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LockOwner {
    Process(u32),
    Description(u64),
}

/// A lock that is held, or wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileLock {
    pub(in crate::sentry) node: Node,
    pub(in crate::sentry) owner: LockOwner,
    pub(in crate::sentry) start: u64,
    pub(in crate::sentry) end: u64,
    pub(in crate::sentry) writes: bool,
    /// Whether it is one of `flock`.
    pub(in crate::sentry) whole: bool,
}

impl FileLock {
    /// Whether both cannot be held.
    pub(in crate::sentry) fn excludes(&self, other: &Self) -> bool {
        (self.node, self.whole) == (other.node, other.whole)
            && self.owner != other.owner
            && self.start < other.end
            && other.start < self.end
            && (self.writes || other.writes)
    }
}

/// All locks that are held.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileLocks(pub(in crate::sentry) Vec<FileLock>);

impl FileLocks {
    /// A lock that stands against `wanted`.
    pub(in crate::sentry) fn against(&self, wanted: &FileLock) -> Option<&FileLock> {
        self.0.iter().find(|held| held.excludes(wanted))
    }

    /// Releases the owner's locks in the range of `what`.
    pub(in crate::sentry) fn release(&mut self, what: &FileLock) {
        let own = |held: &FileLock| {
            (held.node, held.owner, held.whole) == (what.node, what.owner, what.whole)
                && held.start < what.end
                && what.start < held.end
        };
        let (cut, kept): (Vec<FileLock>, Vec<FileLock>) = self.0.iter().partition(|held| own(held));
        self.0 = kept;
        for held in cut {
            let before = FileLock { end: what.start, ..held };
            let behind = FileLock { start: what.end, ..held };
            self.0.extend([before, behind].into_iter().filter(|part| part.start < part.end));
        }
    }

    /// Releases the locks of `process` on a file, one of whose descriptors it has closed.
    pub(in crate::sentry) fn close(&mut self, process: u32, node: Node) {
        let gone = |held: &FileLock| held.owner == LockOwner::Process(process) && held.node == node;
        self.0.retain(|held| !gone(held));
    }

    /// Keeps the locks of live processes and open descriptions.
    pub(in crate::sentry) fn retain(
        &mut self,
        lives: impl Fn(u32) -> bool,
        open: impl Fn(u64) -> bool,
    ) {
        self.0.retain(|held| match held.owner {
            LockOwner::Process(id) => lives(id),
            LockOwner::Description(id) => open(id),
        });
    }
}

impl Kernel {
    /// Releases locks whose owners have ended.
    pub(in crate::sentry) fn drop_unowned(&mut self) {
        let (processes, table) = (&self.processes, &self.table);
        self.locks.retain(|id| processes.lives(id), |id| table.description(id).is_some());
    }
}
