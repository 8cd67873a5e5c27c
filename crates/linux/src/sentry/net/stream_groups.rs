//! Multicast groups of TCP sockets: stored, because no multicast comes to a connection.
//!
//! Promises: a connection that is accepted is in no group, whatever its listener has joined.
//! Sockets of datagrams join no group, for the interface `lo` has none.

use rustix::io::Errno;

use crate::sentry::net::interfaces::INDEX;
use crate::sentry::net::socket_options::{MAX_OPTION_SIZE, SocketOptions};

/// Bytes before the address in `struct group_req`.
const GROUP_HEAD: usize = 8;
/// Where the groups are kept among the options: four bytes each.
const GROUPS: (i32, i32) = (libc::IPPROTO_IP, MCAST_JOIN_GROUP);

/// Missing in `libc`.
const MCAST_JOIN_GROUP: i32 = 42;
const MCAST_LEAVE_GROUP: i32 = 45;

/// The group that an option joins or leaves, and whether it joins; `None` for other options.
fn group_in(name: i32, value: &[u8]) -> Option<Result<([u8; 4], bool), Errno>> {
    let joins = match name {
        libc::IP_ADD_MEMBERSHIP | MCAST_JOIN_GROUP => true,
        libc::IP_DROP_MEMBERSHIP | MCAST_LEAVE_GROUP => false,
        _ => return None,
    };
    let is_request = [MCAST_JOIN_GROUP, MCAST_LEAVE_GROUP].contains(&name);
    let (at, least) = if is_request { (GROUP_HEAD + 4, GROUP_HEAD + 8) } else { (0, 8) };
    if value.len() < least {
        return Some(Err(Errno::INVAL));
    }
    let group = [0, 1, 2, 3].map(|n| value[at + n]);
    let family = u16::from_le_bytes([value[GROUP_HEAD], value[GROUP_HEAD + 1]]);
    if is_request && i32::from(family) != libc::AF_INET || !(224..=239).contains(&group[0]) {
        return Some(Err(Errno::INVAL));
    }
    let index = u32::from_le_bytes([0, 1, 2, 3].map(|n| value[n]));
    if is_request && ![0, INDEX].contains(&index) {
        return Some(Err(Errno::NODEV));
    }
    Some(Ok((group, joins)))
}

impl SocketOptions {
    /// Joins or leaves a group, if the option does; `None` for other options.
    pub(super) fn change_groups(&mut self, name: i32, value: &[u8]) -> Option<Result<(), Errno>> {
        let (group, joins) = match group_in(name, value)? {
            Ok(change) => change,
            Err(errno) => return Some(Err(errno)),
        };
        let mut groups = self.0.get(&GROUPS).cloned().unwrap_or_default();
        let at = groups.chunks_exact(4).position(|known| known == group);
        match (joins, at) {
            (true, Some(_)) => return Some(Err(Errno::ADDRINUSE)),
            (true, None) if groups.len() + 4 > MAX_OPTION_SIZE => return Some(Err(Errno::NOBUFS)),
            (true, None) => groups.extend(group),
            (false, None) => return Some(Err(Errno::ADDRNOTAVAIL)),
            (false, Some(at)) => drop(groups.drain(4 * at..4 * at + 4)),
        }
        self.0.insert(GROUPS, groups);
        Some(Ok(()))
    }

    /// Those of a connection that was accepted.
    pub(in crate::sentry) fn accepted(mut self) -> Self {
        self.0.remove(&GROUPS);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_joined_once_and_not_by_an_accepted_connection() {
        let mut options = SocketOptions::default();
        let mut request = vec![0; 64];
        (request[8], request[12]) = (libc::AF_INET as u8, 224);
        assert_eq!(options.change_groups(libc::IP_TTL, &request), None);
        assert_eq!(
            options.change_groups(MCAST_JOIN_GROUP, &request[..12]),
            Some(Err(Errno::INVAL))
        );
        assert_eq!(options.change_groups(MCAST_JOIN_GROUP, &request), Some(Ok(())));
        assert_eq!(options.change_groups(MCAST_JOIN_GROUP, &request), Some(Err(Errno::ADDRINUSE)));
        let mut accepted = options.clone().accepted();
        let left = accepted.change_groups(MCAST_LEAVE_GROUP, &request);
        assert_eq!(left, Some(Err(Errno::ADDRNOTAVAIL)));
        assert_eq!(options.change_groups(MCAST_LEAVE_GROUP, &request), Some(Ok(())));
        request[0] = 9;
        assert_eq!(options.change_groups(MCAST_JOIN_GROUP, &request), Some(Err(Errno::NODEV)));
    }
}
