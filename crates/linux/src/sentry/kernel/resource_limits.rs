//! Limits that a process has set itself (`setrlimit`). It reads them back, and its children inherit them.
//!
//! Promises: none is ever above the limit of every guest. Only the number of descriptors, the size of files and CPU time
//! are enforced; the guest's own bounds hold in any case. Frozen limits are checked before use.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::sentry::Kernel;
use crate::sentry::kernel::fd_table::DESCRIPTORS;

/// Number of resources (`RLIM_NLIMITS`).
const RESOURCES: u32 = 16;

/// Soft and hard limits that a process has set, by resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResourceLimits(BTreeMap<u32, (u64, u64)>);

impl ResourceLimits {
    /// Descriptors that may be open.
    pub(in crate::sentry) fn descriptors(&self) -> u32 {
        let set = self.0.get(&libc::RLIMIT_NOFILE);
        set.map_or(DESCRIPTORS, |(soft, _)| (*soft).min(DESCRIPTORS.into()) as u32)
    }

    /// Bytes that a file may have which a process writes.
    pub(in crate::sentry) fn file_size(&self) -> u64 {
        self.0.get(&libc::RLIMIT_FSIZE).map_or(u64::MAX, |(soft, _)| *soft)
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
        if let Some(set) = self.family.kin(id).and_then(|kin| kin.limits.get(resource)) {
            return Some(set);
        }
        let limit = match resource {
            libc::RLIMIT_STACK => crate::sentry::STACK_LEN,
            libc::RLIMIT_NOFILE => u64::from(DESCRIPTORS),
            libc::RLIMIT_AS | libc::RLIMIT_DATA | libc::RLIMIT_RSS => self.layout.limit(),
            libc::RLIMIT_NPROC => crate::sentry::kernel::process_table::PROCESSES as u64,
            libc::RLIMIT_CORE => 0,
            0..RESOURCES => u64::MAX,
            _ => return None,
        };
        Some((limit, limit))
    }
}

impl Kernel {
    /// Has the descriptors of the current process keep to its limit.
    pub(in crate::sentry) fn heed_limits(&mut self) {
        self.table.set_room(self.family.own.limits.descriptors());
    }
}
