//! Frozen states of a guest, to be restored or forked.
//!
//! Promises: a snapshot never changes; it shares every page that it has in common with its relatives;
//! it stays valid whatever becomes of the sandbox or of other snapshots. May break it: memory shared
//! with the host, which is no part of any snapshot.

use std::sync::Arc;

use afresh_memory::Image;

use crate::builder::{BuildError, Config, Template};
use crate::call::CallError;
use crate::sandbox::{Sandbox, State};
use crate::strategy::Strategy;

/// A guest's state between two calls: its memory. Registers are the same at the start of every
/// call, so there is nothing else to keep.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(crate) template: Arc<Template>,
    image: Image,
    config: Config,
    entry: u64,
}

impl Snapshot {
    /// A new sandbox in this state. It returns to this state at every reset, and shares all memory
    /// that it does not write.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn spawn(&self) -> Result<Sandbox, BuildError> {
        Sandbox::start(Arc::clone(&self.template), &self.image, self.config.clone(), self.entry)
    }

    /// The same snapshot, whose sandboxes are reset in another way.
    #[must_use]
    pub fn with_strategy(mut self, strategy: Strategy) -> Self {
        self.config.strategy = strategy;
        self
    }

    /// The memory.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }
}

impl Sandbox {
    /// The state that the sandbox returns to.
    #[must_use]
    pub fn pristine(&self) -> Snapshot {
        self.snapshot_of(self.memory.slot.image().clone())
    }

    /// Freezes the present state. Costs time and memory in proportion to what was written since the
    /// state that the sandbox returns to; the sandbox itself does not change.
    ///
    /// # Errors
    /// [`CallError::NeedsReset`] after a failed call; otherwise when memory runs out.
    pub fn snapshot(&mut self) -> Result<Snapshot, CallError> {
        self.check()?;
        let image = self.memory.slot.freeze()?;
        Ok(self.snapshot_of(image))
    }

    fn snapshot_of(&self, image: Image) -> Snapshot {
        Snapshot {
            template: Arc::clone(&self.template),
            image,
            config: self.config.clone(),
            entry: self.entry,
        }
    }

    /// Goes to any snapshot of the same guest, up, down or across its tree. That is then the state
    /// that the sandbox returns to.
    ///
    /// # Errors
    /// [`CallError::ForeignSnapshot`], with nothing changed; any other error quarantines the sandbox.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), CallError> {
        if !Arc::ptr_eq(&self.template, &snapshot.template) {
            return Err(CallError::ForeignSnapshot);
        }
        match self.state {
            State::Quarantined => return Err(CallError::Quarantined),
            State::NeedsReset => {
                self.reset()?;
            }
            State::Ready => {}
        }
        let outcome = self.memory.slot.set_image(&snapshot.image, &self.template.accessible);
        if outcome.is_err() {
            self.state = State::Quarantined;
        }
        self.generation = crate::call::next_generation();
        Ok(outcome?)
    }
}
