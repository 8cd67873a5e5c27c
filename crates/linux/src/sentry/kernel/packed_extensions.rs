//! The parts of a state that version 19 of snapshots added.
//!
//! Promises: a state without them, of an older version, has their defaults. May break it: a field
//! that is added after the golden of version 19 was written.

use afresh_files::Node;
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::layout::traits::PackedTraits;

/// The part of a state that version 19 of snapshots added.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PackedExtensions {
    /// Rules of mappings, by the owner of the memory.
    traits: Vec<(u32, PackedTraits)>,
    /// Segments of shared memory that are locked.
    locked_segments: Vec<u32>,
    /// Lists of mappings that were opened, and their memories.
    map_files: Vec<(Node, u32)>,
}

impl Kernel {
    pub(crate) fn pack_extensions(&self) -> PackedExtensions {
        let traits = self.memories().into_iter();
        let traits = traits.map(|(id, layout)| (id, layout.packed_traits()));
        let map_files = self.map_files.iter().filter(|(node, _)| self.tree.stat(**node).is_ok());
        PackedExtensions {
            traits: traits.filter(|(_, packed)| !packed.is_empty()).collect(),
            locked_segments: self.system_v.packed_locks(),
            map_files: map_files.map(|(node, memory)| (*node, *memory)).collect(),
        }
    }

    /// Takes the parts into a state that has everything else.
    ///
    /// # Errors
    /// The reason why they do not fit the state.
    pub(crate) fn unpack_extensions(
        &mut self,
        extensions: PackedExtensions,
    ) -> Result<(), &'static str> {
        let PackedExtensions { traits, locked_segments, map_files } = extensions;
        if !self.system_v.unpack_locks(&locked_segments) {
            return Err("a segment of shared memory is locked that does not exist");
        }
        if map_files.iter().any(|(node, _)| self.tree.stat(*node).is_err()) {
            return Err("a list of mappings is no file");
        }
        self.map_files = map_files.into_iter().collect();
        for (memory, packed) in traits {
            if !self.layout_of_mut(memory).is_some_and(|layout| layout.unpack_traits(packed)) {
                return Err("a mapping has rules that it cannot have");
            }
        }
        Ok(())
    }
}
