//! An open file that a waiting call keeps, whose descriptor another thread has closed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// An open file that a waiting call keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HeldFile {
    /// The closed descriptor that the call uses it by. `poll` and `select` only wait for it.
    pub(super) number: Option<u32>,
    pub(super) description: u64,
}

pub(crate) type HeldFiles = Vec<HeldFile>;

/// Held files of threads, as a snapshot stores them.
pub(crate) type PackedHeldFiles = BTreeMap<u32, HeldFiles>;

/// The description that a resumed call uses for a descriptor.
pub(super) fn held_description(held: &[HeldFile], number: u32) -> Option<u64> {
    held.iter().find(|held| held.number == Some(number)).map(|held| held.description)
}
