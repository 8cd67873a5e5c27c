//! The states of pages in a pool, and the work done on them.

use std::time::Duration;

/// Where the pages of a pool are. The parts always add up to `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Free and zero.
    pub clean: usize,
    /// Free, content unknown.
    pub dirty: usize,
    /// With the zeroing thread, waiting or in work.
    pub zeroing: usize,
    /// Without memory.
    pub absent: usize,
    /// Lent out.
    pub lent: usize,
    /// Gaining or losing their memory right now.
    pub moving: usize,
    /// Everything.
    pub total: usize,
}

impl Usage {
    /// Whether the parts add up.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        self.clean + self.dirty + self.zeroing + self.absent + self.lent + self.moving == self.total
    }
}

/// The work of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Work {
    /// Pages zeroed by takers.
    pub zeroed_inline: u64,
    /// Pages zeroed by the background thread.
    pub zeroed_background: u64,
    /// Processor time of the background thread.
    pub background_cpu: Duration,
    /// Pages taken from the kernel.
    pub populated: u64,
    /// Pages released to the kernel.
    pub trimmed: u64,
    /// 2 MiB frames populated as huge pages.
    pub huge_frames: usize,
    /// 2 MiB frames populated as 4 KiB pages.
    pub small_frames: usize,
    /// Pages withdrawn permanently because a mapping of them could not be removed.
    pub quarantined: usize,
}
