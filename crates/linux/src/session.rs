//! Instances as guests of a snapshot tree: they checkpoint, move to any of their states, and fork.

use std::sync::Arc;
use std::time::Duration;

use afresh_files::Tree;
use afresh_snapshot::{Frozen, Guest};

use crate::error::SnapshotError;
use crate::frozen_state::{FrozenKernel, FrozenState};
use crate::instance::Instance;
use crate::limits::Limits;
use crate::warm::Warm;

/// The state of a program in a tree, except memory: registers, layout, descriptors, files, signals.
/// Only instances read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramState(pub(crate) Arc<FrozenKernel>);

impl ProgramState {
    /// The program's files.
    #[must_use]
    pub fn files(&self) -> &Tree {
        &self.0.state.tree
    }

    /// Zero if the program has a future event, else `None`, as [`Instance::due`].
    #[must_use]
    pub fn due(&self) -> Option<Duration> {
        self.0.due()
    }
}

/// The options of instances of one program.
#[derive(Clone, Debug)]
pub struct InstanceTemplate(Limits);

fn state(standing: &FrozenState) -> Frozen<ProgramState> {
    let (memories, state) = (Arc::clone(&standing.images), Arc::clone(&standing.rest));
    Frozen { memories, state: ProgramState(state) }
}

pub(crate) fn standing(frozen: &Frozen<ProgramState>) -> Result<FrozenState, SnapshotError> {
    let (images, rest) = (Arc::clone(&frozen.memories), Arc::clone(&frozen.state.0));
    let pages = rest.parts.iter().map(|part| part.segments.pages());
    match images.iter().map(afresh_memory::Image::pages).eq(pages) {
        true => Ok(FrozenState { images, rest }),
        false => Err(SnapshotError::Foreign),
    }
}

impl Warm {
    /// The options of its instances, for a tree.
    #[must_use]
    pub fn home(&self) -> InstanceTemplate {
        InstanceTemplate(self.limits.clone())
    }

    /// The warm state, for a tree.
    #[must_use]
    pub fn state(&self) -> Frozen<ProgramState> {
        state(&self.standing)
    }
}

impl Guest for Instance {
    type Template = InstanceTemplate;
    type State = ProgramState;
    type Error = SnapshotError;

    fn template(&self) -> InstanceTemplate {
        InstanceTemplate(self.limits().clone())
    }

    fn make(home: &InstanceTemplate, from: &Frozen<ProgramState>) -> Result<Self, SnapshotError> {
        Ok(Instance::new(standing(from)?, home.0.clone()))
    }

    fn checkpoint(&mut self) -> Result<Frozen<ProgramState>, SnapshotError> {
        Ok(state(&Instance::checkpoint(self)?))
    }

    fn switch(&mut self, to: &Frozen<ProgramState>) -> Result<(), SnapshotError> {
        Instance::switch(self, &standing(to)?);
        Ok(())
    }

    fn relocate(&mut self, to: &Frozen<ProgramState>) -> Result<(), SnapshotError> {
        Instance::rehouse(self, &standing(to)?);
        Ok(())
    }
}
