//! Names that a session was saved under, and their meanings.
//!
//! Promises: a turn of a session replaces the snapshot that the session came from and its own
//! saves, and no other writer's.

use afresh_store::{Journal, ReplacedName, Sha256};

use crate::{Place, Reference, ReferenceError};

/// Names, and the meanings that a session has given them.
#[derive(Default)]
pub(crate) struct KnownMeanings(Vec<(Reference, KnownMeaning)>);

enum KnownMeaning {
    Snapshot(Sha256),
    Session(Box<Journal>),
}

impl KnownMeanings {
    /// Notes that the session was saved whole.
    pub(crate) fn note_save(&mut self, to: &Reference, id: Sha256) -> Result<(), ReferenceError> {
        // A file has one snapshot, and no turns.
        if !matches!(to.place(), Place::File(_)) {
            self.set(to.named()?, KnownMeaning::Snapshot(id));
        }
        Ok(())
    }

    /// Notes that the session was saved turn by turn.
    pub(crate) fn note_session(&mut self, to: Reference, journal: Journal) {
        self.set(to, KnownMeaning::Session(Box::new(journal)));
    }

    fn set(&mut self, to: Reference, meaning: KnownMeaning) {
        self.0.retain(|(name, _)| *name != to);
        self.0.push((to, meaning));
    }

    /// Whether the session gave a meaning to a name.
    pub(crate) fn has(&self, to: &Reference) -> bool {
        self.meaning(to).is_some()
    }

    /// The meaning of a name, for a save that replaces it.
    pub(crate) fn meaning(&self, to: &Reference) -> Option<ReplacedName<'_>> {
        let (_, meaning) = self.0.iter().find(|(name, _)| name == to)?;
        Some(match meaning {
            KnownMeaning::Snapshot(id) => ReplacedName::Manifest(*id),
            KnownMeaning::Session(journal) => ReplacedName::Journal(journal),
        })
    }
}
