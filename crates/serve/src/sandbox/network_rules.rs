//! Rules of one sandbox for its connections, as clients send them, and as its record keeps them.
//!
//! Promises: rules that are decoded take memory in proportion to their length.

use std::collections::BTreeMap;

use hyper::StatusCode;
use hyper::header::HeaderValue;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::record::SandboxSettings;
use crate::error_response::ErrorResponse;

/// Maximum bytes of a `Host` that a sandbox has for its programs.
const MAX_HOST: usize = 255;

/// Headers for requests to a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NetworkRule {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) transform: Option<Transform>,
}

/// Changes to a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Transform {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) headers: Option<BTreeMap<String, String>>,
}

/// Rules of a sandbox for its connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NetworkRules {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) allow_out: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) deny_out: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rules: Option<BTreeMap<String, Vec<NetworkRule>>>,
    /// False denies all destinations that are not allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) internet: Option<bool>,
}

impl NetworkRules {
    /// Whether there are none, in a record.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Their fields in the description of a sandbox.
    pub(super) fn described(&self, settings: &SandboxSettings) -> Value {
        let mut fields = json!({ "allowPublicTraffic": settings.public });
        if let Some(host) = &settings.host {
            fields["maskRequestHost"] = json!(host);
        }
        let lists = [("allowOut", &self.allow_out), ("denyOut", &self.deny_out)];
        for (name, list) in lists.into_iter().filter(|(_, list)| list.is_some()) {
            fields[name] = json!(list);
        }
        if let Some(rules) = &self.rules {
            fields["rules"] = json!(rules);
        }
        fields
    }
}

/// The `Host` of requests to a port.
pub(super) fn host_of(host: &str, port: u16) -> Option<HeaderValue> {
    HeaderValue::from_str(&host.replace("${PORT}", &port.to_string())).ok()
}

/// Refuses a `Host` that a header cannot have.
pub(super) fn check_host(host: Option<&str>) -> Result<(), ErrorResponse> {
    let Some(host) = host else { return Ok(()) };
    let fits = host_of(host, 0).is_some_and(|host| !host.is_empty() && host.len() <= MAX_HOST);
    if fits && !host.contains(char::is_whitespace) {
        return Ok(());
    }
    let message = format!("`network.maskRequestHost` is a host name of at most {MAX_HOST} bytes");
    Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_host_has_the_port_and_fits_into_a_header() {
        assert_eq!(host_of("a.example:${PORT}", 8000).unwrap(), "a.example:8000");
        assert!(check_host(None).is_ok() && check_host(Some("a.example")).is_ok());
        for wrong in ["", "a b", "a\nb", &"a".repeat(MAX_HOST + 1)] {
            assert!(check_host(Some(wrong)).is_err(), "{wrong:?}");
        }
    }
}
