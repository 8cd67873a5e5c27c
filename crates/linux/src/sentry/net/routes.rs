//! Routes of the interface `lo`, and rules for the tables of routes, as netlink lists them in
//! Linux.

use rustix::io::Errno;

use crate::sentry::net::netlink_message::{attribute, number, value_of};

/// Number of the interface.
const INDEX: u32 = 1;
/// Bytes of `struct rtmsg` and of `struct fib_rule_hdr`.
const HEAD: usize = 12;
/// The preference of a route of IPv6 (`RTA_PREF`): medium.
const RTA_PREF: u16 = 20;
const RTA_UID: u16 = 25;
/// Flags of a route that was looked up: it is a copy, and local. A broadcast has one more.
const LOOKED_UP: u32 = 0x8000_0200;
const LOOKED_UP_BROADCAST: u32 = 0x1000_0000 | LOOKED_UP;
/// Bytes of `struct rta_cacheinfo`.
const CACHE_INFO: usize = 32;
// Attributes and actions of rules.
const FRA_PRIORITY: u16 = 6;
const FRA_SUPPRESS_PREFIXLEN: u16 = 14;
const FRA_TABLE: u16 = 15;
const FRA_PROTOCOL: u16 = 21;
const TO_TABLE: u8 = 1;
/// Rules: a table each, with a priority.
const RULES: [(u8, u32); 3] =
    [(libc::RT_TABLE_LOCAL, 0), (libc::RT_TABLE_MAIN, 32766), (libc::RT_TABLE_DEFAULT, 32767)];

const LOOPBACK: [u8; 4] = [127, 0, 0, 1];
const BROADCAST: [u8; 4] = [127, 255, 255, 255];
const LOOPBACK_6: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

/// A route (`struct rtmsg`) to the addresses that begin with `prefix` bits of `to`. `last` are its
/// last attributes.
fn route(
    (family, to, prefix): (i32, &[u8], u8),
    (table, protocol): (u8, u8),
    (scope, kind): (u8, u8),
    flags: u32,
    last: &[Vec<u8>],
) -> Vec<u8> {
    let mut body = vec![family as u8, prefix, 0, 0, table, protocol, scope, kind];
    body.extend(flags.to_le_bytes());
    body.extend(number(libc::RTA_TABLE, table.into()));
    body.extend(attribute(libc::RTA_DST, to));
    body.extend(last.concat());
    body
}

const OF_KERNEL: (u8, u8) = (libc::RT_TABLE_LOCAL, libc::RTPROT_KERNEL);

/// The route to the loopback of IPv6.
fn route_6() -> Vec<u8> {
    let place = (libc::RT_SCOPE_UNIVERSE, libc::RTN_LOCAL);
    let last = [
        number(libc::RTA_PRIORITY, 0),
        number(libc::RTA_OIF, INDEX),
        attribute(libc::RTA_CACHEINFO, &[0; CACHE_INFO]),
        attribute(RTA_PREF, &[0]),
    ];
    route((libc::AF_INET6, &LOOPBACK_6, 128), OF_KERNEL, place, 0, &last)
}

/// All routes of a family.
pub(in crate::sentry) fn routes(family: i32) -> Vec<Vec<u8>> {
    if family != libc::AF_INET {
        return vec![route_6()];
    }
    let last = [attribute(libc::RTA_PREFSRC, &LOOPBACK), number(libc::RTA_OIF, INDEX)];
    let local = (libc::RT_SCOPE_HOST, libc::RTN_LOCAL);
    let broadcast = (libc::RT_SCOPE_LINK, libc::RTN_BROADCAST);
    let all = [([127, 0, 0, 0], 8, local), (LOOPBACK, 32, local), (BROADCAST, 32, broadcast)];
    let all = all.into_iter();
    all.map(|(to, prefix, place)| route((family, &to, prefix), OF_KERNEL, place, 0, &last))
        .collect()
}

/// The route to the address in a request of this family, for a user.
pub(in crate::sentry) fn route_to(
    family: i32,
    request: &[u8],
    user: u32,
) -> Result<Vec<u8>, Errno> {
    // Other families have no lookup.
    if ![libc::AF_INET, libc::AF_INET6].contains(&family) {
        return Err(Errno::OPNOTSUPP);
    }
    let list = request.get(HEAD..).ok_or(Errno::INVAL)?;
    let to = value_of(list, libc::RTA_DST).ok_or(Errno::INVAL)?;
    match (family, to) {
        (libc::AF_INET, [127, ..]) if to.len() == LOOPBACK.len() => {
            let looked_up = (libc::RT_TABLE_MAIN, libc::RTPROT_UNSPEC);
            let last = [
                number(libc::RTA_OIF, INDEX),
                attribute(libc::RTA_PREFSRC, &LOOPBACK),
                number(RTA_UID, user),
                attribute(libc::RTA_CACHEINFO, &[0; CACHE_INFO]),
            ];
            let (kind, flags) = match to == BROADCAST {
                true => (libc::RTN_BROADCAST, LOOKED_UP_BROADCAST),
                false => (libc::RTN_LOCAL, LOOKED_UP),
            };
            let place = (libc::RT_SCOPE_UNIVERSE, kind);
            Ok(route((family, to, 32), looked_up, place, flags, &last))
        }
        (libc::AF_INET6, to) if to == LOOPBACK_6 => Ok(route_6()),
        (libc::AF_INET, [_, _, _, _]) => Err(Errno::NETUNREACH),
        (libc::AF_INET6, to) if to.len() == LOOPBACK_6.len() => Err(Errno::NETUNREACH),
        _ => Err(Errno::INVAL),
    }
}

/// All rules of a family (`struct fib_rule_hdr`).
pub(in crate::sentry) fn rules(family: i32) -> Vec<Vec<u8>> {
    let rule = |(table, priority): (u8, u32)| {
        let mut body = vec![family as u8, 0, 0, 0, table, 0, 0, TO_TABLE, 0, 0, 0, 0];
        body.extend(number(FRA_TABLE, table.into()));
        body.extend(number(FRA_SUPPRESS_PREFIXLEN, u32::MAX));
        body.extend(attribute(FRA_PROTOCOL, &[libc::RTPROT_KERNEL]));
        if priority > 0 {
            body.extend(number(FRA_PRIORITY, priority));
        }
        body
    };
    // IPv6 has no table `default`.
    let count = if family == libc::AF_INET { RULES.len() } else { RULES.len() - 1 };
    RULES[..count].iter().copied().map(rule).collect()
}
