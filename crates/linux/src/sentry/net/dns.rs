//! Host names, resolved for a guest: DNS questions to port 53 of any address.
//!
//! Promises: every granted name has a unique address, which stays the same in the guest's state and
//! means nothing outside; all other names do not exist. May break it: nothing outside; which server
//! is behind a name is found out when it is connected to.

mod answers;

use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use crate::sentry::net::dns_message::MAX_NAME;
use crate::sentry::net::sockets::Address;

/// The port of the name server.
const PORT: u16 = 53;

/// The first address that stands for a name, in a block for benchmarks of networks (RFC 2544).
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 1]);

/// Maximum names that a guest may resolve.
pub(in crate::sentry) const NAMES: usize = 4096;

/// The resolved names, in order: their addresses follow one another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResolvedNames(Vec<String>);

impl ResolvedNames {
    /// The name that an address stands for.
    pub(crate) fn name_of(&self, address: IpAddr) -> Option<&str> {
        let IpAddr::V4(address) = address else { return None };
        let index = u32::from(address).checked_sub(FIRST)?;
        self.0.get(index as usize).map(String::as_str)
    }

    /// The address that stands for a name, if it has one.
    fn find_address(&self, name: &str) -> Option<Ipv4Addr> {
        let index = self.0.iter().position(|known| known == name)?;
        Some(Ipv4Addr::from(FIRST + index as u32))
    }

    /// The address that stands for a name from now on; nothing where there are too many.
    fn give(&mut self, name: &str) -> Option<Ipv4Addr> {
        if self.0.len() >= NAMES {
            return None;
        }
        self.0.push(name.to_owned());
        self.find_address(name)
    }

    /// Whether a guest could have resolved them.
    pub(crate) fn is_sound(&self) -> bool {
        let short = |name: &String| name.len() <= MAX_NAME;
        self.0.len() <= NAMES && self.0.iter().all(short)
    }
}

impl Address {
    /// Whether a message to this address is a question to the sentry, if no socket of the guest
    /// takes it.
    pub(in crate::sentry) fn is_for_names(&self) -> bool {
        self.is_internet() && self.port() == PORT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_address() {
        let mut names = ResolvedNames::default();
        let (one, two) = (names.give("one").unwrap(), names.give("two").unwrap());
        assert_ne!(one, two);
        assert_eq!(
            (names.find_address("one"), names.name_of(two.into())),
            (Some(one), Some("two"))
        );
        assert_eq!(names.name_of(Ipv4Addr::LOCALHOST.into()), None);
        assert_eq!(names.name_of(Ipv4Addr::new(198, 18, 0, 3).into()), None);
        while names.give("more").is_some() {}
        assert!(names.is_sound() && names.0.len() == NAMES);
        names.0.push(String::new());
        assert!(!names.is_sound());
    }
}
