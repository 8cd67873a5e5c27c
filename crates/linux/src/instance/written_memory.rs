//! Memory that the processes of a program have written since its present state was frozen.

use std::collections::BTreeMap;

use super::{Instance, ResetState};
use crate::platform::Process;
use crate::subprocess::Subprocess;

impl Process {
    /// Bytes of its private pages in memory, by the kernel's count, which may lack some pages for
    /// each processor that the process has run on. 0 if the process has ended.
    fn private_memory(&self) -> u64 {
        let counts = std::fs::read_to_string(format!("/proc/{}/statm", self.id()));
        let counts = counts.unwrap_or_default();
        let mut pages = counts.split(' ').skip(1).map(|pages| pages.parse::<u64>().unwrap_or(0));
        let (resident, shared) = (pages.next().unwrap_or(0), pages.next().unwrap_or(0));
        resident.saturating_sub(shared).saturating_mul(afresh_sys::PAGE_SIZE as u64)
    }
}

impl Instance {
    /// Bytes of private memory beyond those at the last checkpoint, in all processes. They are in
    /// no state yet. A page that was written again counts, because it is a copy of the one in that
    /// state. Shared memory does not count, and a process that has ended counts for no other. The
    /// cost is one read of `/proc` for each process.
    #[must_use]
    pub fn written_memory(&self) -> u64 {
        if self.footing != ResetState::Live {
            return 0;
        }
        let written = self.private_memory().map(|(id, bytes)| {
            bytes.saturating_sub(self.frozen_memory.get(&id).copied().unwrap_or(0))
        });
        written.fold(0, u64::saturating_add)
    }

    /// Notes that the private memory of the present moment is part of a state.
    pub(super) fn note_frozen_memory(&mut self) {
        let frozen: BTreeMap<_, _> = self.private_memory().collect();
        self.frozen_memory = frozen;
    }

    /// The private memory of each process, by its PID on the host.
    fn private_memory(&self) -> impl Iterator<Item = (u32, u64)> {
        let of = |body: &Subprocess| (body.process.id(), body.process.private_memory());
        let guest = self.live.as_ref().map(|live| &live.guest);
        guest.into_iter().flat_map(move |guest| {
            std::iter::once(of(&guest.body)).chain(guest.others.iter().map(of))
        })
    }
}
