//! The zero pool that a whole process shares.

use afresh_sys::{PAGE_SIZE, PageRange, PerProcess, Reservation, SysError, ZeroPageSource, host};

use crate::ZeroPool;

/// Pages that the process's zero pool keeps ready: 32 MiB.
const PAGES: usize = 8192;
/// The host must have this many times as much memory to spare.
const SPARE_MEMORY_FACTOR: u64 = 16;

/// The default [`ZeroPageSource`]: one zero pool of 32 MiB for the process, made at the first
/// request, which gets nothing yet. A process without requests has neither its memory nor its
/// thread. On a host with less than 512 MiB to spare it stays empty.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessZeroPool;

impl ProcessZeroPool {
    /// The zero pool, made by the first call; `None` where the host has no memory or thread to
    /// spare.
    #[must_use]
    pub fn get() -> Option<&'static ZeroPool> {
        // A child of a fork has its parent's zero pool, but not the thread that keeps it filled.
        static ZERO_POOL: PerProcess<Option<ZeroPool>> = PerProcess::new(|| {
            let wanted = (PAGES * PAGE_SIZE) as u64 * SPARE_MEMORY_FACTOR;
            let spare = host::memory_headroom().is_some_and(|free| free >= wanted);
            if spare { ZeroPool::new(PAGES).ok() } else { None }
        });
        ZERO_POOL.get().as_ref()
    }
}

// SAFETY: moves nothing, or what the zero pool moves.
unsafe impl ZeroPageSource for ProcessZeroPool {
    fn supply(&self, memory: &Reservation, range: PageRange) -> Result<usize, SysError> {
        Self::get().map_or(Ok(0), |zero_pool| zero_pool.supply(memory, range))
    }
}
