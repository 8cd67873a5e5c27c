//! Checks of network rules against the grants of a template, and the filter that they give.
//!
//! Promises: each entry of `allowOut` and of `rules` has a grant of the template, or the request is
//! refused.

#[cfg(linux_guests)]
use std::collections::BTreeMap;

#[cfg(linux_guests)]
use afresh::linux::EgressFilter;
use hyper::StatusCode;
use serde_json::{Value, json};

use crate::error_response::ErrorResponse;
use crate::sandbox::config::Template;
use crate::sandbox::records::record::SandboxSettings;
use crate::sandbox::request_body::network_rules::NetworkRules;
use crate::sandbox::tenants::entry_size::check_label_bytes;

/// Destinations that stand for all of them.
pub(crate) const ALL_TRAFFIC: &str = "0.0.0.0/0";

impl NetworkRules {
    /// Their fields in the description of a sandbox.
    pub(crate) fn described(&self, settings: &SandboxSettings) -> Value {
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

    /// Whether some server of the template can be reached.
    pub(crate) fn has_internet(&self, template: &Template) -> bool {
        let denied = self.deny_out.iter().flatten().any(|entry| entry == ALL_TRAFFIC);
        #[cfg(linux_guests)]
        let granted = !template.net.is_empty();
        #[cfg(not(linux_guests))]
        let granted = {
            let _ = template;
            false
        };
        granted && self.internet != Some(false) && !denied
    }
}

#[cfg(linux_guests)]
impl NetworkRules {
    /// The filter of a sandbox with these rules; none without rules.
    pub(crate) fn filter(&self) -> Result<Option<EgressFilter>, String> {
        let lists = self.allow_out.iter().chain(&self.deny_out);
        let is_empty =
            lists.map(Vec::len).chain(self.rules.iter().map(BTreeMap::len)).sum::<usize>() == 0;
        if is_empty && self.internet != Some(false) {
            return Ok(None);
        }
        let allowed = self.allow_out.iter().flatten().map(String::as_str);
        let offline = (self.internet == Some(false)).then_some(ALL_TRAFFIC);
        let denied = self.deny_out.iter().flatten().map(String::as_str).chain(offline);
        let filter = EgressFilter::new(allowed, denied);
        let mut filter = filter.map_err(|error| format!("`network`: {error}"))?;
        for (host, rules) in self.rules.iter().flatten() {
            let transforms = rules.iter().filter_map(|rule| rule.transform.as_ref());
            let headers = transforms.flat_map(|transform| transform.headers.iter().flatten());
            let headers = headers.map(|(name, value)| (name.as_str(), value.as_str()));
            if let Some((name, _)) = headers.clone().find(|(_, value)| value.contains("${e2b.")) {
                return Err(format!(
                    "`network.rules`: the header `{name}` for `{host}` has a placeholder of `iam`, which this \
                     server does not have; send its value"
                ));
            }
            let added = filter.with_headers(host, headers);
            filter = added.map_err(|error| format!("`network.rules`: {error}"))?;
        }
        Ok(Some(filter))
    }

    /// Checks rules that a client sends for a sandbox of `template`.
    pub(crate) fn check(&self, template: &Template) -> Result<(), String> {
        let Some(filter) = self.filter()? else { return Ok(()) };
        filter.check(&template.net).map_err(|error| {
            let name = &template.name;
            format!("`network`: {error}: the `net` of the template `{name}` has the grants")
        })
    }
}

#[cfg(not(linux_guests))]
impl NetworkRules {
    /// Checks rules that a client sends: without Linux programs nothing outside is reached.
    fn check(&self, _: &Template) -> Result<(), String> {
        let allowed = self.allow_out.iter().flatten().find(|entry| *entry != ALL_TRAFFIC);
        match allowed.or_else(|| self.rules.iter().flatten().map(|(host, _)| host).next()) {
            Some(entry) => Err(format!("`network`: `{entry}` is not granted to this guest")),
            None => Ok(()),
        }
    }
}

impl NetworkRules {
    /// Checks rules that a client sends for a sandbox of `template`, and that they are short. Their
    /// length is that in a record, since empty lists and rules take memory too.
    pub(crate) fn accept(&self, template: &Template) -> Result<(), ErrorResponse> {
        // Texts and a flag.
        check_label_bytes(serde_json::to_vec(self).map_or(usize::MAX, |json| json.len()))?;
        self.check(template).map_err(|why| ErrorResponse::new(StatusCode::BAD_REQUEST, why))
    }
}
