//! Files of `/proc/net` that list the guest's sockets: those of all its processes, as in Linux.
//!
//! Promises: nothing in them comes from the host. Connections that were not accepted yet are not
//! listed.

use std::fmt::Write;
use std::net::IpAddr;

use crate::sentry::kernel::channels::Channel;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::net::sockets::{Address, Socket, SocketState};

/// Widths of lines of TCP and UDP.
const TCP_WIDTH: usize = 149;
const UDP_WIDTH: usize = 127;
/// States of TCP in these files.
const ESTABLISHED: u8 = 1;
const SYN_SENT: u8 = 2;
const FIN_WAIT2: u8 = 5;
const CLOSE: u8 = 7;
const CLOSE_WAIT: u8 = 8;
const LISTEN: u8 = 10;

/// An address as these files have it: words in the order of the processor, and the port.
fn encode(address: &Address, newer: bool) -> String {
    let mut text = String::new();
    let mut words = |bytes: &[u8]| {
        for word in bytes.chunks_exact(4) {
            let word = u32::from_ne_bytes(word.try_into().expect("4 bytes"));
            let _ = write!(text, "{word:08X}");
        }
    };
    match (address.ip(), newer) {
        (Some(IpAddr::V4(ip)), false) => words(&ip.octets()),
        (Some(IpAddr::V4(ip)), true) => words(&ip.to_ipv6_mapped().octets()),
        (Some(IpAddr::V6(ip)), true) => words(&ip.octets()),
        (_, newer) => words(if newer { &[0; 16] } else { &[0; 4] }),
    }
    let _ = write!(text, ":{:04X}", address.port());
    text
}

impl Kernel {
    /// The content of a file that lists sockets; `None` for others.
    pub(in crate::sentry) fn list_sockets(&self, name: &[u8]) -> Option<Vec<u8>> {
        let text = match name {
            b"tcp" | b"tcp6" => self.list_tcp(name == b"tcp6"),
            b"udp" | b"udp6" => self.list_udp(name == b"udp6"),
            b"unix" => return Some(self.list_local()),
            _ => return None,
        };
        Some(text.into_bytes())
    }

    /// Sockets of a family with their inode numbers.
    fn sockets_of(&self, family: i32) -> impl Iterator<Item = (u64, &Socket)> + '_ {
        self.table.descriptions().filter_map(move |(id, description)| match &description.open {
            FileObject::Socket(socket) if i32::from(socket.family) == family => {
                Some((self.inode_of(id, &description.open), socket))
            }
            _ => None,
        })
    }

    fn internet_sockets(&self, newer: bool) -> impl Iterator<Item = (u64, &Socket)> + '_ {
        self.sockets_of(if newer { libc::AF_INET6 } else { libc::AF_INET })
    }

    /// The state of a TCP socket, if it is listed, and the bytes that wait in it.
    fn tcp_state(&self, socket: &Socket) -> Option<(u8, usize)> {
        match &socket.stage {
            SocketState::Listening(queue) => Some((LISTEN, queue.len())),
            SocketState::Reaching { .. } => Some((SYN_SENT, 0)),
            SocketState::Connected { incoming, outgoing } => {
                let held = incoming.and_then(|id| self.channels.get(id));
                let ended = held.is_none_or(Channel::has_ended);
                let state = match (outgoing, ended) {
                    (Some(_), false) => ESTABLISHED,
                    (Some(_), true) => CLOSE_WAIT,
                    (None, false) => FIN_WAIT2,
                    (None, true) => return None,
                };
                Some((state, held.map_or(0, Channel::len)))
            }
            SocketState::New | SocketState::Refused(_) | SocketState::Datagrams { .. } => None,
        }
    }

    fn list_tcp(&self, newer: bool) -> String {
        let head = match newer {
            false => {
                "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
            }
            true => {
                "  sl  local_address                         remote_address                        st tx_queue rx_queue tr \
                 tm->when retrnsmt   uid  timeout inode"
            }
        };
        let width = if newer { 0 } else { TCP_WIDTH };
        let mut text = format!("{head:<width$}\n");
        let [user, _] = self.namespaces.users.owner;
        let listed = |(inode, socket)| Some((inode, socket, self.tcp_state(socket)?));
        let mut list: Vec<_> = self.internet_sockets(newer).filter_map(listed).collect();
        list.sort_by_key(|(_, _, (state, _))| *state != LISTEN);
        for (at, (inode, socket, (state, held))) in list.into_iter().enumerate() {
            let (own, peer) = (encode(&socket.own, newer), encode(&socket.peer, newer));
            let line = format!(
                "{at:4}: {own} {peer} {state:02X} 00000000:{held:08X} 00:00000000 00000000 {user:5}        0 {inode} 1 \
                 0000000000000000 20 0 0 10 -1"
            );
            let _ = writeln!(text, "{line:<width$}");
        }
        text
    }

    fn list_udp(&self, newer: bool) -> String {
        let head = match newer {
            false => {
                "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops"
            }
            true => {
                "   sl  local_address                         remote_address                        st tx_queue rx_queue tr \
                 tm->when retrnsmt   uid  timeout inode ref pointer drops"
            }
        };
        let width = if newer { 0 } else { UDP_WIDTH };
        let mut text = format!("{head:<width$}\n");
        let [user, _] = self.namespaces.users.owner;
        let bound = |(_, socket): &(u64, &Socket)| socket.own.port() != 0;
        for (inode, socket) in self.internet_sockets(newer).filter(bound) {
            let SocketState::Datagrams { inbox, .. } = socket.stage else { continue };
            let held = self.channels.get(inbox).map_or(0, Channel::len);
            let state = if socket.peer.port() == 0 { CLOSE } else { ESTABLISHED };
            let (own, peer) = (encode(&socket.own, newer), encode(&socket.peer, newer));
            let at = socket.own.port();
            let line = format!(
                "{at:5}: {own} {peer} {state:02X} 00000000:{held:08X} 00:00000000 00000000 {user:5}        0 {inode} 2 \
                 0000000000000000 0"
            );
            let _ = writeln!(text, "{line:<width$}");
        }
        text
    }

    fn list_local(&self) -> Vec<u8> {
        let mut text = b"Num       RefCount Protocol Flags    Type St Inode Path\n".to_vec();
        for (inode, socket) in self.sockets_of(libc::AF_UNIX) {
            let (kind, connected) = match &socket.stage {
                SocketState::Datagrams { mate, .. } => (libc::SOCK_DGRAM, mate.is_some()),
                _ if socket.packets => (libc::SOCK_SEQPACKET, socket.is_connected()),
                _ => (libc::SOCK_STREAM, socket.is_connected()),
            };
            let listens = matches!(socket.stage, SocketState::Listening(_));
            let (flags, state) = (if listens { 0x10000 } else { 0 }, if connected { 3 } else { 1 });
            text.extend(
                format!("0000000000000000: 00000002 00000000 {flags:08X} {kind:04X} {state:02X} {inode:5}")
                    .into_bytes(),
            );
            let name = socket.own.0.get(2..).unwrap_or_default();
            let name = socket.own.path().unwrap_or(name);
            if !name.is_empty() {
                text.push(b' ');
                text.extend(name.iter().map(|byte| if *byte == 0 { b'@' } else { *byte }));
            }
            text.push(b'\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_the_order_of_the_processor() {
        let four = Address::loopback(libc::AF_INET as u16, 0x1f90);
        assert_eq!(encode(&four, false), "0100007F:1F90");
        let six = Address::loopback(libc::AF_INET6 as u16, 1);
        assert_eq!(encode(&six, true), "00000000000000000000000001000000:0001");
        assert_eq!(encode(&Address::default(), false), "00000000:0000");
    }
}
