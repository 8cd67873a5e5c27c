//! Directories of `/proc` that belong to processes.

use serde::{Deserialize, Serialize};

/// Numbers of files of the tree are below this.
pub(in crate::sentry) const INODES: u64 = 1 << 40;

/// A directory that is in no tree, or has more in it than the tree knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ProcDir {
    /// `/proc`.
    All,
    /// `/proc/<process>`.
    Process(u32),
    /// `/proc/<process>/fd`.
    Descriptors(u32),
    /// `/proc/<process>/fdinfo`.
    Infos(u32),
    /// `/proc/<process>/task`.
    Threads(u32),
    /// `/proc/<process>/task/<thread>`.
    Thread(u32, u32),
    /// `/proc/<process>/ns`.
    Namespaces(u32),
    /// `/proc/sysvipc`.
    Ipc,
}

impl ProcDir {
    pub(in crate::sentry) fn path(self) -> String {
        match self {
            Self::All => "/proc".to_owned(),
            Self::Process(id) => format!("/proc/{id}"),
            Self::Descriptors(id) => format!("/proc/{id}/fd"),
            Self::Infos(id) => format!("/proc/{id}/fdinfo"),
            Self::Threads(id) => format!("/proc/{id}/task"),
            Self::Thread(id, thread) => format!("/proc/{id}/task/{thread}"),
            Self::Namespaces(id) => format!("/proc/{id}/ns"),
            Self::Ipc => "/proc/sysvipc".to_owned(),
        }
    }

    /// The process that it is about.
    pub(in crate::sentry) fn process(self) -> Option<u32> {
        match self {
            Self::All | Self::Ipc => None,
            Self::Process(id)
            | Self::Descriptors(id)
            | Self::Infos(id)
            | Self::Threads(id)
            | Self::Thread(id, _)
            | Self::Namespaces(id) => Some(id),
        }
    }

    /// Its inode number.
    pub(in crate::sentry) fn inode(self) -> u64 {
        let (kind, id) = match self {
            Self::All => (0, 0),
            Self::Process(id) => (1, id),
            Self::Descriptors(id) => (2, id),
            Self::Infos(id) => (3, id),
            Self::Threads(id) => (4, id),
            Self::Thread(_, thread) => (5, thread),
            Self::Namespaces(id) => (6, id),
            Self::Ipc => (0, 1),
        };
        INODES + (kind << 32) + u64::from(id)
    }
}
