//! The filter of one sandbox for its connections, by its rules. It narrows the `net` of its
//! template.
//!
//! Promises: a sandbox reaches only servers of its template's `net`. Rules outlive a pause, and
//! forks have them too. Each entry of `allowOut` and of `rules` has a grant of the template, or the
//! request is refused.

#[cfg(feature = "linux")]
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(feature = "linux")]
use afresh::linux::{EgressFilter, SharedFilter};
use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::StatusCode;

use super::config::Template;
use super::control::refuse_unsupported;
use super::entry_size::check_label_bytes;
use super::network_rules::NetworkRules;
use super::record::SandboxSettings;
use super::registry::{Sandboxes, to_its_end};
use super::requests::NetworkUpdate;
use super::routes::{Answer, TenantSandbox, json};
use super::sandbox::Sandbox;
use crate::error_response::ErrorResponse;

/// Destinations that stand for all of them.
const ALL_TRAFFIC: &str = "0.0.0.0/0";

impl NetworkRules {
    /// Whether some server of the template can be reached.
    pub(super) fn has_internet(&self, template: &Template) -> bool {
        let denied = self.deny_out.iter().flatten().any(|entry| entry == ALL_TRAFFIC);
        #[cfg(feature = "linux")]
        let granted = !template.net.is_empty();
        #[cfg(not(feature = "linux"))]
        let granted = {
            let _ = template;
            false
        };
        granted && self.internet != Some(false) && !denied
    }
}

#[cfg(feature = "linux")]
impl NetworkRules {
    /// The filter of a sandbox with these rules; none without rules.
    fn filter(&self) -> Result<Option<EgressFilter>, String> {
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
    fn check(&self, template: &Template) -> Result<(), String> {
        let Some(filter) = self.filter()? else { return Ok(()) };
        filter.check(&template.net).map_err(|error| {
            let name = &template.name;
            format!("`network`: {error}: the `net` of the template `{name}` has the grants")
        })
    }
}

#[cfg(not(feature = "linux"))]
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
    pub(super) fn accept(&self, template: &Template) -> Result<(), ErrorResponse> {
        // Texts and a flag.
        check_label_bytes(serde_json::to_vec(self).map_or(usize::MAX, |json| json.len()))?;
        self.check(template).map_err(|why| ErrorResponse::new(StatusCode::BAD_REQUEST, why))
    }
}

#[derive(Debug, Default)]
struct NetworkState {
    rules: Arc<NetworkRules>,
    /// Those that the record of the sandbox has.
    written: Arc<NetworkRules>,
    #[cfg(feature = "linux")]
    filter: SharedFilter,
}

/// The present rules of a sandbox. Its client can replace them.
#[derive(Debug, Default)]
pub(super) struct SandboxNetwork(Mutex<NetworkState>);

impl SandboxNetwork {
    pub(super) fn new(rules: NetworkRules) -> Self {
        let (this, rules) = (Self::default(), Arc::new(rules));
        this.replace(rules.clone());
        this.note_written(rules);
        this
    }

    fn state(&self) -> MutexGuard<'_, NetworkState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The present rules.
    pub(super) fn rules(&self) -> Arc<NetworkRules> {
        self.state().rules.clone()
    }

    /// Replaces the rules. Those that cannot be read, as of a damaged record, deny everything.
    fn replace(&self, rules: Arc<NetworkRules>) {
        self.state().replace(rules);
    }

    /// Notes that the record has these rules.
    fn note_written(&self, rules: Arc<NetworkRules>) {
        self.state().written = rules;
    }

    /// Returns to the rules of the record, unless others have replaced `rules` since.
    fn undo(&self, rules: &Arc<NetworkRules>) {
        let mut state = self.state();
        if Arc::ptr_eq(&state.rules, rules) {
            let written = state.written.clone();
            state.replace(written);
        }
    }

    /// Runs the sandbox with these rules, and with others once they are replaced.
    #[cfg(feature = "linux")]
    pub(super) fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        let filter = self.state().filter.clone();
        filter.within(run)
    }
}

impl NetworkState {
    fn replace(&mut self, rules: Arc<NetworkRules>) {
        #[cfg(feature = "linux")]
        if self.rules != rules {
            self.filter.replace(rules.filter().unwrap_or_else(|error| {
                tracing::error!(error, "rules of a sandbox are invalid: it reaches no server");
                EgressFilter::new([], [ALL_TRAFFIC]).ok()
            }));
        }
        self.rules = rules;
    }
}

/// Replaces the rules of a sandbox. A field without a value is cleared.
pub(super) async fn update(chosen: TenantSandbox, body: Bytes) -> Answer {
    let update: NetworkUpdate = json(&body)?;
    refuse_unsupported(update.unsupported())?;
    let (all, sandbox) = chosen.sandbox()?;
    let rules = update.rules();
    rules.accept(&all.template(&sandbox.template).config)?;
    SandboxSettings { network: rules.clone(), ..sandbox.settings.clone() }.check_size()?;
    all.set_network(&sandbox, rules).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

impl Sandboxes {
    /// Replaces the rules of a sandbox. Its record has them before the client is answered. Where
    /// the record cannot be written, the rules before return.
    async fn set_network(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        rules: NetworkRules,
    ) -> Result<(), ErrorResponse> {
        let (this, sandbox, rules) = (self.clone(), sandbox.clone(), Arc::new(rules));
        // Also where the client leaves meanwhile.
        to_its_end(async move {
            sandbox.network.replace(rules.clone());
            match this.note(&sandbox, |_| sandbox.network.rules()).await {
                Ok(written) => sandbox.network.note_written(written),
                Err(error) => {
                    sandbox.network.undo(&rules);
                    return Err(error);
                }
            }
            Ok(())
        })
        .await
    }
}

#[cfg(all(test, feature = "linux"))]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn template(net: &[&str]) -> Template {
        let mut template = Template::new("base", "python3", afresh::Options::new());
        template.net = net.iter().map(|text| text.parse().unwrap()).collect();
        template
    }

    fn rules(value: Value) -> NetworkRules {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn rules_need_a_grant_of_the_template() {
        let net = ["pypi.org:443", r#"{"to": "api.test:443", "methods": ["GET"]}"#];
        let template = template(&net);
        for good in [
            json!({}),
            json!({"allowOut": [], "denyOut": ["0.0.0.0/0"]}),
            json!({"allowOut": ["pypi.org", "*.org"], "denyOut": ["0.0.0.0/0", "10.0.0.0/8"]}),
            json!({"rules": {"api.test": [{"transform": {"headers": {"X-A": "1"}}}, {}]}}),
            json!({"internet": false}),
        ] {
            rules(good).accept(&template).unwrap();
        }
        for (bad, part) in [
            (json!({"allowOut": ["example.org"]}), "`example.org` is not granted to this guest"),
            (json!({"denyOut": ["pypi.org"]}), "`pypi.org` cannot be denied"),
            (json!({"rules": {"pypi.org": [{}]}}), "`pypi.org` need a rule"),
            (json!({"rules": {"api.test": [{"transform": {"headers": {"Host": "a"}}}]}}), "Host"),
            (
                json!({"rules": {"api.test": [{"transform": {"headers": {"X": "${e2b.identity.a}"}}}]}}),
                "`iam`",
            ),
            (json!({"allowOut": ["a".repeat(20_000)]}), "16384"),
            (json!({"rules": {"api.test": vec![json!({}); 6_000]}}), "16384"),
            (json!({"denyOut": vec![""; 6_000]}), "16384"),
        ] {
            let error = rules(bad.clone()).accept(&template).unwrap_err().message;
            assert!(error.contains(part), "{bad}: {error}");
        }
    }

    #[test]
    fn invalid_rules_of_a_record_deny_everything() {
        let network = SandboxNetwork::new(rules(json!({"denyOut": ["nonsense"]})));
        network.within(|| assert!(!EgressFilter::present().unwrap().admits_name("api.test")));
        network.replace(Arc::default());
        network.within(|| {
            assert_eq!(EgressFilter::present(), None);
            // New rules are those of a call that runs.
            network.replace(Arc::new(rules(json!({"internet": false}))));
            assert!(!EgressFilter::present().unwrap().admits_name("api.test"));
        });
    }

    #[test]
    fn rules_without_a_record_are_undone_unless_others_replaced_them() {
        let all = |text: &str| Arc::new(rules(json!({"denyOut": [text]})));
        let (first, failed, later) = (all("10.0.0.1"), all("10.0.0.2"), all("10.0.0.3"));
        let network = SandboxNetwork::new((*first).clone());
        network.replace(failed.clone());
        network.undo(&failed);
        assert_eq!(network.rules(), first);
        network.replace(failed.clone());
        network.replace(later.clone());
        network.undo(&failed);
        assert_eq!(network.rules(), later);
        // The record had neither.
        network.undo(&later);
        assert_eq!(network.rules(), first);
    }
}
