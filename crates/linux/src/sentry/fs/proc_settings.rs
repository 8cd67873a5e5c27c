//! Files of `/proc` that are read as they are at each read, and that may be written: names of
//! threads, memory, the maps of user namespaces, and namespaces themselves. Plain data.

use serde::{Deserialize, Serialize};

use crate::sentry::kernel::user_namespaces::INITIAL;

/// The kinds of namespaces by name, each with the inode number of the first of its kind. A guest
/// has further ones of users alone.
pub(in crate::sentry) const NAMESPACES: [(&str, u64); 10] = [
    ("cgroup", 0xefff_fffb),
    ("ipc", 0xefff_ffff),
    ("mnt", 0xefff_fff8),
    ("net", 0xefff_fff9),
    ("pid", 0xefff_fffc),
    ("pid_for_children", 0xefff_fffc),
    ("time", 0xefff_fffa),
    ("time_for_children", 0xefff_fffa),
    ("user", 0xefff_fffd),
    ("uts", 0xefff_fffe),
];
/// The kind of user namespaces, in [`NAMESPACES`].
pub(in crate::sentry) const USER_KIND: u8 = 8;
/// Inode numbers of further namespaces begin here.
const FIRST_INODE: u64 = 0xf000_0000;

/// The setting that a file of `/proc` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ProcSetting {
    /// The numbers of users in a namespace (`uid_map`).
    UserMap(u32),
    /// The numbers of groups (`gid_map`).
    GroupMap(u32),
    /// Whether groups may be set in a namespace (`setgroups`).
    GroupSwitch(u32),
    /// A namespace of a kind in [`NAMESPACES`].
    Namespace(u8, u32),
    /// The name of a thread (`comm`), by process and thread.
    ThreadName(u32, u32),
    /// The memory of a process (`mem`).
    Memory(u32),
    /// The adjustment of the score of a process (`oom_score_adj`).
    OomAdjustment(u32),
    /// The memory that a core dump of a process contains (`coredump_filter`).
    DumpFilter(u32),
    /// The pages of a process (`pagemap`).
    PageMap(u32),
}

/// An open file of `/proc` whose bytes are made when they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcFile {
    pub(crate) setting: ProcSetting,
    /// The user namespace of the process that opened it.
    pub(crate) opener: u32,
    pub(crate) offset: u64,
}

impl ProcFile {
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        let known = match self.setting {
            ProcSetting::Namespace(kind, id) => {
                usize::from(kind) < NAMESPACES.len() && (id == INITIAL || kind == USER_KIND)
            }
            _ => true,
        };
        known && self.offset <= i64::MAX as u64
    }
}

impl ProcSetting {
    /// The inode number of a namespace; that of other files is the same as of all text.
    pub(in crate::sentry) fn inode(self) -> u64 {
        match self {
            Self::Namespace(kind, INITIAL) => NAMESPACES[usize::from(kind)].1,
            Self::Namespace(_, id) => FIRST_INODE + u64::from(id),
            _ => 1,
        }
    }

    /// The user namespace that it is about, or the first.
    pub(in crate::sentry) fn namespace(self) -> u32 {
        match self {
            Self::UserMap(id)
            | Self::GroupMap(id)
            | Self::GroupSwitch(id)
            | Self::Namespace(_, id) => id,
            Self::ThreadName(..)
            | Self::Memory(_)
            | Self::OomAdjustment(_)
            | Self::DumpFilter(_)
            | Self::PageMap(_) => INITIAL,
        }
    }

    /// The process that it is of, for a number, a name or memory of one.
    pub(in crate::sentry) fn process(self) -> Option<u32> {
        match self {
            Self::ThreadName(id, _)
            | Self::Memory(id)
            | Self::OomAdjustment(id)
            | Self::DumpFilter(id)
            | Self::PageMap(id) => Some(id),
            Self::UserMap(_) | Self::GroupMap(_) | Self::GroupSwitch(_) | Self::Namespace(..) => {
                None
            }
        }
    }

    /// Permission bits of the file.
    pub(in crate::sentry) fn mode(self) -> u32 {
        match self {
            Self::Namespace(..) => 0o444,
            Self::Memory(_) => 0o600,
            Self::PageMap(_) => 0o400,
            _ => 0o644,
        }
    }

    /// The text of a link to a namespace.
    pub(in crate::sentry) fn link(self) -> Option<Vec<u8>> {
        match self {
            Self::Namespace(kind, _) => {
                let name = NAMESPACES[usize::from(kind)].0.trim_end_matches("_for_children");
                Some(format!("{name}:[{}]", self.inode()).into_bytes())
            }
            _ => None,
        }
    }
}
