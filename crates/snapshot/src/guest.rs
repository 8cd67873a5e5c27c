//! The interface of guests that can be frozen, moved and forked.

use std::sync::Arc;

use afresh_memory::{Image, Slot, SlotConfig, SlotError};

/// A frozen state. Cheap to clone; never changes.
#[derive(Debug, Clone)]
pub struct Frozen<S> {
    /// The memories, in the guest's order.
    pub memories: Arc<[Image]>,
    /// State outside memory: globals, tables, registers. Only the guest reads it.
    pub state: S,
}

impl<S> Frozen<S> {
    /// Pages stored or shared; all others are zero.
    #[must_use]
    pub fn stored_pages(&self) -> usize {
        self.memories.iter().map(Image::stored_pages).sum()
    }
}

/// A live guest.
///
/// After [`Guest::checkpoint`] or [`Guest::switch`] the guest equals the frozen state, and that is
/// the state its resets return to.
pub trait Guest: Sized {
    /// The origin of guests of one kind: a program, and how it is run.
    type Template: Clone;
    /// Its state outside memory.
    type State: Clone + PartialEq;
    /// Why an operation failed. The guest then refuses further use or is as it was before.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Its origin.
    fn template(&self) -> Self::Template;

    /// A new guest in that state, sharing every page it does not write.
    ///
    /// # Errors
    /// The guest's own.
    fn make(home: &Self::Template, from: &Frozen<Self::State>) -> Result<Self, Self::Error>;

    /// Freezes the present state, at the cost of the changes since the state it stood on.
    ///
    /// # Errors
    /// The guest's own.
    fn checkpoint(&mut self) -> Result<Frozen<Self::State>, Self::Error>;

    /// Goes to another state of the same guest, at the cost of the difference.
    ///
    /// # Errors
    /// The guest's own.
    fn switch(&mut self, to: &Frozen<Self::State>) -> Result<(), Self::Error>;

    /// Stands on `to` from now on, which is the state that it was frozen as just now, stored
    /// otherwise. A guest that has more than it can freeze, like connections to the outside, keeps
    /// that.
    ///
    /// # Errors
    /// The guest's own.
    fn relocate(&mut self, to: &Frozen<Self::State>) -> Result<(), Self::Error>;
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
    /// The state is not of one memory.
    #[error("the state has {0} memories, and a slot is one")]
    Memories(usize),
}

/// The memory of a state of plain memory.
fn only(frozen: &Frozen<()>) -> Result<&Image, SlotGuestError> {
    match &frozen.memories[..] {
        [image] => Ok(image),
        other => Err(SlotGuestError::Memories(other.len())),
    }
}

/// Plain memory is the simplest guest: it has no other state.
impl Guest for Slot {
    /// The configuration of the slot. Of several regions that are said the last does not grow with
    /// the state.
    type Template = SlotConfig;
    type State = ();
    type Error = SlotGuestError;

    fn template(&self) -> SlotConfig {
        SlotConfig {
            strategy: self.choice().strategy,
            regions: match self.regions() {
                // As long as the image of each state.
                [only] if only.start == 0 => Vec::new(),
                several => several.to_vec(),
            },
            capacity: Some(self.capacity()),
            ..self.config().clone()
        }
    }

    fn make(home: &SlotConfig, from: &Frozen<()>) -> Result<Self, SlotGuestError> {
        Ok(Slot::new(only(from)?, home.clone())?)
    }

    fn checkpoint(&mut self) -> Result<Frozen<()>, SlotGuestError> {
        Ok(Frozen { memories: Arc::from([Slot::checkpoint(self)?]), state: () })
    }

    fn switch(&mut self, to: &Frozen<()>) -> Result<(), SlotGuestError> {
        Slot::switch(self, only(to)?)?;
        Ok(())
    }

    fn relocate(&mut self, to: &Frozen<()>) -> Result<(), SlotGuestError> {
        Guest::switch(self, to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_made_like_another_keeps_its_configuration() {
        let config = SlotConfig {
            guard_before: 1 << 20,
            guard_after: 2 << 20,
            write_set_limit: 77,
            verify_every: Some(1),
            zero_pages_at_start: 5,
            capacity: Some(40),
            ..SlotConfig::default()
        };
        let slot = Slot::new(&Image::zero(20), config.clone()).unwrap();
        let state = Frozen { memories: Arc::from([Image::zero(30)]), state: () };
        let other = Slot::make(&Guest::template(&slot), &state).unwrap();
        let made = other.config();
        assert_eq!(
            (made.guard_before, made.guard_after),
            (config.guard_before, config.guard_after)
        );
        assert_eq!(made.write_set_limit, config.write_set_limit);
        assert_eq!(made.verify_every, config.verify_every);
        assert_eq!(made.zero_pages_at_start, config.zero_pages_at_start);
        assert_eq!((other.capacity(), other.end()), (40, 30));
    }
}
