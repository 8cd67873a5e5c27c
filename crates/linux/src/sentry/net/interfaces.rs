//! The one network interface that a guest has, `lo`, as programs list it: by netlink and by
//! `ioctl`.
//!
//! Promises: a request is answered from its own bytes alone, and a socket holds no more answers
//! than datagrams. No answer is made behind one that did not fit.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::channels::Ancillary;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::net::netlink_message::{HEADER, attribute, message, value_of};
use crate::sentry::net::routes::{route_to, routes, rules};
use crate::sentry::net::sockets::{Address, NETLINK, NETLINK_BUFFER, SocketState};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

/// Bytes of `struct sockaddr_nl`.
pub(in crate::sentry) const ADDRESS: usize = 12;
/// Kinds below are no requests, and a request for information.
const FIRST_KIND: u16 = 16;
const GET: u16 = 2;
/// Bytes of `struct ifinfomsg`.
const IFINFO_LEN: usize = 16;
/// Bytes of a send buffer that no message takes.
const BUFFER_HEAD: usize = 32;
/// Number and name of the interface.
pub(super) const INDEX: u32 = 1;
const NAME: &[u8] = b"lo\0";
const MTU: u32 = 65_536;
/// Up, running, and the loopback.
const FLAGS: u32 = 0x1_0049;
const LOOPBACK: u16 = libc::ARPHRD_LOOPBACK;
/// Bytes of `struct ifreq`, and of its name.
const REQUEST: usize = 40;
const REQUEST_NAME: usize = 16;
// Requests of `ioctl` that the C library has no names for here.
const SIOCGIFNAME: u64 = 0x8910;
const SIOCGIFCONF: u64 = 0x8912;
const SIOCGIFFLAGS: u64 = 0x8913;
const SIOCSIFFLAGS: u64 = 0x8914;
const SIOCGIFADDR: u64 = 0x8915;
const SIOCGIFBRDADDR: u64 = 0x8919;
const SIOCGIFNETMASK: u64 = 0x891b;
const SIOCGIFMETRIC: u64 = 0x891d;
const SIOCGIFMTU: u64 = 0x8921;
const SIOCGIFHWADDR: u64 = 0x8927;
const SIOCGIFINDEX: u64 = 0x8933;
const SIOCGIFTXQLEN: u64 = 0x8942;

/// The address of a netlink socket; that of the kernel has the port 0.
pub(in crate::sentry) fn netlink_address(port: u32) -> Address {
    let family = StructBuilder::default().half(NETLINK as u16).half(0);
    Address(family.int(port).int(0).0)
}

/// The interface (`struct ifinfomsg`).
fn link() -> Vec<u8> {
    let head = StructBuilder::default().half(0).half(LOOPBACK).int(INDEX).int(FLAGS).int(0).0;
    let attributes = [
        attribute(libc::IFLA_IFNAME, NAME),
        attribute(libc::IFLA_TXQLEN, &1000u32.to_le_bytes()),
        attribute(libc::IFLA_MTU, &MTU.to_le_bytes()),
        attribute(libc::IFLA_ADDRESS, &[0; 6]),
        attribute(libc::IFLA_BROADCAST, &[0; 6]),
    ];
    [head, attributes.concat()].concat()
}

/// An address of the interface (`struct ifaddrmsg`).
fn address(family: i32) -> Vec<u8> {
    const PERMANENT: u8 = 0x80;
    const HOST: u8 = 254;
    let (prefix, bytes) = match family {
        libc::AF_INET => (8, vec![127, 0, 0, 1]),
        _ => (128, [[0; 15].as_slice(), &[1]].concat()),
    };
    let mut body = vec![family as u8, prefix, PERMANENT, HOST];
    body.extend(INDEX.to_le_bytes());
    body.extend(attribute(libc::IFA_ADDRESS, &bytes));
    if family == libc::AF_INET {
        body.extend(attribute(libc::IFA_LOCAL, &bytes));
        body.extend(attribute(libc::IFA_LABEL, NAME));
    }
    body
}

/// Refuses a request for an interface (`struct ifinfomsg`) that does not name this one, by number
/// or name.
fn check_interface(request: &[u8]) -> Result<(), Errno> {
    let (head, list) = request.split_at_checked(IFINFO_LEN).ok_or(Errno::INVAL)?;
    let index = i32::from_le_bytes([head[4], head[5], head[6], head[7]]);
    let is_own = match value_of(list, libc::IFLA_IFNAME) {
        _ if index > 0 => index == INDEX as i32,
        Some(name) => name == NAME || name == &NAME[..2],
        None => return Err(Errno::INVAL),
    };
    if is_own { Ok(()) } else { Err(Errno::NODEV) }
}

/// The first request in `bytes`, and those behind it.
fn first_request(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, _) = bytes.split_first_chunk().filter(|_| bytes.len() >= HEADER)?;
    let len = (u32::from_le_bytes(*len) as usize).clamp(HEADER, bytes.len());
    let next = len.next_multiple_of(4).min(bytes.len());
    Some((&bytes[..len], &bytes[next..]))
}

/// The answers to a request, each a datagram.
fn answers(request: &[u8], port: u32, user: u32) -> Vec<Vec<u8>> {
    let (head, body) = request.split_at(HEADER);
    let int = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| head[at + n]));
    let (kind, flags) = (int(4) as u16, (int(4) >> 16) as i32);
    let to = (int(8), port);
    let is_request = flags & libc::NLM_F_REQUEST != 0 && kind >= FIRST_KIND;
    // The low bits of a kind are its verb.
    let gets = kind & 3 == GET;
    let dumps = is_request && gets && flags & libc::NLM_F_DUMP != 0;
    let multi = if dumps { libc::NLM_F_MULTI } else { 0 };
    let family = i32::from(body.first().copied().unwrap_or_default());
    let families = [libc::AF_INET, libc::AF_INET6].into_iter();
    let families = families.filter(|one| family == 0 || family == *one);
    let (mut found, mut error) = (Vec::new(), None);
    let mut list = |kind: u16, bodies: Vec<Vec<u8>>| {
        found.extend(bodies.iter().map(|body| message(kind, multi, to, body)));
    };
    match kind {
        // Only requests have answers.
        _ if !is_request => {}
        libc::RTM_GETLINK if dumps => list(libc::RTM_NEWLINK, vec![link()]),
        libc::RTM_GETLINK => match check_interface(body) {
            Ok(()) => list(libc::RTM_NEWLINK, vec![link()]),
            Err(refused) => error = Some(refused),
        },
        libc::RTM_GETADDR if dumps => {
            list(libc::RTM_NEWADDR, families.map(address).collect());
        }
        libc::RTM_GETROUTE if dumps => {
            list(libc::RTM_NEWROUTE, families.flat_map(routes).collect());
        }
        libc::RTM_GETROUTE => match route_to(family, body, user) {
            Ok(route) => list(libc::RTM_NEWROUTE, vec![route]),
            Err(refused) => error = Some(refused),
        },
        libc::RTM_GETRULE if dumps => {
            list(libc::RTM_NEWRULE, families.flat_map(rules).collect());
        }
        // There are no neighbours on the loopback.
        libc::RTM_GETNEIGH if dumps => {}
        _ if !gets => error = Some(Errno::PERM),
        _ => error = Some(Errno::OPNOTSUPP),
    }
    if dumps && error.is_none() {
        let end = message(libc::NLMSG_DONE as u16, multi, to, &[0; 4]);
        return vec![[found.concat(), end].concat()];
    }
    if error.is_some() || flags & libc::NLM_F_ACK != 0 {
        let number = error.map_or(0, |error| -error.raw_os_error());
        let body = [&number.to_le_bytes()[..], head].concat();
        found.push(message(libc::NLMSG_ERROR as u16, 0, to, &body));
    }
    found
}

impl Sentry {
    /// Binds a netlink socket: to the port that it asks for, or one that is free.
    pub(in crate::sentry) fn bind_netlink(
        &mut self,
        descriptor: u64,
        given: &[u8],
    ) -> SyscallResult {
        let port = given.get(4..8).ok_or(Errno::INVAL)?;
        let port = u32::from_le_bytes([port[0], port[1], port[2], port[3]]);
        let own = match port {
            0 => {
                let ports = self.state.processes.current_id()..=u32::MAX;
                self.state.free_address(ports.map(netlink_address)).ok_or(Errno::NOMEM)?
            }
            port => netlink_address(port),
        };
        if port != 0 && self.state.has_name(&own) {
            return Err(Errno::ADDRINUSE.into());
        }
        self.socket_mut(descriptor)?.own = own;
        Ok(ZERO)
    }

    /// Sends the kernel a request by netlink.
    pub(in crate::sentry) fn ask_netlink(
        &mut self,
        descriptor: u64,
        bytes: &[u8],
    ) -> SyscallResult {
        if !self.socket_of(descriptor)?.is_bound() {
            self.bind_netlink(descriptor, &[0; ADDRESS])?;
        }
        let socket = self.socket_of(descriptor)?;
        let SocketState::Datagrams { inbox, .. } = socket.stage else {
            return Err(Errno::INVAL.into());
        };
        let port = socket.own.0.get(4..8).map(|p| u32::from_le_bytes([p[0], p[1], p[2], p[3]]));
        let port = port.unwrap_or_default();
        let size = socket.options.number(libc::SOL_SOCKET, libc::SO_SNDBUF);
        // Each request in a message is answered, so that a larger buffer takes no larger message.
        let most = NETLINK_BUFFER as usize;
        let size = size.and_then(|size| usize::try_from(size).ok()).unwrap_or(most).min(most);
        if bytes.len() > size.saturating_sub(BUFFER_HEAD) {
            return Err(Errno::MSGSIZE.into());
        }
        let [user, _] = self.state.namespaces.users.owner;
        let mut rest = bytes;
        while let Some((request, next)) = first_request(rest) {
            for answer in answers(request, port, user) {
                let channel = self.change().channels.get_mut(inbox).ok_or(Errno::IO)?;
                if !channel.takes(answer.len()) {
                    return Err(Errno::NOBUFS.into());
                }
                channel.post(&answer, netlink_address(0), Ancillary::default());
            }
            rest = next;
        }
        Ok(SyscallControl::Value(bytes.len() as u64))
    }

    /// `ioctl` of a socket about the interface; `None` for other requests.
    pub(in crate::sentry) fn control_interface(
        &mut self,
        process: &mut Process,
        request: u64,
        at: u64,
    ) -> SyscallResult<Option<SyscallControl>> {
        let internet = |last: [u8; 4]| [&[libc::AF_INET as u8, 0, 0, 0][..], &last].concat();
        let value = match request {
            SIOCGIFCONF => return self.list_interfaces(process, at).map(Some),
            SIOCGIFNAME => {
                let index = copy_in(process, at.wrapping_add(REQUEST_NAME as u64), 4)?;
                if index != INDEX.to_le_bytes() {
                    return Err(Errno::NODEV.into());
                }
                copy_out(process, at, NAME)?;
                return Ok(Some(ZERO));
            }
            SIOCSIFFLAGS => {
                copy_in(process, at, REQUEST)?;
                return Err(Errno::PERM.into());
            }
            SIOCGIFFLAGS => (FLAGS as u16).to_le_bytes().to_vec(),
            SIOCGIFADDR => internet([127, 0, 0, 1]),
            SIOCGIFNETMASK => internet([255, 0, 0, 0]),
            SIOCGIFBRDADDR => internet([0; 4]),
            SIOCGIFMETRIC => vec![0; 4],
            SIOCGIFMTU => MTU.to_le_bytes().to_vec(),
            SIOCGIFHWADDR => [&LOOPBACK.to_le_bytes()[..], &[0; 14]].concat(),
            SIOCGIFINDEX => INDEX.to_le_bytes().to_vec(),
            SIOCGIFTXQLEN => 1000u32.to_le_bytes().to_vec(),
            _ => return Ok(None),
        };
        let name = copy_in(process, at, REQUEST_NAME)?;
        if !name.starts_with(NAME) {
            return Err(Errno::NODEV.into());
        }
        copy_out(process, at.wrapping_add(REQUEST_NAME as u64), &value)?;
        Ok(Some(ZERO))
    }

    /// The addresses of the interface (`struct ifconf`).
    fn list_interfaces(&mut self, process: &mut Process, at: u64) -> SyscallResult {
        let head = copy_in(process, at, 16)?;
        let room = i32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let to = u64::from_le_bytes(head[8..16].try_into().expect("8 bytes"));
        let mut entry = NAME.to_vec();
        entry.resize(REQUEST_NAME, 0);
        entry.extend([libc::AF_INET as u8, 0, 0, 0, 127, 0, 0, 1]);
        entry.resize(REQUEST, 0);
        let len = match to {
            0 => REQUEST,
            _ if room >= REQUEST as i32 => {
                copy_out(process, to, &entry)?;
                REQUEST
            }
            _ => 0,
        };
        copy_out(process, at, &(len as u32).to_le_bytes())?;
        Ok(ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_answered_whatever_their_bytes() {
        let request = |kind: u16, flags: i32| message(kind, flags | 1, (7, 0), &[0; 4]);
        let links = answers(&request(libc::RTM_GETLINK, libc::NLM_F_DUMP), 9, 1000);
        assert_eq!(links.len(), 1);
        let name = links[0].windows(3).any(|bytes| bytes == NAME);
        assert!(name && links[0][8..12] == 7u32.to_le_bytes() && links[0][12..16] == [9, 0, 0, 0]);
        let all = |mut bytes: &[u8]| {
            let mut all = Vec::new();
            while let Some((request, next)) = first_request(bytes) {
                all.extend(answers(request, 9, 1000));
                bytes = next;
            }
            all
        };
        let both = [request(libc::RTM_GETADDR, libc::NLM_F_DUMP), request(99, 0)].concat();
        let replies = all(&both);
        assert_eq!(replies.len(), 2);
        assert_eq!(replies[1][4..6], (libc::NLMSG_ERROR as u16).to_le_bytes());
        for len in 0..both.len() {
            let _ = all(&both[..len]);
        }
        assert!(all(&[0xff; 64]).len() < 5);
    }
}
