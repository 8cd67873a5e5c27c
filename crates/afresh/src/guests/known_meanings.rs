//! The meanings that a session gave to names in remotes: it replaces these, and no other writer's.

use afresh_store::remote::ReplacedName;
use afresh_store::{Journal, Sha256};

use crate::{Place, Reference, ReferenceError};

/// Names in remotes, and the snapshots that a session has given them.
#[derive(Default)]
pub(crate) struct KnownMeanings(Vec<(Reference, KnownMeaning)>);

enum KnownMeaning {
    Snapshot(Sha256),
    Session(Box<Journal>),
}

impl KnownMeanings {
    /// Notes that the session was saved whole.
    pub(crate) fn saved(&mut self, to: &Reference, id: Sha256) -> Result<(), ReferenceError> {
        if matches!(to.place(), Place::Remote(_)) {
            let to = to.named()?;
            self.set(to, KnownMeaning::Snapshot(id));
        }
        Ok(())
    }

    /// Notes that the session was saved turn by turn.
    pub(crate) fn note_session(&mut self, to: Reference, journal: Journal) {
        if matches!(to.place(), Place::Remote(_)) {
            self.set(to, KnownMeaning::Session(Box::new(journal)));
        }
    }

    fn set(&mut self, to: Reference, meaning: KnownMeaning) {
        self.0.retain(|(name, _)| *name != to);
        self.0.push((to, meaning));
    }

    /// The meaning that the session gave to a name.
    pub(crate) fn replaced(&self, to: &Reference) -> Option<ReplacedName<'_>> {
        let (_, meaning) = self.0.iter().find(|(name, _)| name == to)?;
        Some(match meaning {
            KnownMeaning::Snapshot(id) => ReplacedName::Manifest(*id),
            KnownMeaning::Session(journal) => ReplacedName::Journal(journal),
        })
    }
}
