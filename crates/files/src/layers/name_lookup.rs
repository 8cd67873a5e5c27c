//! The result of a lookup of one name in a directory of a layer.

use crate::nodes::node::{Kind, Node};

/// The result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "a host directory makes them"))]
pub(crate) enum NameLookup {
    /// The target of the name, if it exists.
    Known(Option<(Node, Kind)>),
    /// The list of the directory has the answer.
    Listed,
}
