//! Rules of one sandbox for its connections, as clients send them, and as its record keeps them.
//!
//! Promises: rules that are decoded take memory in proportion to their length.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::unknown_fields::UnknownFields;

/// Headers for requests to a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NetworkRule {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) transform: Option<Transform>,
}

/// Changes to a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Transform {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) headers: Option<BTreeMap<String, String>>,
}

/// Rules of a sandbox for its connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NetworkRules {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) allow_out: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) deny_out: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rules: Option<BTreeMap<String, Vec<NetworkRule>>>,
    /// False denies all destinations that are not allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) internet: Option<bool>,
    #[serde(flatten)]
    pub(crate) unknown: UnknownFields,
}

impl NetworkRules {
    /// Whether there are none, in a record.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
