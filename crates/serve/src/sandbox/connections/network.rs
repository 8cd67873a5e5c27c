//! The filter of one sandbox for its connections, by its rules. It narrows the `net` of its
//! template.
//!
//! Promises: a sandbox reaches only servers of its template's `net`. Rules outlive a pause, and
//! forks have them too. Each entry of `allowOut` and of `rules` has a grant of the template, or the
//! request is refused.

use std::sync::{Arc, Mutex, MutexGuard};

#[cfg(linux_guests)]
use afresh::linux::{EgressFilter, SharedFilter};

#[cfg(linux_guests)]
use crate::sandbox::connections::network_policy::ALL_TRAFFIC;
use crate::sandbox::request_body::network_rules::NetworkRules;

use crate::lock::lock;

#[derive(Debug, Default)]
struct NetworkState {
    rules: Arc<NetworkRules>,
    /// Those that the record of the sandbox has.
    written: Arc<NetworkRules>,
    #[cfg(linux_guests)]
    filter: SharedFilter,
}

/// The present rules of a sandbox. Its client can replace them.
#[derive(Debug, Default)]
pub(crate) struct SandboxNetwork(Mutex<NetworkState>);

impl SandboxNetwork {
    pub(crate) fn new(rules: NetworkRules) -> Self {
        let (this, rules) = (Self::default(), Arc::new(rules));
        this.replace(rules.clone());
        this.note_written(rules);
        this
    }

    fn state(&self) -> MutexGuard<'_, NetworkState> {
        lock(&self.0)
    }

    /// The present rules.
    pub(crate) fn rules(&self) -> Arc<NetworkRules> {
        self.state().rules.clone()
    }

    /// Replaces the rules. Those that cannot be read, as of a damaged record, deny everything.
    pub(crate) fn replace(&self, rules: Arc<NetworkRules>) {
        self.state().replace(rules);
    }

    /// Notes that the record has these rules.
    pub(crate) fn note_written(&self, rules: Arc<NetworkRules>) {
        self.state().written = rules;
    }

    /// Returns to the rules of the record, unless others have replaced `rules` since.
    pub(crate) fn undo(&self, rules: &Arc<NetworkRules>) {
        let mut state = self.state();
        if Arc::ptr_eq(&state.rules, rules) {
            let written = state.written.clone();
            state.replace(written);
        }
    }

    /// Runs the sandbox with these rules, and with others once they are replaced.
    #[cfg(linux_guests)]
    pub(crate) fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        let filter = self.state().filter.clone();
        filter.within(run)
    }
}

impl NetworkState {
    fn replace(&mut self, rules: Arc<NetworkRules>) {
        #[cfg(linux_guests)]
        if self.rules != rules {
            self.filter.replace(rules.filter().unwrap_or_else(|error| {
                tracing::error!(error, "rules of a sandbox are invalid: it reaches no server");
                EgressFilter::new([], [ALL_TRAFFIC]).ok()
            }));
        }
        self.rules = rules;
    }
}

#[cfg(all(test, linux_guests))]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::sandbox::Template;

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
