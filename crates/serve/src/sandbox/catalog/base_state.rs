//! The state that a sandbox began in, as its record names it.

use serde::{Deserialize, Serialize};

const TEMPLATE: &str = "template";
const BUILD: &str = "build";

/// The state that a sandbox began in. A host of another version may name one that this version does
/// not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct BaseState(String);

/// The kind of such a state.
pub(crate) enum BaseKind<'a> {
    /// A template of the configuration, by the digest of all that its guest comes from.
    Template(&'a str),
    /// A template that was built over the API, by the id of its snapshot.
    Build(&'a str),
}

impl BaseState {
    pub(crate) fn template(identity: &str) -> Self {
        Self(format!("{TEMPLATE}:{identity}"))
    }

    pub(crate) fn build(id: &str) -> Self {
        Self(format!("{BUILD}:{id}"))
    }

    /// `None` for a kind that this version does not know.
    pub(crate) fn kind(&self) -> Option<BaseKind<'_>> {
        match self.0.split_once(':')? {
            (TEMPLATE, identity) => Some(BaseKind::Template(identity)),
            (BUILD, id) => Some(BaseKind::Build(id)),
            _ => None,
        }
    }
}
