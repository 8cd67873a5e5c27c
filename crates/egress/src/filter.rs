//! A filter of one guest, which narrows its grants: allowed and denied destinations, and headers
//! for its requests.
//!
//! Promises: a filter grants nothing. A destination is decided by its name first, and by its
//! addresses where the name does not decide. An allowed destination precedes a denied one.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use crate::destination::{HostPattern, translated};
use crate::request_head::{HeaderList, OVERRIDES, folded};
use crate::rule::{NetGrant, checked_header};

/// Maximum entries of one list of a filter, and headers of one host.
const MAX_ENTRIES: usize = 256;

/// A filter that is invalid, or has an entry without a grant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FilterError(String);

/// A range of addresses: `192.0.2.7`, `192.0.2.0/24` or `2001:db8::/32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AddressRange {
    first: IpAddr,
    bits: u32,
}

/// The number and the width of an address.
fn number(address: IpAddr) -> (u128, u32) {
    match address {
        IpAddr::V4(ip) => (u128::from(ip.to_bits()), u32::BITS),
        IpAddr::V6(ip) => (ip.to_bits(), u128::BITS),
    }
}

impl FromStr for AddressRange {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let first: IpAddr = address.parse().map_err(drop)?;
        let (_, width) = number(first);
        let bits = bits.map_or(Ok(width), |bits| bits.parse().map_err(drop))?;
        if bits > width {
            return Err(());
        }
        // Addresses are compared in their canonical form, so a mapped range is that of IPv4. One
        // that begins before the mapped addresses has no such form.
        let first = first.to_canonical();
        let bits = bits.checked_sub(width - number(first).1).ok_or(())?;
        Ok(Self { first, bits })
    }
}

impl AddressRange {
    /// Whether it has all addresses. All of one protocol stand for those of both.
    fn is_all(&self) -> bool {
        self.bits == 0
    }

    fn contains(&self, address: IpAddr) -> bool {
        if self.is_all() {
            return true;
        }
        let ((own, width), (other, other_width)) = (number(self.first), number(address));
        width == other_width && (own ^ other).checked_shr(width - self.bits).unwrap_or(0) == 0
    }
}

/// The decision about a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NameVerdict {
    Allowed,
    Denied,
    /// Its addresses decide.
    Open,
}

#[derive(Clone, Default)]
struct FilterParts {
    allowed_hosts: Vec<HostPattern>,
    allowed: Vec<AddressRange>,
    denied: Vec<AddressRange>,
    /// Whether a destination that neither list names is denied.
    denies_rest: bool,
    headers: Vec<(HostPattern, HeaderList)>,
}

/// A filter of a guest. Clones are the same filter, and equal.
#[derive(Clone, Default)]
pub struct EgressFilter(Arc<FilterParts>);

impl fmt::Debug for EgressFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Headers may be secret.
        f.debug_struct("EgressFilter").finish_non_exhaustive()
    }
}

impl PartialEq for EgressFilter {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for EgressFilter {}

thread_local! {
    /// The filter of the guest that runs on this thread.
    static PRESENT: RefCell<Option<SharedFilter>> = const { RefCell::new(None) };
}

/// The filter of a guest, which its caller can replace while the guest runs. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct SharedFilter(Arc<Mutex<Option<EgressFilter>>>);

impl SharedFilter {
    /// `filter`, or none yet.
    #[must_use]
    pub fn new(filter: Option<EgressFilter>) -> Self {
        Self(Arc::new(Mutex::new(filter)))
    }

    fn get(&self) -> Option<EgressFilter> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the filter. A guest that runs has the new one for its next connection, and its
    /// connections of the filter before are reset at their next activity.
    pub fn replace(&self, filter: Option<EgressFilter>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = filter;
    }

    /// Runs a guest with this filter.
    pub fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        struct Restore(Option<SharedFilter>);
        impl Drop for Restore {
            fn drop(&mut self) {
                PRESENT.with(|present| *present.borrow_mut() = self.0.take());
            }
        }
        let before = PRESENT.with(|present| present.borrow_mut().replace(self.clone()));
        let _restore = Restore(before);
        run()
    }
}

/// Refuses one more entry of a list that has `count`.
fn check_room(what: &str, count: usize) -> Result<(), FilterError> {
    match count < MAX_ENTRIES {
        true => Ok(()),
        false => Err(FilterError(format!("{what} has more than {MAX_ENTRIES} entries"))),
    }
}

fn clipped(text: &str) -> String {
    text.chars().take(300).collect()
}

/// A name of a host, or `*.` and the end of one.
fn host(text: &str) -> Option<HostPattern> {
    HostPattern::parse(text).filter(|pattern| !matches!(pattern, HostPattern::Address(_)))
}

impl EgressFilter {
    /// A filter of two lists. `allowed` has names (`api.example.org`, `*.example.org`), addresses
    /// and ranges of addresses. `denied` has addresses and ranges. `0.0.0.0/0` is all destinations.
    /// Without `denied`, all destinations that `allowed` does not name are denied, unless that is
    /// empty as well.
    ///
    /// # Errors
    /// For an entry of another form, and for too many.
    pub fn new<'a>(
        allowed: impl IntoIterator<Item = &'a str>,
        denied: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, FilterError> {
        let mut parts = FilterParts::default();
        for text in allowed {
            let count = parts.allowed.len() + parts.allowed_hosts.len();
            check_room("the list of allowed destinations", count)?;
            match (text.parse(), host(text)) {
                (Ok(range), _) => parts.allowed.push(range),
                (Err(()), Some(host)) => parts.allowed_hosts.push(host),
                (Err(()), None) => {
                    return Err(FilterError(format!(
                        "`{}` cannot be allowed: use a name, `*.` and the end of a name, an address, or \
                         a range such as 192.0.2.0/24",
                        clipped(text)
                    )));
                }
            }
        }
        for text in denied {
            check_room("the list of denied destinations", parts.denied.len())?;
            let range = text.parse().map_err(|()| {
                FilterError(format!(
                    "`{}` cannot be denied: use an address or a range such as 192.0.2.0/24; a name is denied \
                     by 0.0.0.0/0 and a list of allowed names",
                    clipped(text)
                ))
            });
            parts.denied.push(range?);
        }
        let count = parts.allowed.len() + parts.allowed_hosts.len();
        parts.denies_rest =
            parts.denied.iter().any(AddressRange::is_all) || parts.denied.is_empty() && count > 0;
        Ok(Self(Arc::new(parts)))
    }

    /// The same with headers for the requests to a host, in place of those of the guest. Those of a
    /// rule precede them.
    ///
    /// # Errors
    /// For an invalid name or header, and for too many.
    pub fn with_headers<'a>(
        self,
        name: &str,
        headers: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, FilterError> {
        let pattern = host(name).ok_or_else(|| {
            let name = clipped(name);
            FilterError(format!("`{name}` is no name of a host, nor `*.` and the end of one"))
        })?;
        check_room("the list of hosts with headers", self.0.headers.len())?;
        let mut all = BTreeMap::new();
        for (header, value) in headers {
            let (header, value) = checked_header(&clipped(header), value).map_err(FilterError)?;
            let name = folded(&header);
            if OVERRIDES.contains(&&*name) {
                let why = "replaces the method or the path, which a rule checks";
                return Err(FilterError(format!("the header `{header}` {why}")));
            }
            // A later one replaces one before.
            if !all.contains_key(&name) {
                check_room("the list of headers", all.len())?;
            }
            all.insert(name, (header, value));
        }
        let mut parts = Arc::try_unwrap(self.0).unwrap_or_else(|shared| (*shared).clone());
        parts.headers.push((pattern, all.into_values().collect()));
        Ok(Self(Arc::new(parts)))
    }

    /// Checks that each allowed destination and each host with headers has a grant.
    ///
    /// # Errors
    /// For the first entry that no grant covers, and for headers of a host that no rule covers.
    pub fn check(&self, grants: &[NetGrant]) -> Result<(), FilterError> {
        let patterns = || grants.iter().map(|grant| grant.to().pattern());
        let rules = || {
            let rules = grants.iter().filter(|grant| matches!(grant, NetGrant::Rule(_)));
            rules.map(|grant| grant.to().pattern())
        };
        for host in &self.0.allowed_hosts {
            if !patterns().any(|pattern| pattern.overlaps(host)) {
                return Err(FilterError(format!("`{host}` is not granted to this guest")));
            }
        }
        for range in self.0.allowed.iter().filter(|range| !range.is_all()) {
            let covers = |pattern: &HostPattern| match pattern {
                HostPattern::Address(address) => range.contains(*address),
                // Its addresses are not known yet.
                _ => true,
            };
            if !patterns().any(covers) {
                let AddressRange { first, bits } = range;
                return Err(FilterError(format!("`{first}/{bits}` is not granted to this guest")));
            }
        }
        for (host, _) in &self.0.headers {
            if !rules().any(|pattern| pattern.overlaps(host)) {
                return Err(FilterError(format!(
                    "headers for `{host}` need a rule for it among the grants, as in {{ to = \"{host}:443\" }}"
                )));
            }
        }
        Ok(())
    }

    /// The filter of the guest that runs on this thread, if its caller has set one.
    #[must_use]
    pub fn present() -> Option<Self> {
        PRESENT.with(|present| present.borrow().as_ref().and_then(SharedFilter::get))
    }

    fn verdict(&self, name: &str) -> NameVerdict {
        let parts = &*self.0;
        let allows_all = parts.allowed.iter().any(AddressRange::is_all);
        if allows_all || parts.allowed_hosts.iter().any(|host| host.matches_name(name)) {
            return NameVerdict::Allowed;
        }
        match (parts.denies_rest, parts.allowed.is_empty(), parts.denied.is_empty()) {
            (true, true, _) => NameVerdict::Denied,
            (false, _, true) => NameVerdict::Allowed,
            _ => NameVerdict::Open,
        }
    }

    /// Whether a name may lead to an allowed destination.
    #[must_use]
    pub fn admits_name(&self, name: &str) -> bool {
        self.verdict(name) != NameVerdict::Denied
    }

    /// Whether the addresses of a name decide.
    pub(crate) fn leaves_to_addresses(&self, name: &str) -> bool {
        self.verdict(name) == NameVerdict::Open
    }

    /// Whether an address without a name, or of a name that is left to its addresses, is allowed.
    #[must_use]
    pub fn admits_address(&self, address: IpAddr) -> bool {
        let (parts, address) = (&*self.0, address.to_canonical());
        let others = match address {
            IpAddr::V6(ip) => translated(ip),
            IpAddr::V4(_) => [None; 2],
        };
        let mut reached = others.into_iter().flatten().map(IpAddr::V4).chain([address]);
        if parts.allowed.iter().any(|range| range.contains(address)) {
            return true;
        }
        !parts.denies_rest
            && !reached.any(|address| parts.denied.iter().any(|range| range.contains(address)))
    }

    /// The headers for requests to a host: those of its name, or else of the longest end of it.
    pub(crate) fn headers(&self, name: &str) -> &[(String, Vec<u8>)] {
        let fits = self.0.headers.iter().filter(|(host, _)| host.matches_name(name));
        let best = fits.max_by_key(|(host, _)| match host {
            HostPattern::Exactly(_) => usize::MAX,
            HostPattern::Ending(end) => end.len(),
            HostPattern::Address(_) => 0,
        });
        best.map_or(&[], |(_, headers)| headers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(allowed: &[&str], denied: &[&str]) -> EgressFilter {
        EgressFilter::new(allowed.iter().copied(), denied.iter().copied()).unwrap()
    }

    #[test]
    fn an_allowed_destination_precedes_a_denied_one() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let listed = filter(&["api.test", "*.db.test", "192.0.2.0/24"], &["0.0.0.0/0"]);
        assert_eq!(listed.verdict("api.test"), NameVerdict::Allowed);
        assert_eq!(listed.verdict("a.b.db.test"), NameVerdict::Allowed);
        // It may have an allowed address.
        assert_eq!(listed.verdict("db.test"), NameVerdict::Open);
        assert!(listed.admits_address(ip("192.0.2.9")) && !listed.admits_address(ip("192.0.3.1")));
        assert!(listed.admits_address(ip("::ffff:192.0.2.9")) && !listed.admits_address(ip("::5")));

        let some = filter(&["10.1.2.3"], &["10.0.0.0/8", "2001:db8::/32"]);
        assert_eq!(some.verdict("api.test"), NameVerdict::Open);
        for (address, admits) in [
            ("10.1.2.3", true),
            ("10.1.2.4", false),
            ("11.0.0.1", true),
            ("2001:db8::1", false),
            ("2001:db9::1", true),
            // NAT64 of a denied address.
            ("64:ff9b::10.0.0.1", false),
        ] {
            assert_eq!(some.admits_address(ip(address)), admits, "{address}");
        }

        let mapped = filter(&["::ffff:10.1.2.3"], &["::ffff:10.0.0.0/104"]);
        for (address, admits) in [("10.1.2.3", true), ("10.1.2.4", false), ("11.0.0.1", true)] {
            assert_eq!(mapped.admits_address(ip(address)), admits, "{address}");
        }

        // A list of allowed destinations alone denies the rest.
        let only = filter(&["api.test"], &[]);
        assert!(only.admits_name("api.test") && !only.admits_name("other.test"));
        assert!(!only.admits_address(ip("192.0.2.1")));
        let none = filter(&[], &["0.0.0.0/0"]);
        assert!(!none.admits_name("api.test") && !none.admits_address(ip("2001:db8::1")));
        let all = filter(&["0.0.0.0/0"], &["0.0.0.0/0"]);
        assert!(all.admits_name("api.test") && all.admits_address(ip("192.0.2.1")));
        let open = filter(&[], &[]);
        assert_eq!(open.verdict("api.test"), NameVerdict::Allowed);
        assert!(open.admits_address(ip("192.0.2.1")));
    }

    #[test]
    fn entries_of_another_form_and_without_a_grant_are_errors() {
        for (allowed, denied, part) in [
            (&["*"][..], &[][..], "`*` cannot be allowed"),
            (&["https://api.test"], &[], "cannot be allowed"),
            (&["10.0.0.0/33"], &[], "cannot be allowed"),
            (&[], &["::ffff:10.0.0.0/64"], "`::ffff:10.0.0.0/64` cannot be denied"),
            (&["api.test:443"], &[], "cannot be allowed"),
            (&[], &["api.test"], "`api.test` cannot be denied"),
            (&[""], &[], "cannot be allowed"),
            (&["10.0.0.1"; 257], &[], "more than 256 entries"),
        ] {
            let error = EgressFilter::new(allowed.iter().copied(), denied.iter().copied());
            let error = error.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let grants = ["*.example.org:443", "192.0.2.7:5432", r#"{"to": "api.test:443"}"#];
        let grants = grants.map(|text| text.parse::<NetGrant>().unwrap());
        for allowed in
            ["a.example.org", "*.example.org", "*.a.example.org", "*.org", "api.test", "0.0.0.0/0"]
        {
            filter(&[allowed], &[]).check(&grants).unwrap();
        }
        for denied in ["example.org", "*.api.test", "example.net"] {
            let error = filter(&[denied], &[]).check(&grants).unwrap_err().to_string();
            assert!(error.contains(denied), "{error}");
        }
        filter(&["192.0.2.0/24"], &[]).check(&grants[1..2]).unwrap();
        assert!(filter(&["192.0.3.0/24"], &[]).check(&grants[1..2]).is_err());
        let headers = |host: &str| filter(&[], &[]).with_headers(host, [("X-A", "1")]).unwrap();
        headers("api.test").check(&grants).unwrap();
        assert!(headers("a.example.org").check(&grants).is_err());
        for (name, header) in [
            ("*", "X-A"),
            ("192.0.2.7", "X-A"),
            ("api.test", "Host"),
            ("api.test", "a b"),
            ("api.test", "X-HTTP-Method"),
        ] {
            assert!(
                filter(&[], &[]).with_headers(name, [(header, "1")]).is_err(),
                "{name} {header}"
            );
        }
    }

    #[test]
    fn lists_are_refused_at_their_first_entry_too_many() {
        let taken = std::cell::Cell::new(0);
        let count = |_: &usize| taken.set(taken.get() + 1);
        let names: Vec<String> = (0..6_000).map(|number| format!("x-{number}")).collect();
        let headers = (0..names.len()).inspect(count).map(|at| (&*names[at], ""));
        let error = filter(&[], &[]).with_headers("api.test", headers).unwrap_err();
        assert!(error.to_string().contains("more than 256"), "{error}");
        assert_eq!(taken.replace(0), MAX_ENTRIES + 1);
        let denied = (0..6_000).inspect(count).map(|_| "10.0.0.1");
        EgressFilter::new([], denied).unwrap_err();
        assert_eq!(taken.get(), MAX_ENTRIES + 1);
        // One that replaces another takes no room.
        let last = ("X_0", "last");
        let headers = names[..MAX_ENTRIES].iter().map(|name| (&**name, "")).chain([last]);
        let listed = filter(&[], &[]).with_headers("api.test", headers).unwrap();
        assert_eq!(listed.headers("api.test").len(), MAX_ENTRIES);
        assert_eq!(listed.headers("api.test")[0].1, b"last");
    }

    #[test]
    fn headers_are_those_of_the_closest_name() {
        let none: [&str; 0] = [];
        let filter = EgressFilter::new(none, none).unwrap();
        let filter = filter.with_headers("*.test", [("x", "1")]).unwrap();
        let filter = filter.with_headers("*.a.test", [("x", "2"), ("X", "3")]).unwrap();
        let filter = filter.with_headers("b.a.test", [("x", "4")]).unwrap();
        let value = |name: &str| filter.headers(name).first().map(|(_, value)| value.clone());
        assert_eq!(value("b.a.test").as_deref(), Some(&b"4"[..]));
        assert_eq!(value("c.a.test").as_deref(), Some(&b"3"[..]));
        assert_eq!(value("c.test").as_deref(), Some(&b"1"[..]));
        assert_eq!(value("test"), None);
    }

    #[test]
    fn the_present_filter_is_that_of_the_innermost_caller() {
        let (outer, inner) = (filter(&[], &[]), filter(&[], &[]));
        SharedFilter::new(Some(outer.clone())).within(|| {
            SharedFilter::default().within(|| assert_eq!(EgressFilter::present(), None));
            let shared = SharedFilter::new(Some(inner.clone()));
            shared.within(|| {
                assert_eq!(EgressFilter::present(), Some(inner));
                // The caller replaces it while the guest runs.
                shared.replace(None);
                assert_eq!(EgressFilter::present(), None);
            });
            assert_eq!(EgressFilter::present(), Some(outer));
        });
        assert_eq!(EgressFilter::present(), None);
    }
}
