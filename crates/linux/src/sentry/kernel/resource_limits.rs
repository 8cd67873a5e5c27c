//! Limits that a program begins with, and those that a process has set itself (`setrlimit`). It
//! reads them back, and its children inherit them.
//!
//! Promises: none is ever above the limit of every guest. Only those of [`Resource`] and those of
//! the address space, of data and of locked memory are enforced; the guest's own bounds hold in any
//! case. Frozen limits are checked before use.

mod checks;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::resource_numbers;

/// Number of resources (`RLIM_NLIMITS`).
const RESOURCES: u32 = 16;

/// Descriptors that a process may have open unless it raises its limit.
const FILES: u64 = 1024;

/// Threads of all processes, unless the opener says otherwise.
const TASKS: u64 = 4096;

/// Descriptors a process may have.
pub(crate) const DESCRIPTORS: u32 = 1 << 16;

/// Maximum threads of all processes. Each takes some KiB of the host.
pub(in crate::sentry) const MAX_TASKS: u64 = 1 << 15;

/// Whether memory counts as data of its process.
pub(in crate::sentry) fn is_data(protection: u64, shared: bool) -> bool {
    protection & libc::PROT_WRITE as u64 != 0 && !shared
}

/// A limit that a program can be given. It may lower each itself, and raise the soft limit up to
/// the hard one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resource {
    /// Seconds of CPU time of a process (`RLIMIT_CPU`).
    CpuTime,
    /// Bytes of a file that is written (`RLIMIT_FSIZE`).
    FileSize,
    /// Open descriptors of a process (`RLIMIT_NOFILE`).
    OpenFiles,
    /// Threads of all processes together (`RLIMIT_NPROC`).
    Tasks,
}

impl Resource {
    /// All of them, with the names that `ulimit` options have.
    const NAMES: [(Self, &str); 4] = [
        (Self::CpuTime, "cpu"),
        (Self::FileSize, "fsize"),
        (Self::OpenFiles, "nofile"),
        (Self::Tasks, "nproc"),
    ];

    pub(crate) fn number(self) -> u32 {
        match self {
            Self::CpuTime => resource_numbers::RLIMIT_CPU,
            Self::FileSize => resource_numbers::RLIMIT_FSIZE,
            Self::OpenFiles => resource_numbers::RLIMIT_NOFILE,
            Self::Tasks => resource_numbers::RLIMIT_NPROC,
        }
    }

    /// The highest value.
    fn most(self) -> u64 {
        match self {
            Self::OpenFiles => DESCRIPTORS.into(),
            Self::Tasks => MAX_TASKS,
            Self::CpuTime | Self::FileSize => u64::MAX,
        }
    }
}

impl std::str::FromStr for Resource {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::NAMES.into_iter().find(|(_, known)| *known == name);
        found.map(|(resource, _)| resource).ok_or_else(|| {
            format!("no limit {name:?}; those of cpu, fsize, nofile and nproc can be set")
        })
    }
}

/// Soft and hard limits that a process has set, by resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResourceLimits(BTreeMap<u32, (u64, u64)>);

impl ResourceLimits {
    /// Descriptors that may be open.
    pub(in crate::sentry) fn descriptors(&self) -> u32 {
        let set = self.0.get(&resource_numbers::RLIMIT_NOFILE);
        set.map_or(FILES, |(soft, _)| *soft).min(DESCRIPTORS.into()) as u32
    }

    /// Threads that all processes may have together.
    pub(in crate::sentry) fn tasks(&self) -> u64 {
        self.0.get(&resource_numbers::RLIMIT_NPROC).map_or(TASKS, |(soft, _)| *soft).min(MAX_TASKS)
    }

    /// Bytes that a file may have which a process writes.
    pub(in crate::sentry) fn file_size(&self) -> u64 {
        self.0.get(&resource_numbers::RLIMIT_FSIZE).map_or(u64::MAX, |(soft, _)| *soft)
    }

    /// Bytes that a process may lock.
    pub(in crate::sentry) fn locked_bytes(&self) -> u64 {
        self.0.get(&resource_numbers::RLIMIT_MEMLOCK).map_or(u64::MAX, |(soft, _)| *soft)
    }

    /// Bytes that may be mapped, and how many of them may be data.
    fn address_space(&self) -> (u64, u64) {
        let soft = |resource| self.0.get(&resource).map_or(u64::MAX, |(soft, _)| *soft);
        (soft(resource_numbers::RLIMIT_AS), soft(resource_numbers::RLIMIT_DATA))
    }

    /// The limits of a resource.
    pub(in crate::sentry) fn get(&self, resource: u32) -> Option<(u64, u64)> {
        self.0.get(&resource).copied()
    }

    pub(in crate::sentry) fn set(&mut self, resource: u32, limits: (u64, u64)) {
        self.0.insert(resource, limits);
    }

    /// Whether a guest could have set it.
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        self.0.iter().all(|(resource, (soft, hard))| *resource < RESOURCES && soft <= hard)
    }
}
