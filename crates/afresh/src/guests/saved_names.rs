//! Names that a session was saved under, and their targets.
//!
//! Promises: a turn of a session replaces the snapshot that the session came from and its own
//! saves, and no other writer's.

use afresh_store::{Journal, ReplacedName, Sha256};

use crate::{Place, Reference, ReferenceError};

/// Names, and the targets that a session has given them.
#[derive(Default)]
pub(crate) struct SavedNames(Vec<(Reference, SavedTarget)>);

enum SavedTarget {
    Snapshot(Sha256),
    Session(Box<Journal>),
}

impl SavedNames {
    /// Notes that the session was saved whole.
    pub(crate) fn note_save(&mut self, to: &Reference, id: Sha256) -> Result<(), ReferenceError> {
        // A file has one snapshot, and no turns.
        if !matches!(to.place(), Place::File(_)) {
            self.set(to.named()?, SavedTarget::Snapshot(id));
        }
        Ok(())
    }

    /// Notes that the session was saved turn by turn.
    pub(crate) fn note_session(&mut self, to: Reference, journal: Journal) {
        self.set(to, SavedTarget::Session(Box::new(journal)));
    }

    fn set(&mut self, to: Reference, target: SavedTarget) {
        self.0.retain(|(name, _)| *name != to);
        self.0.push((to, target));
    }

    /// Whether the session gave a name its target.
    pub(crate) fn has(&self, to: &Reference) -> bool {
        self.target(to).is_some()
    }

    /// The target of a name, for a save that replaces it.
    pub(crate) fn target(&self, to: &Reference) -> Option<ReplacedName<'_>> {
        let (_, target) = self.0.iter().find(|(name, _)| name == to)?;
        Some(match target {
            SavedTarget::Snapshot(id) => ReplacedName::Manifest(*id),
            SavedTarget::Session(journal) => ReplacedName::Journal(journal),
        })
    }
}
