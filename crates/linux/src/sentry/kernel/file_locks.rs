//! Locks on files: those of `fcntl`, by ranges of bytes, which belong to a process or to an open
//! description, and those of `flock`, which belong to an open description and are independent of
//! the others. Plain data, like all else.

use afresh_files::Node;
use rustix::io::Errno;
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

    /// Releases the owner's locks in the range of `what`, which is held then if it `holds`. A
    /// failure changes nothing.
    pub(in crate::sentry) fn replace(&mut self, what: &FileLock, holds: bool) -> Result<(), Errno> {
        let own = |held: &FileLock| {
            (held.node, held.owner, held.whole) == (what.node, what.owner, what.whole)
                && held.start < what.end
                && what.start < held.end
        };
        let (cut, mut kept): (Vec<FileLock>, Vec<FileLock>) =
            self.0.iter().partition(|held| own(held));
        for held in cut {
            let before = FileLock { end: what.start, ..held };
            let behind = FileLock { start: what.end, ..held };
            kept.extend([before, behind].into_iter().filter(|part| part.start < part.end));
        }
        kept.extend(holds.then_some(*what));
        // Also a release can leave two locks where there was one.
        if kept.len() > LOCKS {
            return Err(Errno::NOLCK);
        }
        self.0 = kept;
        Ok(())
    }

    /// Whether a guest may have so many.
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        self.0.len() <= LOCKS
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

#[cfg(test)]
mod tests {
    use afresh_files::Tree;

    use super::*;

    #[test]
    fn locks_are_bounded_also_where_a_release_cuts_them() {
        let owner = LockOwner::Process(2);
        let (node, writes, whole) = (Tree::ROOT, true, false);
        let part = |start, end| FileLock { node, owner, start, end, writes, whole };
        let far = 2 * LOCKS as u64;
        let single = (1..LOCKS as u64 - 1).map(|at| part(2 * at, 2 * at + 1));
        let mut locks = FileLocks(single.chain([part(far - 2, u64::MAX)]).collect());
        locks.replace(&part(far, far + 1), false).unwrap();
        assert!(locks.0.len() == LOCKS && locks.is_sound());
        let full = locks.clone();
        let far = far + 8;
        assert_eq!(locks.replace(&part(far, far + 1), false), Err(Errno::NOLCK));
        // A lock of another kind takes the place of a part.
        let read = FileLock { writes: false, ..part(far, far + 1) };
        assert_eq!(locks.replace(&read, true), Err(Errno::NOLCK));
        assert_eq!(locks, full);
        locks.replace(&part(0, u64::MAX), false).unwrap();
        assert_eq!(locks, FileLocks::default());
    }
}
