//! Control messages that a receiver may ask for: the address that a datagram was sent to, its hop
//! limit and class, and the time; and the bytes that a connection holds after a read.

use rustix::io::Errno;

use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::time::now;
use crate::sentry::net::option_rules::IPV6_RECVORIGDSTADDR;
use crate::sentry::net::sockets::{Address, ReceivedMessage, SocketState};

/// Level and type of a control message, and its data.
type ControlMessage = ((i32, i32), Vec<u8>);

/// The interface that all datagrams come over.
const INTERFACE: u32 = 1;

impl Sentry {
    /// The control messages about a datagram that its receiver asked for.
    pub(in crate::sentry) fn packet_info(
        &self,
        descriptor: u64,
        came: &ReceivedMessage,
    ) -> Result<Vec<ControlMessage>, Errno> {
        let socket = self.socket_of(descriptor)?;
        let mut list = Vec::new();
        if let SocketState::Connected { incoming: Some(incoming), .. } = socket.stage
            && socket.options.is_on(libc::IPPROTO_TCP, libc::TCP_INQ)
        {
            let left = self.state.channels.get(incoming).map_or(0, |channel| channel.len());
            list.push(((libc::IPPROTO_TCP, libc::TCP_INQ), (left as u32).to_le_bytes().to_vec()));
        }
        let (true, Some(from)) = (socket.is_for_datagrams(), &came.from) else { return Ok(list) };
        let asked = |level, name| socket.options.is_on(level, name);
        let time = now();
        let (seconds, nanos) = (time.seconds as u64, u64::from(time.nanos));
        let stamp = |rest| StructBuilder::default().word(seconds).word(rest).0;
        if asked(libc::SOL_SOCKET, libc::SO_TIMESTAMPNS) {
            list.push(((libc::SOL_SOCKET, libc::SO_TIMESTAMPNS), stamp(nanos)));
        } else if asked(libc::SOL_SOCKET, libc::SO_TIMESTAMP) {
            list.push(((libc::SOL_SOCKET, libc::SO_TIMESTAMP), stamp(nanos / 1000)));
        }
        let Some(ip) = from.ip().filter(|_| socket.own.is_internet()) else { return Ok(list) };
        // A socket that is bound to any address was reached at the loopback address.
        let own = socket.own.destination().unwrap_or(ip);
        let [hops, class] = came.packet;
        let int = |value: u8| i32::from(value).to_le_bytes().to_vec();
        if i32::from(socket.family) == libc::AF_INET {
            if let (true, std::net::IpAddr::V4(own)) =
                (asked(libc::IPPROTO_IP, libc::IP_PKTINFO), own)
            {
                let info = [&INTERFACE.to_le_bytes()[..], &own.octets(), &own.octets()].concat();
                list.push(((libc::IPPROTO_IP, libc::IP_PKTINFO), info));
            }
            if asked(libc::IPPROTO_IP, libc::IP_RECVTTL) {
                list.push(((libc::IPPROTO_IP, libc::IP_TTL), int(hops)));
            }
            if asked(libc::IPPROTO_IP, libc::IP_RECVTOS) {
                list.push(((libc::IPPROTO_IP, libc::IP_TOS), vec![class]));
            }
            if asked(libc::IPPROTO_IP, libc::IP_RECVORIGDSTADDR) {
                let name = Address::of_ip(socket.family, own, socket.own.port()).0;
                list.push(((libc::IPPROTO_IP, libc::IP_ORIGDSTADDR), name));
            }
            return Ok(list);
        }
        if asked(libc::IPPROTO_IPV6, IPV6_RECVORIGDSTADDR) {
            let name = Address::of_ip(socket.family, own, socket.own.port()).0;
            list.push(((libc::IPPROTO_IPV6, IPV6_RECVORIGDSTADDR), name));
        }
        let own = match own {
            std::net::IpAddr::V4(own) => own.to_ipv6_mapped(),
            std::net::IpAddr::V6(own) => own,
        };
        if asked(libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO) {
            let info = [&own.octets()[..], &INTERFACE.to_le_bytes()].concat();
            list.push(((libc::IPPROTO_IPV6, libc::IPV6_PKTINFO), info));
        }
        if asked(libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT) {
            list.push(((libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT), int(hops)));
        }
        if asked(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS) {
            list.push(((libc::IPPROTO_IPV6, libc::IPV6_TCLASS), int(class)));
        }
        Ok(list)
    }
}
