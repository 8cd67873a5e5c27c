//! Locks on files: those of `fcntl`, by ranges of bytes, which belong to a process or to an open
//! description, and those of `flock`, which belong to an open description and are independent of
//! the others. Plain data, like all else.

mod locking;

use std::collections::BTreeSet;

use afresh_files::Node;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Locks that a guest may hold.
pub(in crate::sentry) const LOCKS: usize = 1 << 14;

/// Comparisons of two locks in one search for a deadlock.
const MAX_COMPARISONS: usize = 1 << 22;

/// The owner of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
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

    /// Releases the locks of `process` on `nodes`, after it closed descriptors of these files.
    pub(in crate::sentry) fn close(&mut self, process: u32, nodes: &BTreeSet<Node>) {
        let owner = LockOwner::Process(process);
        self.0.retain(|held| held.owner != owner || !nodes.contains(&held.node));
    }

    /// Whether `owner` waits, over others or not, for a lock of the process that wants `lock`.
    /// `wanted` lists the locks that a process waits for. Each owner is visited once, and a search
    /// that takes too long finds nothing, as one over more than ten owners in Linux.
    pub(in crate::sentry) fn waits_for<'a, W: Iterator<Item = &'a FileLock>>(
        &self,
        owner: LockOwner,
        lock: &FileLock,
        wanted: impl Fn(u32) -> W,
    ) -> bool {
        let (mut next, mut seen) = (vec![owner], BTreeSet::from([owner]));
        let mut left = MAX_COMPARISONS;
        while let Some(owner) = next.pop() {
            let LockOwner::Process(id) = owner else { continue };
            for wanted in wanted(id) {
                let Some(rest) = left.checked_sub(self.0.len()) else { return false };
                left = rest;
                for held in self.0.iter().filter(|held| held.excludes(wanted)) {
                    if held.owner == lock.owner {
                        return true;
                    }
                    if seen.insert(held.owner) {
                        next.push(held.owner);
                    }
                }
            }
        }
        false
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use afresh_files::{Budget, Time, Tree};

    use super::*;

    fn part(process: u32, start: u64) -> FileLock {
        let owner = LockOwner::Process(process);
        FileLock { node: Tree::ROOT, owner, start, end: start + 1, writes: true, whole: false }
    }

    #[test]
    fn a_search_for_a_deadlock_visits_each_owner_once() {
        // All of a level wait for all of the next one, and the last for the process that asks.
        let (levels, width) = (30, 10);
        let processes = || (0..levels).flat_map(|level| (0..width).map(move |n| (level, n)));
        let id = |level: u32, n: u32| 100 + level * width + n;
        let held = processes().map(|(level, n)| part(id(level, n), u64::from(id(level, n))));
        let own = part(1, 1);
        let locks = FileLocks(held.chain([own]).collect());
        let wanted = |ends: bool| {
            let mut all: BTreeMap<u32, Vec<FileLock>> = BTreeMap::new();
            for (level, n) in processes() {
                let next = (0..width).map(|other| id(level + 1, other));
                let next = if level + 1 < levels { next.collect() } else { vec![1] };
                let starts = next.into_iter().filter(|&start| ends || start != 1);
                let wanted = starts.map(|start| part(id(level, n), start.into()));
                all.insert(id(level, n), wanted.collect());
            }
            all
        };
        for deadlock in [false, true] {
            let (wanted, visits) = (wanted(deadlock), RefCell::new(BTreeMap::new()));
            let first = LockOwner::Process(id(0, 0));
            let found = locks.waits_for(first, &part(1, u64::from(id(0, 0))), |id| {
                *visits.borrow_mut().entry(id).or_insert(0) += 1;
                wanted[&id].iter()
            });
            assert_eq!(found, deadlock);
            assert!(visits.borrow().values().all(|count| *count == 1));
        }
    }

    #[test]
    fn a_close_releases_the_locks_of_its_process_on_its_files() {
        let mut tree = Tree::new(Budget::default());
        let files = ["/a", "/b", "/c"].map(|path| tree.write_path(path, b"", Time::default()));
        let [a, b, c] = files.map(Result::unwrap);
        let lock = |process, node| FileLock { node, ..part(process, 0) };
        let all = [a, b, c].into_iter().flat_map(|node| [lock(1, node), lock(2, node)]);
        let mut locks = FileLocks(all.collect());
        locks.close(1, &BTreeSet::from([a, c]));
        assert_eq!(locks.0, [lock(2, a), lock(1, b), lock(2, b), lock(2, c)]);
    }

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
