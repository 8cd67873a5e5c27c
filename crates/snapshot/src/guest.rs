//! What a guest must offer to be frozen, moved and forked.

use std::sync::Arc;

use afresh_memory::{Image, Slot, SlotConfig, SlotError};

/// A frozen state. Cheap to clone; never changes.
#[derive(Debug, Clone)]
pub struct Frozen {
    /// The memory.
    pub image: Image,
    /// What the guest keeps besides memory: globals, tables, registers. Only the guest reads it.
    pub state: Arc<[u8]>,
}

/// A live guest.
///
/// After [`Guest::checkpoint`] or [`Guest::switch`] the guest equals the frozen state, and that is the
/// state its resets return to.
pub trait Guest: Sized {
    /// Why an operation failed. The guest then refuses further use or is as it was before.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Freezes the present state, at the cost of what changed since the state it stood on.
    ///
    /// # Errors
    /// The guest's own.
    fn checkpoint(&mut self) -> Result<Frozen, Self::Error>;

    /// Goes to another state of the same guest, at the cost of what differs.
    ///
    /// # Errors
    /// The guest's own.
    fn switch(&mut self, to: &Frozen) -> Result<(), Self::Error>;

    /// A new guest in that state, sharing every page it does not write.
    ///
    /// # Errors
    /// The guest's own.
    fn fork(&self, from: &Frozen) -> Result<Self, Self::Error>;
}

/// Why plain memory could not be frozen or moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlotGuestError {
    /// The slot refused.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The state could not be stored.
    #[error(transparent)]
    Image(#[from] afresh_memory::ImageError),
}

/// Plain memory is the simplest guest: it has no state besides.
impl Guest for Slot {
    type Error = SlotGuestError;

    fn checkpoint(&mut self) -> Result<Frozen, SlotGuestError> {
        Ok(Frozen { image: Slot::checkpoint(self)?, state: Arc::from([]) })
    }

    fn switch(&mut self, to: &Frozen) -> Result<(), SlotGuestError> {
        Slot::switch(self, &to.image)?;
        Ok(())
    }

    fn fork(&self, from: &Frozen) -> Result<Self, SlotGuestError> {
        let config = SlotConfig {
            strategy: self.choice().strategy,
            regions: self.regions().to_vec(),
            capacity: Some(self.capacity()),
            ..SlotConfig::default()
        };
        Ok(Slot::new(&from.image, config)?)
    }
}
