//! Memory that the processes of a program have written since its present state was frozen.

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
    /// state. Shared memory does not count. The cost is one read of `/proc` for each process.
    #[must_use]
    pub fn written_memory(&self) -> u64 {
        match self.footing {
            ResetState::Live => self.private_memory().saturating_sub(self.frozen_memory),
            _ => 0,
        }
    }

    /// Notes that the private memory of the present moment is part of a state.
    pub(super) fn note_frozen_memory(&mut self) {
        self.frozen_memory = self.private_memory();
    }

    fn private_memory(&self) -> u64 {
        let Some(live) = &self.live else { return 0 };
        let of = |body: &Subprocess| body.process.private_memory();
        live.guest.others.iter().map(of).fold(of(&live.guest.body), u64::saturating_add)
    }
}
