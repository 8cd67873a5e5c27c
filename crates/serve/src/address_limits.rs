//! Limits of each client address: its connections, and its requests in a minute.
//!
//! Promises: the table of addresses is bounded. Addresses of IPv6 count by their first 64 bits,
//! which one client has. May break it: a proxy in front of the server, which is one address unless
//! `forwarded-for` is set.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hyper::HeaderMap;
use hyper::header::HeaderName;

use crate::error_response::{BudgetExcess, BudgetOwner, ErrorResponse};
use crate::lock::lock;

/// The header that carries a client's address between the hosts of a fleet. Those of clients are
/// removed.
pub(crate) const CLIENT: HeaderName = HeaderName::from_static("afresh-client");
/// The header in which a proxy names its client.
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// Maximum addresses that are remembered.
const MAX_ADDRESSES: usize = 64 << 10;
const SECONDS_OF_MINUTE: f64 = 60.0;

/// The limits of one address.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AddressConfig {
    pub(crate) connections: Option<usize>,
    /// In a minute.
    pub(crate) requests: Option<u32>,
}

/// The addresses that have connections or have made requests.
pub(crate) struct AddressLimits {
    config: AddressConfig,
    connections: Mutex<HashMap<IpAddr, usize>>,
    requests: Mutex<HashMap<IpAddr, Bucket>>,
}

/// Requests that an address may still make.
#[derive(Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

/// A connection of an address, until it is dropped.
pub(crate) struct AddressPermit {
    limits: Arc<AddressLimits>,
    address: IpAddr,
}

impl Drop for AddressPermit {
    fn drop(&mut self) {
        let mut all = lock(&self.limits.connections);
        if let Some(count) = all.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.address);
            }
        }
    }
}

/// The part of an address that stands for one client.
fn client_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        address => address,
    }
}

/// The client of a request: its peer, or the last address that the proxy in front has added.
pub(crate) fn client_address(headers: &HeaderMap, peer: IpAddr, is_forwarded: bool) -> IpAddr {
    if !is_forwarded {
        return peer.to_canonical();
    }
    let last = headers.get_all(FORWARDED_FOR).iter().next_back();
    let last = last.and_then(|value| value.to_str().ok()?.rsplit(',').next()?.trim().parse().ok());
    last.unwrap_or(peer).to_canonical()
}

impl AddressLimits {
    pub(crate) fn new(config: AddressConfig) -> Arc<Self> {
        Arc::new(Self { config, connections: Mutex::default(), requests: Mutex::default() })
    }

    fn refuse(name: &'static str, (limit, used): (u64, u64), retry_after: u64) -> ErrorResponse {
        ErrorResponse::over_budget(BudgetExcess {
            owner: BudgetOwner::Address,
            name,
            limit,
            used,
            retry_after,
            advice: "use fewer at a time",
        })
    }

    /// Counts a connection, unless its address has as many as it may.
    pub(crate) fn connect(self: &Arc<Self>, peer: IpAddr) -> Result<AddressPermit, ErrorResponse> {
        let address = client_of(peer);
        let mut all = lock(&self.connections);
        let used = all.get(&address).copied().unwrap_or(0);
        if let Some(limit) = self.config.connections.filter(|limit| used >= *limit) {
            let counts = (limit as u64, used as u64);
            return Err(Self::refuse("max-connections-per-address", counts, 1));
        }
        all.insert(address, used + 1);
        Ok(AddressPermit { limits: self.clone(), address })
    }

    /// Counts a request.
    pub(crate) fn request(&self, client: IpAddr) -> Result<(), ErrorResponse> {
        let Some(limit) = self.config.requests else { return Ok(()) };
        let (capacity, now) = (f64::from(limit), Instant::now());
        let mut all = lock(&self.requests);
        let address = client_of(client);
        let filled = |bucket: &Bucket| {
            let since = now.saturating_duration_since(bucket.at).as_secs_f64();
            (bucket.left + since * capacity / SECONDS_OF_MINUTE).min(capacity)
        };
        if all.len() >= MAX_ADDRESSES && !all.contains_key(&address) {
            all.retain(|_, bucket| filled(bucket) < capacity);
            if all.len() >= MAX_ADDRESSES {
                all.clear();
            }
        }
        let bucket = all.entry(address).or_insert(Bucket { left: capacity, at: now });
        (bucket.left, bucket.at) = (filled(bucket), now);
        if bucket.left >= 1.0 {
            bucket.left -= 1.0;
            return Ok(());
        }
        let wait = (1.0 - bucket.left) * SECONDS_OF_MINUTE / capacity.max(1.0);
        let used = (u64::from(limit), u64::from(limit));
        Err(Self::refuse("max-requests-per-address", used, wait.ceil() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_address_is_bounded_and_another_is_not_affected() {
        let config = AddressConfig { connections: Some(2), requests: Some(3) };
        let limits = AddressLimits::new(config);
        let (one, two) = (address("2001:db8::1"), address("192.0.2.1"));
        let first = limits.connect(one).ok().unwrap();
        // The same network.
        let second = limits.connect(address("2001:db8::2")).ok().unwrap();
        for _ in 0..3 {
            let excess = limits.connect(one).err().unwrap().budget.unwrap();
            let found = (excess.name, excess.limit, excess.used);
            assert_eq!(found, ("max-connections-per-address", 2, 2));
        }
        assert!(limits.connect(two).is_ok());
        drop((first, second));
        assert!(limits.connect(one).is_ok());
        for _ in 0..3 {
            limits.request(one).unwrap();
        }
        let refused = limits.request(one).unwrap_err();
        assert_eq!(refused.status.as_u16(), 429);
        assert!((1..=20).contains(&refused.budget.unwrap().retry_after));
        limits.request(two).unwrap();
    }

    #[test]
    fn the_table_of_addresses_is_bounded() {
        let limits = AddressLimits::new(AddressConfig { connections: None, requests: Some(10) });
        for number in 0..(MAX_ADDRESSES as u32 + 100) {
            limits.request(IpAddr::V4(number.into())).unwrap();
        }
        assert!(limits.requests.lock().unwrap().len() <= MAX_ADDRESSES);
    }

    #[test]
    fn a_proxy_names_its_client_last() {
        let mut headers = HeaderMap::new();
        headers.append(FORWARDED_FOR, "198.51.100.7, 203.0.113.9".parse().unwrap());
        let peer = address("::ffff:10.0.0.1");
        assert_eq!(client_address(&headers, peer, true), address("203.0.113.9"));
        assert_eq!(client_address(&headers, peer, false), address("10.0.0.1"));
        headers.append(FORWARDED_FOR, "nonsense".parse().unwrap());
        assert_eq!(client_address(&headers, peer, true), address("10.0.0.1"));
    }
}
