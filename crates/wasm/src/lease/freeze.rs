//! Freezing: the state of a warm guest or of a lease, to be saved or thawed elsewhere.

use afresh_memory::{FreezePreparation, Slot};

use crate::warm::instance_state::InstanceState;
use crate::warm::pools::Pools;
use crate::warm::reset::SlotFreeze;
use crate::{FreezeError, Frozen, FrozenState, Lease, Warm};

impl Warm {
    /// The warm state, to be saved or thawed elsewhere. Shares the memory.
    ///
    /// # Errors
    /// [`FreezeError::State`] for a guest whose warm state cannot be kept.
    pub fn freeze(&self) -> Result<Frozen, FreezeError> {
        let state = match &self.inner.pools {
            Pools::Reset { state, .. } => Some(&state.state),
            Pools::Fresh { state, .. } => state.state.as_ref(),
        };
        let state = state.ok_or_else(|| {
            FreezeError::State(
                "this guest starts from its module each time, for its warm state cannot be kept"
                    .to_owned(),
            )
        })?;
        let inner = &self.inner;
        let memories = inner.pools.memories().to_vec();
        let files = inner.pools.blueprint().stores.kept_files();
        FrozenState::join(
            inner.program.clone(),
            memories,
            state.clone(),
            inner.read,
            None,
            files.as_ref(),
        )
    }
}

impl Lease<'_> {
    /// Begins a freeze. If the returned work is done in other threads while the guest is called,
    /// [`Lease::freeze_live`] takes less time. A reset abandons it.
    ///
    /// # Errors
    /// As [`Lease::freeze`].
    pub fn prepare_freeze(&mut self) -> Result<Vec<FreezePreparation>, FreezeError> {
        self.live.prepare_freeze()
    }

    /// The present state, including calls of this lease, to be saved or thawed. The cost is
    /// proportional to the writes since the warm state.
    ///
    /// # Errors
    /// [`FreezeError::State`] in fresh mode, and for references that no other instance can hold.
    pub fn freeze(&mut self) -> Result<Frozen, FreezeError> {
        self.frozen(Slot::freeze)
    }

    /// As [`Lease::freeze`], in less time if the work of [`Lease::prepare_freeze`] was done. Pages
    /// are copied when they are read or written: see [`Slot::freeze_live`]. From here on, a
    /// system call of a host function that writes to guest memory may fail with `EFAULT`, also
    /// where the function touched that memory before.
    ///
    /// # Errors
    /// As [`Lease::freeze`].
    pub fn freeze_live(&mut self) -> Result<Frozen, FreezeError> {
        self.frozen(Slot::freeze_live)
    }

    fn frozen(&mut self, slot_freeze: SlotFreeze) -> Result<Frozen, FreezeError> {
        let InstanceState { memories, state, files, read } = self.live.state(slot_freeze)?;
        if let Some(opaque) = state.opaque() {
            return Err(FreezeError::State(opaque.to_string()));
        }
        FrozenState::join(self.warm.program.clone(), memories, state, read, None, files.as_ref())
    }
}
