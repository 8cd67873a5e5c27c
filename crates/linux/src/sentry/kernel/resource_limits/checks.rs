//! Checks of a process against its limits.

use std::ops::Range;

use rustix::io::Errno;

use super::{DESCRIPTORS, FILES, RESOURCES, Resource, TASKS, is_data};
use crate::resource_numbers;
use crate::sentry::kernel::state::Kernel;

impl Kernel {
    /// Soft and hard limit of a resource for process `id`, if the resource exists.
    pub(in crate::sentry) fn limit_of(&self, id: u32, resource: u32) -> Option<(u64, u64)> {
        if let Some(set) = self.processes.info(id).and_then(|info| info.limits.get(resource)) {
            return Some(set);
        }
        let limit = match resource {
            // It may be raised. A stack has the length of the soft one in any case.
            resource_numbers::RLIMIT_STACK => return Some((crate::sentry::STACK_LEN, u64::MAX)),
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
