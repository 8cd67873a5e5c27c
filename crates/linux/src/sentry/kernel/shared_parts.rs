//! Parts that processes share with each other after `clone`, apart from descriptors: directories,
//! handlers of signals, and contexts without an effect.
//!
//! Promises: a process that shares nothing has no entry. A change by one process of a group is made
//! for all of them. May break it: a change of a directory, a mask or a handler that does not call
//! `Kernel::spread_directories` or `Kernel::spread_action`.

mod spreading;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A part that processes may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sentry) enum SharedPart {
    /// Working and root directory, and file mode mask (`CLONE_FS`).
    Directories,
    /// Actions of signals (`CLONE_SIGHAND`).
    Handlers,
    /// `CLONE_IO`, without an effect.
    Io,
    /// `CLONE_SYSVSEM`, without an effect: each process has its own list to undo.
    Undo,
}

/// The groups of processes that share a part, each named after a process that may have ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedParts([BTreeMap<u32, u32>; 4]);

impl SharedParts {
    /// The name of the group that a process belongs to.
    pub(in crate::sentry) fn group(&self, part: SharedPart, process: u32) -> u32 {
        self.0[part as usize].get(&process).copied().unwrap_or(process)
    }

    /// Has a new process share a part with another.
    pub(in crate::sentry) fn share(&mut self, part: SharedPart, process: u32, with: u32) {
        let group = self.group(part, with);
        let groups = &mut self.0[part as usize];
        groups.insert(with, group);
        groups.insert(process, group);
    }

    /// A process has its own part from now on.
    pub(in crate::sentry) fn leave(&mut self, part: SharedPart, process: u32) {
        let groups = &mut self.0[part as usize];
        let Some(group) = groups.remove(&process) else { return };
        // A group named after the process keeps its name, which the process may not have.
        if group == process && groups.values().any(|other| *other == group) {
            let heir = groups.iter().find(|(_, other)| **other == group).map(|(id, _)| *id);
            let others = groups.values_mut().filter(|other| **other == group);
            others.for_each(|other| *other = heir.unwrap_or(group));
        }
    }

    /// A process ends.
    pub(in crate::sentry) fn end(&mut self, process: u32) {
        use SharedPart::{Directories, Handlers, Io, Undo};
        [Directories, Handlers, Io, Undo].into_iter().for_each(|part| self.leave(part, process));
    }

    /// The others that share a part with a process.
    fn peers(&self, part: SharedPart, process: u32) -> Vec<u32> {
        let groups = &self.0[part as usize];
        let Some(group) = groups.get(&process) else { return Vec::new() };
        let peers = groups.iter().filter(|(id, other)| **id != process && *other == group);
        peers.map(|(id, _)| *id).collect()
    }

    /// Whether all are living processes.
    pub(in crate::sentry) fn is_sound(&self, lives: impl Fn(u32) -> bool) -> bool {
        let ids = || self.0.iter().flat_map(|groups| groups.iter());
        ids().all(|(process, group)| lives(*process) && lives(*group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_share_a_part_until_they_leave_it() {
        const PART: SharedPart = SharedPart::Directories;
        let mut parts = SharedParts::default();
        parts.share(PART, 3, 2);
        parts.share(PART, 4, 3);
        assert_eq!([2, 3, 4].map(|id| parts.group(PART, id)), [2; 3]);
        assert_eq!((parts.peers(PART, 2), parts.group(SharedPart::Io, 3)), (vec![3, 4], 3));
        parts.leave(PART, 2);
        assert_eq!([2, 3, 4].map(|id| parts.group(PART, id)), [2, 3, 3]);
        assert!(parts.is_sound(|id| [3, 4].contains(&id)) && !parts.is_sound(|id| id == 3));
        parts.end(4);
        assert!(parts.peers(PART, 3).is_empty());
    }
}
