//! The parts of a state that version 19 of snapshots added.
//!
//! Promises: a state without them, of an older version, has their defaults. May break it: a field
//! that is added after the golden of version 19 was written.

use serde::{Deserialize, Serialize};

use crate::sentry::kernel::state::Kernel;

/// The part of a state that version 19 of snapshots added.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PackedExtensions {}

impl Kernel {
    pub(crate) fn pack_extensions(&self) -> PackedExtensions {
        PackedExtensions {}
    }

    /// Takes the parts into a state that has everything else.
    ///
    /// # Errors
    /// The reason why they do not fit the state.
    pub(crate) fn unpack_extensions(
        &mut self,
        extensions: PackedExtensions,
    ) -> Result<(), &'static str> {
        let PackedExtensions {} = extensions;
        Ok(())
    }
}
