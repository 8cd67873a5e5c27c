//! Limits that a program begins with, and those that a process has set itself (`setrlimit`). It
//! reads them back, and its children inherit them.
//!
//! Promises: none is ever above the limit of every guest. Only those of [`Resource`] and those of
//! the address space, of data and of locked memory are enforced; the guest's own bounds hold in any
//! case. Frozen limits are checked before use.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use rustix::io::Errno;

use crate::resource_numbers;
use crate::sentry::Kernel;

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

impl Kernel {
    /// Soft and hard limit of a resource for process `id`, if the resource exists.
    pub(in crate::sentry) fn limit_of(&self, id: u32, resource: u32) -> Option<(u64, u64)> {
        if let Some(set) = self.processes.info(id).and_then(|info| info.limits.get(resource)) {
            return Some(set);
        }
        let limit = match resource {
            resource_numbers::RLIMIT_STACK => crate::sentry::STACK_LEN,
            resource_numbers::RLIMIT_NOFILE => return Some((FILES, DESCRIPTORS.into())),
            resource_numbers::RLIMIT_NPROC => TASKS,
            resource_numbers::RLIMIT_CORE => 0,
            0..RESOURCES => u64::MAX,
            _ => return None,
        };
        Some((limit, limit))
    }
}

impl Kernel {
    /// Gives the program a limit to begin with.
    pub(crate) fn set_limit(&mut self, resource: Resource, soft: u64, hard: u64) {
        let (soft, hard) = (soft.min(resource.most()), hard.min(resource.most()));
        self.processes.current.info.limits.set(resource.number(), (soft.min(hard), hard));
        self.heed_limits();
    }

    /// Whether the current process has allowed itself `len` further bytes of address space
    /// (`RLIMIT_AS`), and of data (`RLIMIT_DATA`) if they are: writable, private and not of a
    /// stack. They take the place of mappings in `replaced`.
    pub(in crate::sentry) fn check_address_space(
        &self,
        len: u64,
        replaced: &Range<u64>,
        data: bool,
    ) -> Result<(), Errno> {
        let (total, own) = self.processes.current.info.limits.address_space();
        if (total, own) == (u64::MAX, u64::MAX) {
            return Ok(());
        }
        let parts = self.layout.parts(replaced).into_iter();
        let gone: u64 = parts.map(|(part, _)| part.end - part.start).sum();
        let more = len - gone;
        let fits = |taken: u64, limit: u64| {
            limit == u64::MAX || taken.checked_add(more).is_some_and(|bytes| bytes <= limit)
        };
        let (mut mapped, mut written) = (0, 0);
        for (range, mapping) in self.layout.all() {
            let len = range.end - range.start;
            mapped += len;
            let counts = is_data(mapping.protection, mapping.share.is_some());
            written += if counts && self.layout.name(&range) != Some("[stack]") { len } else { 0 };
        }
        let fits = fits(mapped, total) && (!data || fits(written, own));
        if fits { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// Whether a further thread fits, in any process.
    pub(in crate::sentry) fn check_tasks(&self) -> Result<(), Errno> {
        let tasks = self.processes.threads().count();
        if (tasks as u64) < self.processes.current.info.limits.tasks() {
            Ok(())
        } else {
            Err(Errno::AGAIN)
        }
    }

    /// Has the descriptors of the current process keep to its limit.
    pub(in crate::sentry) fn heed_limits(&mut self) {
        self.table.set_room(self.processes.current.info.limits.descriptors());
    }
}
