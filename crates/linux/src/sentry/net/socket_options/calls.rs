//! Calls on options: `getsockopt` and `setsockopt`.

use rustix::io::Errno;

use super::{
    FIRST_SEGMENT, LOOPBACK_PACKET, LOOPBACK_SEGMENT, MAX_OPTION_SIZE, OPTIONS, Traffic,
    encode_size, tcp_info,
};
use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::net::option_rules::{encode_option, first_value};
use crate::sentry::net::sockets::{Address, NETLINK, NETLINK_BUFFER, Socket, SocketState};
use crate::sentry::result::{SyscallResult, ZERO};

/// Time limits with 64-bit seconds, which the older ones have here as well.
const SO_RCVTIMEO_NEW: i32 = 66;

const SO_SNDTIMEO_NEW: i32 = 67;

/// Segment sizes that a program may ask for.
const SEGMENTS: std::ops::RangeInclusive<u32> = 88..=32_767;

/// Read-only options.
const READ_ONLY: [i32; 8] = [
    libc::SO_TYPE,
    libc::SO_ERROR,
    libc::SO_DOMAIN,
    libc::SO_PROTOCOL,
    libc::SO_ACCEPTCONN,
    libc::SO_PEERCRED,
    libc::SO_PEERSEC,
    libc::SO_COOKIE,
];

/// Whether a socket has options of a level. The error differs between calls that set one and calls
/// that get one.
fn check_level(socket: &Socket, level: i32, sets: bool) -> Result<(), Errno> {
    let transport = if socket.is_for_datagrams() { libc::IPPROTO_UDP } else { libc::IPPROTO_TCP };
    let newer = i32::from(socket.family) == libc::AF_INET6;
    let known =
        level == libc::IPPROTO_IP || level == transport || level == libc::IPPROTO_IPV6 && newer;
    match (socket.own.is_internet(), level) {
        (_, libc::SOL_SOCKET) => Ok(()),
        (true, _) if known => Ok(()),
        (true, _) if sets => Err(Errno::NOPROTOOPT),
        _ => Err(Errno::OPNOTSUPP),
    }
}

impl Sentry {
    /// `setsockopt(2)`: `SO_TIMESTAMPING`, `SO_ZEROCOPY`, packet filters and `UDP_CORK` are errors.
    /// Most options of TCP and IP are stored and change nothing over loopback.
    pub(in crate::sentry) fn sys_setsockopt(
        &mut self,
        process: &Process,
        &[fd, level, optname, optval, optlen, _]: &[u64; 6],
    ) -> SyscallResult {
        self.socket_of(fd)?;
        let (level, name, len) = (level as i32, optname as i32, optlen as i32);
        if len <= 0 && level == libc::SOL_SOCKET {
            return Err(Errno::INVAL.into());
        }
        let value = copy_in(process, optval, (len.max(0) as usize).min(MAX_OPTION_SIZE))?;
        let socket = self.socket_of(fd)?;
        check_level(socket, level, true)?;
        let name = match name {
            SO_RCVTIMEO_NEW if level == libc::SOL_SOCKET => libc::SO_RCVTIMEO,
            SO_SNDTIMEO_NEW if level == libc::SOL_SOCKET => libc::SO_SNDTIMEO,
            name => name,
        };
        if level == libc::SOL_SOCKET && READ_ONLY.contains(&name) {
            return Err(Errno::NOPROTOOPT.into());
        }
        if (level, name) == (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) && socket.own.port() != 0 {
            return Err(Errno::INVAL.into());
        }
        let (streams, number) = (!socket.is_for_datagrams(), value.first_chunk());
        if level == libc::IPPROTO_IP && streams {
            let mut options = socket.options.clone();
            if let Some(changed) = options.change_groups(name, &value) {
                changed?;
                self.socket_mut(fd)?.options = options;
                return Ok(ZERO);
            }
        }
        if (level, name) == (libc::IPPROTO_IPV6, libc::IPV6_ADDRFORM) {
            let family = number.copied().map(i32::from_le_bytes).ok_or(Errno::INVAL)?;
            return self.change_family(fd, family);
        }
        let value = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF) => encode_size(name, &value)?,
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {
                let given = value.get(..4).ok_or(Errno::INVAL)?;
                let given = u32::from_le_bytes(given.try_into().map_err(|_| Errno::INVAL)?);
                if given != 0 && !SEGMENTS.contains(&given) {
                    return Err(Errno::INVAL.into());
                }
                given.to_le_bytes().to_vec()
            }
            _ => {
                let open = matches!(
                    socket.stage,
                    SocketState::Connected { .. } | SocketState::Listening(_)
                );
                encode_option((level, name), &value, (!socket.is_for_datagrams(), open))?
            }
        };
        let options = &mut self.socket_mut(fd)?.options.0;
        if options.len() >= OPTIONS && !options.contains_key(&(level, name)) {
            return Err(Errno::NOBUFS.into());
        }
        options.insert((level, name), value);
        let description = self.state.table.id(fd)?;
        self.change().heed_options(description);
        if level == libc::IPPROTO_TCP && [libc::TCP_CORK, libc::TCP_NODELAY].contains(&name) {
            self.send_held_back(fd)?;
        }
        Ok(ZERO)
    }

    /// Makes a connection of IPv6 that leads to an IPv4 address one of IPv4 (`IPV6_ADDRFORM`).
    fn change_family(&mut self, descriptor: u64, family: i32) -> SyscallResult {
        let socket = self.socket_mut(descriptor)?;
        if family != libc::AF_INET {
            return Err(Errno::INVAL.into());
        }
        if !socket.is_connected() {
            return Err(Errno::NOTCONN.into());
        }
        let ends = [&socket.own, &socket.peer].map(|end| Some((end.destination()?, end.port())));
        let [Some(own), Some(peer)] = ends else { return Err(Errno::ADDRNOTAVAIL.into()) };
        if !own.0.is_ipv4() || !peer.0.is_ipv4() {
            return Err(Errno::ADDRNOTAVAIL.into());
        }
        socket.family = family as u16;
        let [own, peer] = [own, peer].map(|(ip, port)| Address::of_ip(family as u16, ip, port));
        (socket.own, socket.peer, socket.given) = (own, peer, Address::default());
        Ok(ZERO)
    }

    /// Sends bytes that a connection holds back, unless it still has to (`TCP_CORK`).
    fn send_held_back(&mut self, descriptor: u64) -> SyscallResult<()> {
        let socket = self.socket_of(descriptor)?;
        let corked = socket.options.is_on(libc::IPPROTO_TCP, libc::TCP_CORK);
        if let SocketState::Connected { outgoing: Some(outgoing), .. } = socket.stage
            && !corked
        {
            self.change().channels.release_cork(outgoing);
        }
        Ok(())
    }

    /// The pending error, which is cleared.
    fn take_error(&mut self, descriptor: u64) -> SyscallResult<i32> {
        if let SocketState::Refused(error) = self.socket_of(descriptor)?.stage {
            self.socket_mut(descriptor)?.stage = SocketState::New;
            return Ok(error);
        }
        if let SocketState::Connected { incoming: Some(incoming), .. } =
            self.socket_of(descriptor)?.stage
            && self.state.channels.get(incoming).is_some_and(|channel| channel.reset)
        {
            return Ok(self.take_reset(incoming).raw_os_error());
        }
        Ok(if self.take_refusal(descriptor)? { libc::ECONNREFUSED } else { 0 })
    }

    /// `getsockopt(2)`: the segment size, the MTU and `TCP_INFO` of a connection are those of
    /// loopback.
    pub(in crate::sentry) fn sys_getsockopt(
        &mut self,
        process: &mut Process,
        &[fd, level, optname, optval, optlen, _]: &[u64; 6],
    ) -> SyscallResult {
        let socket = self.socket_of(fd)?;
        let int = |value: i32| value.to_le_bytes().to_vec();
        let (level, name) = (level as i32, optname as i32);
        check_level(socket, level, false)?;
        let name = match name {
            SO_RCVTIMEO_NEW if level == libc::SOL_SOCKET => libc::SO_RCVTIMEO,
            SO_SNDTIMEO_NEW if level == libc::SOL_SOCKET => libc::SO_SNDTIMEO,
            name => name,
        };
        let set = socket.options.get(level, name).map(<[u8]>::to_vec);
        let value = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_TYPE) => int(match () {
                () if socket.is_for_datagrams() => libc::SOCK_DGRAM,
                () if socket.packets => libc::SOCK_SEQPACKET,
                () => libc::SOCK_STREAM,
            }),
            (libc::SOL_SOCKET, libc::SO_ERROR) => int(self.take_error(fd)?),
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => int(socket.family.into()),
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => int(match socket.own.is_internet() {
                true if socket.is_for_datagrams() => libc::IPPROTO_UDP,
                true => libc::IPPROTO_TCP,
                false => 0,
            }),
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
                int(matches!(socket.stage, SocketState::Listening(_)).into())
            }
            (libc::SOL_SOCKET, libc::SO_PEERCRED) => {
                // The peer of an IP connection is unknown.
                let mate = if socket.own.is_internet() { Default::default() } else { socket.mate };
                let [user, group] = match mate.process {
                    0 => [u32::MAX; 2],
                    _ => self.state.seen_owner(mate.user),
                };
                StructBuilder::default().int(mate.process).int(user).int(group).0
            }
            (libc::SOL_SOCKET, libc::SO_COOKIE) => {
                (self.state.table.id(fd)? + 1).to_le_bytes().to_vec()
            }
            (libc::IPPROTO_TCP, libc::TCP_INFO) => {
                let ended = match socket.stage {
                    SocketState::Connected { incoming: Some(id), .. } => {
                        self.state.channels.get(id).is_none_or(|channel| channel.writers == 0)
                    }
                    _ => false,
                };
                tcp_info(socket, self.traffic(socket), ended)
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) if socket.is_connected() => {
                int(LOOPBACK_SEGMENT as i32)
            }
            (libc::IPPROTO_IP, libc::IP_MTU) | (libc::IPPROTO_IPV6, libc::IPV6_MTU) => {
                if !socket.is_connected() && socket.peer.0.is_empty() {
                    return Err(Errno::NOTCONN.into());
                }
                int(LOOPBACK_PACKET as i32 + 1)
            }
            _ if set.is_some() => set.unwrap_or_default(),
            (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF)
                if i32::from(socket.family) == NETLINK =>
            {
                int(NETLINK_BUFFER as i32)
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF) => {
                // As in Linux, including its bookkeeping bytes.
                int(2 * crate::sentry::kernel::channels::CAPACITY as i32)
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => int(FIRST_SEGMENT as i32),
            _ => first_value(level, name).ok_or(Errno::NOPROTOOPT)?,
        };
        let room = copy_in(process, optlen, 4)?;
        let room = i32::from_le_bytes([room[0], room[1], room[2], room[3]]);
        if room < 0 {
            return Err(Errno::INVAL.into());
        }
        // A small number of IP fits a byte.
        let byte = level == libc::IPPROTO_IP
            && (1..4).contains(&room)
            && value.len() == 4
            && value[1..] == [0; 3];
        let reply = &value[..value.len().min(if byte { 1 } else { room as usize })];
        copy_out(process, optval, reply)?;
        copy_out(process, optlen, &(reply.len() as u32).to_le_bytes())?;
        Ok(ZERO)
    }

    /// Bytes that a connection has received and sent.
    fn traffic(&self, socket: &Socket) -> Traffic {
        let SocketState::Connected { incoming, outgoing } = socket.stage else { return [0; 2] };
        [incoming, outgoing].map(|id| {
            id.and_then(|id| self.state.channels.get(id)).map_or(0, |channel| channel.passed())
        })
    }

    /// When a wait for `events` of a description ends by its socket's options: as they were when it
    /// began, or from now on.
    pub(in crate::sentry) fn limited(&self, open: &FileObject, events: u16) -> Option<u64> {
        let FileObject::Socket(socket) = open else { return None };
        let length = socket.options.patience(events)?;
        let begun = self.resumed.as_ref().and_then(|wait| wait.until);
        Some(begun.unwrap_or_else(|| self.now().saturating_add(length)))
    }
}

impl Kernel {
    /// Puts options of a local socket into effect that concern its channels: the size of its
    /// sender's buffer, and whether it wants credentials.
    pub(in crate::sentry) fn heed_options(&mut self, description: u64) {
        let Some(FileObject::Socket(socket)) =
            self.table.description(description).map(|description| &description.open)
        else {
            return;
        };
        if socket.own.is_internet() {
            let size = socket.options.number(libc::SOL_SOCKET, libc::SO_RCVBUF);
            if let (SocketState::Datagrams { inbox, .. }, Some(size)) = (&socket.stage, size) {
                self.channels.set_capacity(*inbox, size as usize / 2);
            }
            return;
        }
        let named = socket.options.is_on(libc::SOL_SOCKET, libc::SO_PASSCRED);
        let room = socket.options.send_room();
        let (incoming, outgoing) = match &socket.stage {
            SocketState::Connected { incoming, outgoing } => (*incoming, *outgoing),
            SocketState::Datagrams { inbox, mate, .. } => {
                let other = mate.and_then(|mate| self.table.description(mate));
                let other = match other.map(|other| &other.open) {
                    Some(FileObject::Socket(Socket {
                        stage: SocketState::Datagrams { inbox, .. },
                        ..
                    })) => Some(*inbox),
                    _ => None,
                };
                (Some(*inbox), other)
            }
            _ => return,
        };
        if let Some(channel) = incoming.and_then(|id| self.channels.get_mut(id)) {
            channel.named = named;
        }
        if let (Some(id), Some(room)) = (outgoing, room) {
            self.channels.set_capacity(id, room);
        }
    }
}
