//! No keys: this build signs and seals nothing.

use afresh_pager::SnapshotOptions;
use afresh_store::{Access, FoldOptions, Journal, SaveError, Turn};

/// The keys of a save.
#[derive(Clone, Debug, Default)]
pub(super) struct SaveKeys;

impl SaveKeys {
    /// Whether there is a key to seal with.
    pub(super) fn seals(&self) -> bool {
        false
    }

    /// Whether there is any key.
    pub(super) fn is_any(&self) -> bool {
        false
    }

    /// Adds the keys to the options of a snapshot.
    pub(super) fn equip(&self, _: &mut SnapshotOptions) {}

    /// Adds the keys to the options of a fold.
    pub(super) fn equip_fold(&self, _: &mut FoldOptions) {}

    /// Appends a turn.
    pub(super) fn append(&self, journal: &mut Journal, turn: &Turn) -> Result<u64, SaveError> {
        journal.append(turn, None)
    }

    /// The demands on the new snapshot.
    pub(super) fn access(&self, opened: &Access) -> Access {
        opened.clone()
    }
}
