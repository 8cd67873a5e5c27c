//! Processes of sessions that have ended, for later sessions of the same program.
//!
//! Promises: a session that gets such a process sees nothing of an earlier session
//! ([`Instance::into_spare`]). At most [`MAX_SPARES`] processes wait for each program. Their memory
//! counts in the budget of the process, and idle ones end as other idle instances do, and all of
//! them under memory pressure.

use std::convert::Infallible;

use afresh_linux::{Instance, SpareProcess, Warm};
use afresh_pool::{Limits, Pool, Recycle, ResetCost};
use afresh_snapshot::GuestReserve;

/// Maximum processes that wait.
const MAX_SPARES: usize = 8;
/// The key of all of them.
const KEY: usize = 0;

/// A process that waits for a session. `None` once it has ended to give its memory back.
struct IdleProcess(Option<SpareProcess>);

impl Recycle for IdleProcess {
    type Error = Infallible;

    fn key(&self) -> usize {
        KEY
    }

    /// It was reset before it came.
    fn recycle(&mut self) -> Result<ResetCost, Infallible> {
        Ok(ResetCost::default())
    }

    fn resident_bytes(&self) -> usize {
        self.0.as_ref().map_or(0, SpareProcess::write_set_bytes)
    }

    fn trim(&mut self) -> Result<(), Infallible> {
        self.0 = None;
        Ok(())
    }
}

/// The processes that wait for sessions of a program.
#[derive(Debug)]
pub(super) struct SparePrograms {
    warm: Warm,
    idle: Pool<IdleProcess>,
}

impl SparePrograms {
    pub(super) fn new(warm: Warm) -> Self {
        let limits = Limits { items: MAX_SPARES, ..Limits::default() };
        Self { warm, idle: Pool::new(limits) }
    }
}

impl GuestReserve<Instance> for SparePrograms {
    fn take(&self) -> Option<Instance> {
        let idle = || self.idle.remove(KEY);
        let spare = std::iter::from_fn(idle).find_map(|idle| idle.0)?;
        Some(self.warm.instance_in(spare))
    }

    fn put(&self, program: Instance) {
        // One that cannot be used again, or beyond the limit, just ends.
        let _ = self.idle.insert(|| {
            program.into_spare(&self.warm).map(|spare| IdleProcess(Some(spare))).ok_or(())
        });
    }
}
