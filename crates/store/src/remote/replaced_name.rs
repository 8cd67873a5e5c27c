//! The meaning of a name in a remote that a session replaces.

use crate::local::naming::Expected;
use crate::turn::Journal;
use crate::{Sha256, Snapshot};

/// The meaning of a name that a session replaces when it is saved whole.
#[derive(Clone, Copy, Debug)]
pub enum ReplacedName<'a> {
    /// Any, or none.
    Any,
    /// The manifest with this id, without turns.
    Manifest(Sha256),
    /// This snapshot, with no turns after those that it was opened with.
    Snapshot(&'a Snapshot),
    /// The session of this journal, with no turns of other writers.
    Journal(&'a Journal),
}

impl ReplacedName<'_> {
    pub(super) fn expected(self) -> Expected {
        match self {
            Self::Any => Expected::Any,
            Self::Manifest(id) => Expected::Manifest(Some(id)),
            Self::Snapshot(snapshot) => match snapshot.turns() {
                Some(turns) => Expected::Session(snapshot.id(), turns.bytes),
                None => Expected::Manifest(Some(snapshot.id())),
            },
            Self::Journal(journal) => Expected::Session(journal.base(), journal.size()),
        }
    }
}
