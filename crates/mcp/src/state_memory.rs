//! The memory of the states that the sandboxes of a server can return to.
//!
//! Promises: a checkpoint or fork after which the states take more than the limit is refused, and
//! its state dropped. All sandboxes of a server share the limit, and a state counts once however
//! many forks share it. May break it: memory that calls write after a checkpoint or fork counts
//! from the next one. The number and size of sandboxes bound it. Content of files does not count.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh::Session;

use crate::sandbox::SandboxError;

/// The memory of the states of a server.
#[derive(Debug)]
pub(crate) struct StateMemory {
    limit: u64,
    used: Mutex<u64>,
}

/// The charge of a sandbox and its forks, whose states are one tree.
#[derive(Debug)]
pub(crate) struct TreeCharge {
    memory: Arc<StateMemory>,
    bytes: Mutex<u64>,
}

fn lock(bytes: &Mutex<u64>) -> MutexGuard<'_, u64> {
    bytes.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StateMemory {
    /// Memory of so many bytes.
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: Mutex::default() })
    }

    /// The charge of a new tree.
    pub(crate) fn charge(self: &Arc<Self>) -> Arc<TreeCharge> {
        Arc::new(TreeCharge { memory: Arc::clone(self), bytes: Mutex::default() })
    }
}

impl TreeCharge {
    /// Charges the states of the tree of `session`, instead of those of the last time.
    ///
    /// # Errors
    /// All states of the server take more than its limit. They are charged.
    pub(crate) fn measure(&self, session: &Session) -> Result<(), SandboxError> {
        let states = session.tree();
        // The first is the warm state, which all sandboxes share.
        let made = states.iter().filter(|state| state.parent.is_some());
        let bytes = made.map(|state| state.own_bytes).fold(0, usize::saturating_add) as u64;
        self.set(bytes);
        let used = *lock(&self.memory.used);
        if used <= self.memory.limit {
            return Ok(());
        }
        Err(SandboxError::Refused(format!(
            "the states of all sandboxes would take {} MiB, and may take {} MiB; close sandboxes \
             with their forks, or raise `--state-memory`",
            used.div_ceil(1 << 20),
            self.memory.limit >> 20,
        )))
    }

    /// The bytes that are charged.
    pub(crate) fn bytes(&self) -> u64 {
        *lock(&self.bytes)
    }

    /// Charges so many bytes instead of those of the last time.
    pub(crate) fn set(&self, bytes: u64) {
        let mut own = lock(&self.bytes);
        let mut used = lock(&self.memory.used);
        *used = used.saturating_sub(*own).saturating_add(bytes);
        *own = bytes;
    }
}

impl Drop for TreeCharge {
    fn drop(&mut self) {
        self.set(0);
    }
}
