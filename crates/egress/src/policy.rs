//! All grants of a guest, and which of them a connection has.
//!
//! Promises: a name and port with a rule is reached through its rules alone, whatever else is
//! granted. Only granted names are known.

use std::sync::Arc;

use crate::destination::{Destination, DestinationQuery, Server};
use crate::filter::EgressFilter;
use crate::log::ConnectionLog;
use crate::proxy::ProxiedServer;
use crate::rule::{NetGrant, Rule};

/// The way of a granted connection.
#[derive(Clone, Debug)]
pub enum Route {
    /// To the server, as it is.
    Direct(Server),
    /// Through the proxy, which checks each request.
    Proxied(ProxiedServer),
}

/// The grants of a guest. Clones are cheap.
#[derive(Clone, Debug, Default)]
pub struct EgressPolicy {
    destinations: Arc<[Destination]>,
    rules: Arc<[Rule]>,
    /// Where connections are logged, unless their caller has another log.
    log: Option<ConnectionLog>,
}

impl FromIterator<NetGrant> for EgressPolicy {
    fn from_iter<T: IntoIterator<Item = NetGrant>>(grants: T) -> Self {
        let (mut destinations, mut rules) = (Vec::new(), Vec::new());
        for grant in grants {
            match grant {
                NetGrant::Destination(destination) => destinations.push(destination),
                NetGrant::Rule(rule) => rules.push(rule),
            }
        }
        Self { destinations: destinations.into(), rules: rules.into(), log: None }
    }
}

impl EgressPolicy {
    /// The same with a log.
    #[must_use]
    pub fn with_log(self, log: Option<ConnectionLog>) -> Self {
        Self { log, ..self }
    }

    /// Where connections are logged, unless their caller has another log.
    #[must_use]
    pub fn log(&self) -> Option<&ConnectionLog> {
        self.log.as_ref()
    }

    /// Whether a name is granted, at any port.
    #[must_use]
    pub fn knows(&self, name: &str) -> bool {
        let rules = self.rules.iter().map(Rule::to);
        self.destinations.iter().chain(rules).any(|one| one.is_meant(DestinationQuery::Name(name)))
    }

    /// The way of a connection, if it is granted.
    #[must_use]
    pub fn route(&self, asked: DestinationQuery<'_>, port: u16) -> Option<Route> {
        if let DestinationQuery::Name(name) = asked {
            let mut rules = self.rules.iter().filter(|rule| rule.to().covers(asked, port)).cloned();
            if let Some(first) = rules.next() {
                let others = rules.filter(|rule| rule.shares_connection(&first, name, port));
                let others: Vec<Rule> = others.collect();
                return Some(Route::Proxied(ProxiedServer::new(name, port, first, others)));
            }
        }
        let found = self.destinations.iter().find(|one| one.covers(asked, port))?;
        Some(Route::Direct(found.server(asked, port)))
    }

    /// The way of a connection that a filter admits, if it is granted.
    #[must_use]
    pub fn filtered_route(
        &self,
        asked: DestinationQuery<'_>,
        port: u16,
        filter: &EgressFilter,
    ) -> Option<Route> {
        let admits = match asked {
            DestinationQuery::Name(name) => filter.admits_name(name),
            DestinationQuery::Address(address) => filter.admits_address(address),
        };
        let route = self.route(asked, port).filter(|_| admits)?;
        Some(match (route, asked) {
            (Route::Proxied(server), _) => Route::Proxied(server.filtered(filter.clone())),
            (Route::Direct(server), DestinationQuery::Name(name))
                if filter.leaves_to_addresses(name) =>
            {
                Route::Direct(server.filtered(filter.clone()))
            }
            (route, _) => route,
        })
    }

    /// The certificates of the authorities that its guest has to trust, as PEM; empty without a
    /// rule that needs one.
    #[must_use]
    pub fn certificates(&self) -> String {
        self.rules.iter().filter_map(Rule::authority).map(|one| one.certificate_pem()).collect()
    }

    /// Environment variables for the guest, each with a placeholder for a secret.
    pub fn placeholders(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().filter_map(Rule::placeholder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_comes_before_grants_of_the_same_connection() {
        let grants = [
            "*.example.org:*",
            "api.example.org:443",
            r#"{"to": "api.example.org:443", "methods": ["GET"]}"#,
            "192.0.2.1:443",
        ];
        let policy: EgressPolicy =
            grants.iter().map(|text| text.parse::<NetGrant>().unwrap()).collect();
        let is_proxied = |name, port| match policy.route(DestinationQuery::Name(name), port) {
            Some(Route::Proxied(_)) => Some(true),
            Some(Route::Direct(_)) => Some(false),
            None => None,
        };
        assert_eq!(is_proxied("api.example.org", 443), Some(true));
        assert_eq!(is_proxied("api.example.org", 80), Some(false));
        // A state that a stranger made may have such a name.
        assert_eq!(is_proxied("API.Example.org", 443), Some(true));
        assert_eq!(is_proxied("WWW.example.ORG", 443), Some(false));
        assert_eq!(is_proxied("www.example.org", 443), Some(false));
        assert_eq!(is_proxied("example.net", 443), None);
        let address = DestinationQuery::Address("192.0.2.1".parse().unwrap());
        assert!(matches!(policy.route(address, 443), Some(Route::Direct(_))));
        assert!(policy.route(address, 80).is_none());
        assert!(policy.knows("api.example.org") && !policy.knows("example.net"));
        assert_eq!(policy.certificates().matches("BEGIN CERTIFICATE").count(), 1);
        assert!(EgressPolicy::default().certificates().is_empty());
    }
}
