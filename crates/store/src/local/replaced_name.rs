//! The target of a name that a save replaces.

use crate::local::naming::ExpectedName;
use crate::turn::Journal;
use crate::{Sha256, Snapshot};

/// The target of a name that a save replaces. The save is refused if the name has another one.
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
    pub(crate) fn expected(self) -> ExpectedName {
        match self {
            Self::Any => ExpectedName::Any,
            Self::Manifest(id) => ExpectedName::Manifest(Some(id)),
            Self::Snapshot(snapshot) => match snapshot.turns() {
                Some(turns) => ExpectedName::Session(snapshot.id(), turns.bytes),
                None => ExpectedName::Manifest(Some(snapshot.id())),
            },
            Self::Journal(journal) => ExpectedName::Session(journal.base(), journal.size()),
        }
    }
}

/// The target that a name must have when a snapshot gets it; any by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NameCondition(pub(crate) ExpectedName);

impl From<ReplacedName<'_>> for NameCondition {
    fn from(replaced: ReplacedName<'_>) -> Self {
        Self(replaced.expected())
    }
}
