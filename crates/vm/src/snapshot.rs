//! Frozen states of a guest, to be restored or forked.
//!
//! Promises: a snapshot never changes; it shares all common pages with its relatives; it stays
//! valid after the end of the sandbox or of other snapshots. May break it: memory shared with the
//! host, which is not part of any snapshot.

use std::sync::Arc;

use afresh_memory::{Image, PageRange};
use afresh_snapshot::{Frozen, Guest};

use crate::config::Config;
use crate::error::{BuildError, CallError, ThawError};
use crate::generation::next_generation;
use crate::sandbox::{Sandbox, State};
use crate::strategy::ResetMethod;
use crate::template::Template;

/// A guest's state between two calls: its memory. Registers are the same at the start of every
/// call, so there is nothing else to keep.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(crate) template: Arc<Template>,
    image: Image,
    config: Config,
    pub(crate) entry: u64,
}

impl Snapshot {
    /// A new sandbox in this state. It returns to this state at every reset, and shares all memory
    /// that it does not write.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn fork(&self) -> Result<Sandbox, BuildError> {
        Sandbox::start(Arc::clone(&self.template), &self.image, self.config.clone(), self.entry)
    }

    /// The same snapshot, whose sandboxes are reset in another way.
    #[must_use]
    pub fn with_reset(mut self, method: ResetMethod) -> Self {
        self.config.reset = method;
        self
    }

    /// How sandboxes that are made of it are reset on this host.
    #[must_use]
    pub fn reset_method(&self) -> ResetMethod {
        self.config.reset.here()
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

    /// Freezes the present state. Costs time and memory in proportion to the writes since the state
    /// that the sandbox returns to; the sandbox itself does not change.
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
    /// [`CallError::ForeignSnapshot`], with nothing changed; any other error quarantines the
    /// sandbox.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), CallError> {
        if !Arc::ptr_eq(&self.template, &snapshot.template) {
            return Err(CallError::ForeignSnapshot);
        }
        self.check_process()?;
        match self.state {
            State::Quarantined => return Err(CallError::Quarantined),
            State::NeedsReset => {
                self.reset()?;
            }
            State::Ready => {}
        }
        let outcome = self.show(&snapshot.image);
        self.entry = snapshot.entry;
        self.generation = next_generation();
        outcome
    }

    /// Has the memory be that of `image`.
    fn show(&mut self, image: &Image) -> Result<(), CallError> {
        let outcome = self.memory.slot.switch(image);
        if outcome.is_err() {
            self.state = State::Quarantined;
        }
        outcome?;
        Ok(())
    }

    /// Freezes the present state and makes it the one that the sandbox returns to: the next
    /// checkpoint stores only the changes since this one.
    ///
    /// # Errors
    /// [`CallError::NeedsReset`] after a failed call; otherwise when memory runs out.
    pub fn checkpoint(&mut self) -> Result<Snapshot, CallError> {
        self.check()?;
        let image = self.memory.slot.checkpoint()?;
        Ok(self.snapshot_of(image))
    }
}

/// Why a sandbox could not be frozen, moved or forked on a tree.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// Freezing or moving failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A fork could not be made.
    #[error(transparent)]
    Build(#[from] BuildError),
}

impl Guest for Sandbox {
    /// Any state of the guest: everything but memory is the same in all.
    type Template = Snapshot;
    type State = GuestState;
    type Error = SnapshotError;

    fn template(&self) -> Snapshot {
        self.pristine()
    }

    fn make(home: &Snapshot, from: &Frozen<GuestState>) -> Result<Self, SnapshotError> {
        Ok(home.sibling(from)?.fork()?)
    }

    fn checkpoint(&mut self) -> Result<Frozen<GuestState>, SnapshotError> {
        Ok(Sandbox::checkpoint(self)?.state())
    }

    fn switch(&mut self, to: &Frozen<GuestState>) -> Result<(), SnapshotError> {
        let snapshot = self.pristine().sibling(to)?;
        Ok(self.restore(&snapshot)?)
    }

    fn relocate(&mut self, to: &Frozen<GuestState>) -> Result<(), SnapshotError> {
        let snapshot = self.pristine().sibling(to)?;
        Ok(self.show(&snapshot.image)?)
    }
}

/// The state in a tree except memory: the identity of the guest, and the entry of its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestState {
    template: u64,
    entry: u64,
}

impl Snapshot {
    /// The state, for a tree.
    #[must_use]
    pub fn state(&self) -> Frozen<GuestState> {
        Frozen {
            memories: Arc::from([self.image.clone()]),
            state: GuestState { template: self.template.id, entry: self.entry },
        }
    }

    /// A state of this guest that was frozen elsewhere, for a tree.
    ///
    /// # Errors
    /// [`ThawError`] for another guest's.
    pub fn adopt(&self, frozen: &crate::Frozen) -> Result<Frozen<GuestState>, ThawError> {
        let own = self.freeze().map_err(|e| ThawError::State(e.to_string()))?;
        if !own.is_sibling(frozen) {
            return Err(ThawError::State("it is of another guest".to_owned()));
        }
        // The system pages are those of this sandbox.
        let (all, from) = (self.image.pages(), frozen.guest.pages());
        let system = self.image.slice(PageRange::new(from, all - from));
        let image = Image::join(&[frozen.guest.clone(), system]);
        let state = GuestState { template: self.template.id, entry: frozen.header.entry };
        Ok(Frozen { memories: Arc::from([image]), state })
    }

    /// The snapshot behind a state of a tree, if it is of this guest.
    ///
    /// # Errors
    /// [`CallError::ForeignSnapshot`].
    pub fn sibling(&self, frozen: &Frozen<GuestState>) -> Result<Snapshot, CallError> {
        match &frozen.memories[..] {
            [image] if frozen.state.template == self.template.id => Ok(Snapshot {
                image: image.clone(),
                entry: frozen.state.entry,
                template: Arc::clone(&self.template),
                config: self.config.clone(),
            }),
            _ => Err(CallError::ForeignSnapshot),
        }
    }
}
