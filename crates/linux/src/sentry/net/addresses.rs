//! Addresses of sockets: what they name, and which of them meet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

/// Longest address (`struct sockaddr_un`).
pub(crate) const MAX_ADDRESS: usize = 110;

/// An address, as the guest writes it (`struct sockaddr`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address(pub(crate) Vec<u8>);

impl Address {
    /// The address of an internet socket that is not bound.
    pub(crate) fn any(family: u16) -> Self {
        let len = if i32::from(family) == libc::AF_INET { 16 } else { 28 };
        let mut bytes = family.to_le_bytes().to_vec();
        bytes.resize(len, 0);
        Self(bytes)
    }

    /// The address of `ip` for a socket of this family.
    pub(crate) fn of_ip(family: u16, ip: IpAddr, port: u16) -> Self {
        let mut address = Self::any(family);
        address.set_port(port);
        match (ip, i32::from(family)) {
            (IpAddr::V4(ip), libc::AF_INET) => address.0[4..8].copy_from_slice(&ip.octets()),
            (IpAddr::V4(ip), libc::AF_INET6) => {
                address.0[8..24].copy_from_slice(&ip.to_ipv6_mapped().octets());
            }
            (IpAddr::V6(ip), libc::AF_INET6) => address.0[8..24].copy_from_slice(&ip.octets()),
            _ => {}
        }
        address
    }

    /// The loopback address of a family, or a nameless one.
    pub(crate) fn loopback(family: u16, port: u16) -> Self {
        let mut bytes = family.to_le_bytes().to_vec();
        match i32::from(family) {
            libc::AF_INET => {
                bytes.extend(port.to_be_bytes());
                bytes.extend([127, 0, 0, 1]);
                bytes.resize(16, 0);
            }
            libc::AF_INET6 => {
                bytes.extend(port.to_be_bytes());
                bytes.resize(23, 0);
                bytes.push(1);
                bytes.resize(28, 0);
            }
            _ => {}
        }
        Self(bytes)
    }

    pub(crate) fn family(&self) -> u16 {
        self.0.get(..2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    pub(crate) fn is_internet(&self) -> bool {
        [libc::AF_INET, libc::AF_INET6].contains(&i32::from(self.family()))
    }

    pub(crate) fn port(&self) -> u16 {
        match self.0.get(2..4) {
            Some(bytes) if self.is_internet() => u16::from_be_bytes([bytes[0], bytes[1]]),
            _ => 0,
        }
    }

    pub(crate) fn set_port(&mut self, port: u16) {
        if let Some(bytes) = self.0.get_mut(2..4) {
            bytes.copy_from_slice(&port.to_be_bytes());
        }
    }

    pub(in crate::sentry) fn is_for_local(&self) -> bool {
        i32::from(self.family()) == libc::AF_UNIX
    }

    /// Whether it has only a family.
    pub(crate) fn is_unnamed(&self) -> bool {
        self.0.len() == 2
    }

    /// Whether it is whole, and of this family.
    pub(crate) fn is_of(&self, family: u16) -> bool {
        self.family() == family && self.0.len() >= Self::least(family)
    }

    /// Bytes that an address of a family has at least.
    pub(in crate::sentry) fn least(family: u16) -> usize {
        match i32::from(family) {
            libc::AF_INET => 16,
            libc::AF_INET6 => 24,
            _ => 3,
        }
    }

    /// Whether it is this machine's: the loopback address, or any.
    pub(crate) fn is_local(&self) -> bool {
        match i32::from(self.family()) {
            libc::AF_INET => self.0.get(4).is_some_and(|&first| first == 127 || first == 0),
            libc::AF_INET6 => {
                let Some(ip) = self.0.get(8..24) else { return false };
                let zeros = ip[..15].iter().all(|&byte| byte == 0) && ip[15] <= 1;
                let mapped = ip[..10].iter().all(|&byte| byte == 0) && ip[10..12] == [255, 255];
                zeros || mapped && (ip[12] == 127 || ip[12..] == [0; 4])
            }
            _ => true,
        }
    }

    /// Whether its length is at most that of an address.
    pub(crate) fn is_short(&self) -> bool {
        self.0.len() <= MAX_ADDRESS + 18
    }

    /// The path of a local socket; `None` for an unnamed or abstract one.
    pub(crate) fn path(&self) -> Option<&[u8]> {
        let name = self.0.get(2..).filter(|_| i32::from(self.family()) == libc::AF_UNIX)?;
        let name = name.split(|&byte| byte == 0).next()?;
        (!name.is_empty()).then_some(name)
    }

    /// The address of an IP socket, without its family.
    pub(in crate::sentry) fn ip(&self) -> Option<IpAddr> {
        let bytes = &self.0;
        match i32::from(self.family()) {
            libc::AF_INET => {
                let four: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
                Some(Ipv4Addr::from(four).into())
            }
            libc::AF_INET6 => {
                let ip = Ipv6Addr::from(<[u8; 16]>::try_from(bytes.get(8..24)?).ok()?);
                Some(ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4))
            }
            _ => None,
        }
    }

    /// The same address for a socket of `family`, which may be of the newer protocol while this is
    /// of the older one.
    pub(in crate::sentry) fn adapted(self, family: u16) -> Self {
        match (self.ip(), i32::from(self.family()), i32::from(family)) {
            (Some(ip), libc::AF_INET, libc::AF_INET6) => Self::of_ip(family, ip, self.port()),
            _ => self,
        }
    }

    /// The IP address that a message to here reaches: one to any address goes to the loopback
    /// address.
    pub(in crate::sentry) fn destination(&self) -> Option<IpAddr> {
        let ip = self.ip()?;
        Some(match ip {
            _ if !ip.is_unspecified() => ip,
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        })
    }

    /// The same address as a socket that is bound to it has it: a path ends with one zero.
    pub(in crate::sentry) fn bound(self) -> Self {
        match (self.path(), i32::from(self.family())) {
            (Some(path), _) => Self([&self.0[..2], path, &[0]].concat()),
            (None, libc::AF_INET | libc::AF_INET6) => {
                let mut bytes = self.0;
                bytes.resize(Self::any(u16::from_le_bytes([bytes[0], bytes[1]])).0.len(), 0);
                Self(bytes)
            }
            _ => self,
        }
    }

    /// Whether sockets that are bound to both addresses would get the same messages. `only` is
    /// whether the one of them takes no messages of the older protocol.
    pub(in crate::sentry) fn overlaps(&self, only: bool, other: &Self, other_only: bool) -> bool {
        let (Some(one), Some(two)) = (self.ip(), other.ip()) else { return false };
        if self.port() != other.port() {
            return false;
        }
        let takes_both = |ip: IpAddr, only: bool| ip == Ipv6Addr::UNSPECIFIED && !only;
        match (one.is_ipv6(), two.is_ipv6()) {
            _ if one == two => true,
            (true, false) => takes_both(one, only),
            (false, true) => takes_both(two, other_only),
            _ => one.is_unspecified() || two.is_unspecified(),
        }
    }

    /// How well a socket that is bound here takes a message to `other`: `None` if not at all, and
    /// more for a specific address than for any. `only` is as with [`Address::overlaps`].
    pub(crate) fn fitness(&self, only: bool, other: &Self) -> Option<u8> {
        if !self.is_internet() {
            return match (self.path(), other.path()) {
                // With a zero behind it, or without.
                (Some(own), Some(path)) => own == path,
                _ => self == other,
            }
            .then_some(2);
        }
        let (own, to) = (self.ip()?, other.destination()?);
        if self.port() != other.port() {
            return None;
        }
        match own {
            own if own == to => Some(2),
            own if own.is_unspecified() && own.is_ipv6() == to.is_ipv6() => Some(1),
            IpAddr::V6(own) if own.is_unspecified() && !only => Some(0),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn four(text: &str, port: u16) -> Address {
        Address::of_ip(libc::AF_INET as u16, text.parse().unwrap(), port)
    }

    fn six(text: &str, port: u16) -> Address {
        Address::of_ip(libc::AF_INET6 as u16, text.parse().unwrap(), port)
    }

    #[test]
    fn addresses_meet_as_in_linux() {
        let (any, own, second) = (four("0.0.0.0", 7), four("127.0.0.1", 7), four("127.0.0.2", 7));
        assert_eq!(own.fitness(false, &own), Some(2));
        assert_eq!(own.fitness(false, &any), Some(2), "to any address is to the loopback address");
        assert_eq!((any.fitness(false, &second), own.fitness(false, &second)), (Some(1), None));
        assert_eq!(any.fitness(false, &four("127.0.0.1", 8)), None);
        let (all, mapped) = (six("::", 7), six("::ffff:127.0.0.1", 7));
        assert_eq!((all.fitness(false, &own), all.fitness(true, &own)), (Some(0), None));
        assert_eq!(
            (own.fitness(false, &mapped), all.fitness(true, &six("::1", 7))),
            (Some(2), Some(1))
        );
        assert!(any.overlaps(false, &own, false) && !own.overlaps(false, &second, false));
        assert!(all.overlaps(false, &own, false) && !all.overlaps(true, &any, false));
        assert!(
            !six("::1", 7).overlaps(false, &any, false)
                && !any.overlaps(false, &four("0.0.0.0", 8), false)
        );
    }

    #[test]
    fn a_path_has_one_end() {
        let with = |name: &[u8]| Address([&1u16.to_le_bytes()[..], name].concat());
        assert_eq!(with(b"/s\0\0\0").bound(), with(b"/s\0"));
        assert_eq!(with(b"/s").bound(), with(b"/s\0"));
        let long = Address([&four("127.0.0.1", 7).0[..], &[1; 100]].concat());
        assert_eq!(long.bound(), four("127.0.0.1", 7));
        assert_eq!(with(b"\0abstract\0").bound(), with(b"\0abstract\0"));
        assert_eq!(with(b"/s").fitness(false, &with(b"/s\0")), Some(2));
    }
}
