//! Which guest answers for which host and path.
//!
//! Promises: the longest route wins, and a route for the request's host wins over one for any. A
//! table is never changed: guests are exchanged by another table, and requests that are under way
//! end with theirs.

use std::sync::Arc;

use crate::budget::Budget;
use crate::concurrency::ConcurrencyLimiter;
use crate::config::{Config, GuestConfig};
use crate::error::ServeError;
use crate::metrics::Metrics;
use crate::route::Route;

/// The guests of a server.
pub(crate) struct RoutingTable {
    /// In order of matching.
    pub(crate) sites: Vec<Arc<Route>>,
    pub(crate) gate: Arc<ConcurrencyLimiter>,
}

/// Whether a path is below a route, by whole segments.
pub(crate) fn below(path: &str, route: &str) -> bool {
    let route = route.strip_suffix('/').unwrap_or(route);
    let rest = path.strip_prefix(route);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// A host without its port.
pub(crate) fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    }
}

fn check(guests: &[GuestConfig]) -> Result<(), ServeError> {
    for (place, guest) in guests.iter().enumerate() {
        if !guest.route.starts_with('/') || guest.route.contains(['?', '#']) {
            return Err(ServeError::Route { route: guest.route.clone() });
        }
        let same = |other: &&GuestConfig| {
            let of = |guest: &GuestConfig| guest.route.trim_end_matches('/').to_owned();
            of(other) == of(guest) && other.host == guest.host || other.name == guest.name
        };
        if let Some(other) = guests[..place].iter().find(same) {
            let (first, second) = (other.reference.clone(), guest.reference.clone());
            return Err(ServeError::Twice { first, second });
        }
    }
    Ok(())
}

impl RoutingTable {
    /// Opens every guest.
    pub(crate) async fn open(
        config: &Config,
        budget: &Budget,
        metrics: &Metrics,
    ) -> Result<Self, ServeError> {
        check(&config.guests)?;
        let mut guests: Vec<_> = config.guests.iter().collect();
        guests.sort_by_key(|guest| (guest.host.is_none(), std::cmp::Reverse(guest.route.len())));
        let gate = ConcurrencyLimiter::new(
            config.max_concurrent_requests,
            guests.iter().map(|guest| Route::share(guest)),
        );
        let mut sites = Vec::with_capacity(guests.len());
        let several = guests.len() > 1;
        for (line, guest) in guests.into_iter().enumerate() {
            // The only guest has nothing to leave to others.
            let own = if several { budget.part(1) } else { budget.clone() };
            let site = Route::open(guest, line, own, config.body_timeout, metrics).await;
            sites.push(Arc::new(
                site.map_err(|source| ServeError::Guest { name: guest.name.clone(), source })?,
            ));
        }
        Ok(Self { sites, gate })
    }

    /// The guest that answers.
    pub(crate) fn find(&self, host: Option<&str>, path: &str) -> Option<&Arc<Route>> {
        let host = host.map(without_port);
        self.sites.iter().find(|site| {
            let config = &site.config;
            let ours = config.host.as_deref();
            ours.is_none_or(|ours| host.is_some_and(|host| host.eq_ignore_ascii_case(ours)))
                && below(path, &config.route)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_means_whole_segments() {
        for (path, route, within) in [
            ("/", "/", true),
            ("/anything", "/", true),
            ("/js", "/js", true),
            ("/js/", "/js", true),
            ("/js/x", "/js/", true),
            ("/jsx", "/js", false),
            ("/", "/js", false),
            ("*", "/", false),
        ] {
            assert_eq!(below(path, route), within, "{path} below {route}");
        }
        assert_eq!(without_port("a.example:8080"), "a.example");
        assert_eq!(without_port("[::1]:80"), "[::1]");
        assert_eq!(without_port("a.example"), "a.example");
    }

    #[test]
    fn two_guests_for_the_same_requests_are_refused() {
        let guest = |name: &str, route: &str, host: Option<&str>| {
            let mut guest = GuestConfig::new(name);
            guest.name = name.to_owned();
            guest.route = route.to_owned();
            guest.host = host.map(str::to_owned);
            guest
        };
        assert!(check(&[guest("a", "/x", None), guest("b", "/x", Some("h"))]).is_ok());
        let twice = check(&[guest("a", "/x", None), guest("b", "/x/", None)]);
        assert!(matches!(twice, Err(ServeError::Twice { .. })));
        let named = check(&[guest("a", "/x", None), guest("a", "/y", None)]);
        assert!(matches!(named, Err(ServeError::Twice { .. })));
        assert!(matches!(check(&[guest("a", "x", None)]), Err(ServeError::Route { .. })));
    }
}
