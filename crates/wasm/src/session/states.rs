//! Converts states of sessions to frozen guests and back, so that a session is saved and continues
//! elsewhere.
//!
//! Promises: the live instance is not read, so any state of a tree can be saved; a state from
//! elsewhere is checked against the module before a session can move to it.

use afresh_rewrite::WarmState;
use afresh_snapshot::Frozen as Kept;

use crate::session::{SessionState, Values, resettable};
use crate::warm::frozen::{Frozen, FrozenState};
use crate::warm::instance_state::WarmMemory;
use crate::warm::thaw;
use crate::{FreezeError, ThawError, Warm};

impl Warm {
    /// A state of sessions of this guest, to be saved. Shares the memory.
    ///
    /// # Errors
    /// [`FreezeError::State`] for a state of another guest.
    pub fn freeze_state(&self, kept: &Kept<SessionState>) -> Result<Frozen, FreezeError> {
        let inner = &*self.inner;
        let bad = |why: &str| FreezeError::State(why.to_owned());
        let state = resettable(inner).map_err(|e| FreezeError::State(e.to_string()))?;
        let values = &*kept.state.0;
        if values.guest != inner.id || kept.memories.len() != state.memories.len() {
            return Err(bad("it belongs to another guest"));
        }
        let blueprint = &state.blueprint;
        let memories = state.memories.iter().zip(kept.memories.iter().zip(&values.bytes));
        let memories = memories.map(|(warm, (image, bytes))| WarmMemory {
            shape: warm.shape,
            image: image.clone(),
            bytes: *bytes,
        });
        let sizes = values.bytes.iter().zip(&blueprint.page_log2);
        let visible = &blueprint.visible;
        let (data, elements) =
            values.dropped.split_at(visible.data.len().min(values.dropped.len()));
        let dropped = |indices: &[u32], flags: &[bool]| {
            let set = indices.iter().zip(flags).filter(|(_, dropped)| **dropped);
            set.map(|(index, _)| *index).collect()
        };
        let warm = WarmState {
            memories: sizes.map(|(bytes, log2)| (bytes >> log2) as u64).collect(),
            globals: visible.globals.iter().copied().zip(values.globals.iter().copied()).collect(),
            tables: visible.tables.iter().copied().zip(values.tables.iter().cloned()).collect(),
            dropped_data: dropped(&visible.data, data),
            dropped_elements: dropped(&visible.elements, elements),
        };
        let read = blueprint.stores.clock.latest();
        let (program, files) = (self.inner.program.clone(), values.files.as_ref());
        FrozenState::join(program, memories.collect(), warm, read, None, files)
    }

    /// A state of this guest that was frozen elsewhere, for a tree of its sessions. The guest's
    /// clock does not fall behind its reading in that state.
    ///
    /// # Errors
    /// [`ThawError`] for the state of another module, or one that does not fit it.
    pub fn thaw_state(&self, frozen: &Frozen) -> Result<Kept<SessionState>, ThawError> {
        let inner = &*self.inner;
        let state = resettable(inner).map_err(|e| ThawError::State(e.to_string()))?;
        if frozen.program.digest != inner.program.digest || frozen.is_component() {
            return Err(ThawError::Program);
        }
        let blueprint = &state.blueprint;
        let shapes = state.memories.iter().map(|memory| memory.shape);
        thaw::check_state(&blueprint.visible, shapes, &blueprint.page_log2, frozen)?;
        frozen.check_limit(blueprint.stores.memory_limit)?;
        let files = match (&frozen.files, blueprint.stores.kept_files()) {
            (None, None) => None,
            (Some(saved), Some(here)) => {
                let restored = saved.restore(here.tree.budget(), Some(&here.tree));
                Some(restored.map_err(ThawError::State)?)
            }
            _ => return Err(ThawError::State("only one of both has a file tree".to_owned())),
        };
        blueprint.stores.clock.reach(frozen.read);
        let bytes = frozen.memories.iter().map(|memory| memory.bytes).collect();
        let values = Values::of(inner.id, bytes, &frozen.state, &blueprint.visible, files);
        let memories = frozen.memories.iter().map(|memory| memory.image.clone()).collect();
        Ok(Kept { memories, state: SessionState(std::sync::Arc::new(values)) })
    }
}
