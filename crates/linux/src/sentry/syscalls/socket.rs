//! System calls on sockets. A connection is within the guest, or from the caller of the guest, or
//! leads to a destination that the opener grants (`net::outbound`).

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::fs::permissions::WRITE;
use crate::sentry::fs::proc_files::ResolvedPath;
use crate::sentry::fs::special_files::SOCKET;
use crate::sentry::kernel::channels::ChannelEnd;
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::peer_credentials::PeerCredentials;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::users::EFFECTIVE;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::net::sockets::{
    Address, BACKLOG, EPHEMERAL, IncomingConnection, MAX_ADDRESS, NETLINK, Socket, SocketState,
};
use crate::sentry::result::{SyscallResult, ZERO};
use crate::sentry::syscalls::file::Pair;

use afresh_files::{Kind, New, Walk};
use rustix::io::Errno;

/// Bytes of `struct sockaddr_nl`.
const NETLINK_ADDRESS: usize = 12;
/// Flags in the type of a new socket.
pub(in crate::sentry) const SOCKET_FLAGS: i32 = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;

pub(in crate::sentry) fn address_in(
    process: &Process,
    at: u64,
    len: u64,
) -> SyscallResult<Address> {
    if !(2..=MAX_ADDRESS as u64 + 18).contains(&len) {
        return Err(Errno::INVAL.into());
    }
    Ok(Address(copy_in(process, at, len as usize)?))
}

/// Stores an address, truncated to the room, and its full length.
pub(in crate::sentry) fn address_out(
    process: &mut Process,
    address: &Address,
    to: u64,
    len: u64,
) -> SyscallResult<()> {
    if to == 0 || len == 0 {
        return Ok(());
    }
    let room = copy_in(process, len, 4)?;
    let room = i32::from_le_bytes([room[0], room[1], room[2], room[3]]);
    let room = usize::try_from(room).map_err(|_| Errno::INVAL)?;
    let bytes = &address.0[..address.0.len().min(room)];
    copy_out(process, to, bytes)?;
    copy_out(process, len, &(address.0.len() as u32).to_le_bytes())
}

impl Kernel {
    /// Whether a socket listens, with room in its backlog.
    pub(in crate::sentry) fn has_backlog(&self, listener: u64) -> bool {
        let socket = match self.table.description(listener).map(|d| &d.open) {
            Some(FileObject::Socket(socket)) => socket,
            _ => return false,
        };
        matches!(&socket.stage, SocketState::Listening(queue) if queue.len() < BACKLOG)
    }

    /// A connection to the listener at `to`: channels as the connecting side has them.
    pub(in crate::sentry) fn arrive(
        &mut self,
        to: u64,
        peer: Address,
        own: Address,
        process: PeerCredentials,
    ) -> Result<(u64, u64), Errno> {
        if !self.has_backlog(to) {
            return Err(Errno::CONNREFUSED);
        }
        let there = self.channels.add().ok_or(Errno::NFILE)?;
        let Some(back) = self.channels.add() else {
            self.leave(there, false);
            self.leave(there, true);
            return Err(Errno::NFILE);
        };
        let until = None;
        let arrival =
            IncomingConnection { incoming: there, outgoing: back, peer, own, process, until };
        self.queue(to, arrival);
        // The socket that accepts it may want credentials.
        if let Some(channel) = self.channels.get_mut(there) {
            channel.named = true;
        }
        Ok((back, there))
    }

    fn queue(&mut self, to: u64, arrival: IncomingConnection) {
        if let Some(FileObject::Socket(socket)) =
            self.table.description_mut(to).map(|d| &mut d.open)
            && let SocketState::Listening(queue) = &mut socket.stage
        {
            queue.push(arrival);
            socket.edges += 1;
        }
    }

    /// A connection of the caller to the listening socket, with a request. Its output is the call's
    /// answer.
    pub(crate) fn call_in(&mut self, request: &[u8]) -> bool {
        let Some(to) = self.listener().filter(|_| self.channels.has_room_for_pair()) else {
            return false;
        };
        let Some(incoming) = self.channels.add_caller(ChannelEnd::Asks, request) else {
            return false;
        };
        let Some(outgoing) = self.channels.add_caller(ChannelEnd::Listens, &[]) else {
            return false;
        };
        let (family, port) = match self.table.description(to).map(|d| &d.open) {
            Some(FileObject::Socket(socket)) => (socket.family, socket.own.port()),
            _ => return false,
        };
        let peer = Address::loopback(family, EPHEMERAL.end);
        let own = Address::loopback(family, port);
        let (process, until) = (PeerCredentials::default(), None);
        self.queue(to, IncomingConnection { incoming, outgoing, peer, own, process, until });
        true
    }

    /// Whether the guest may still answer the caller.
    pub(crate) fn is_called(&self) -> bool {
        self.channels.iter().any(|(_, c)| c.end == ChannelEnd::Listens && c.writers > 0)
    }

    /// Whether the caller has connections.
    pub(crate) fn has_callers(&self) -> bool {
        self.channels.callers().next().is_some()
    }

    /// The caller hangs up: its connections have no other side any more.
    pub(crate) fn hang_up(&mut self) {
        let callers: Vec<_> = self.channels.callers().collect();
        callers.into_iter().for_each(|id| self.channels.let_go(id));
    }
}

impl Sentry {
    pub(in crate::sentry) fn socket_of(&self, descriptor: u64) -> Result<&Socket, Errno> {
        let description = self.state.table.get(descriptor)?;
        match &description.open {
            FileObject::Socket(socket) => Ok(socket),
            _ if description.is_path() => Err(Errno::BADF),
            _ => Err(Errno::NOTSOCK),
        }
    }

    pub(in crate::sentry) fn socket_mut(&mut self, descriptor: u64) -> Result<&mut Socket, Errno> {
        match &mut self.change().table.get_mut(descriptor)?.open {
            FileObject::Socket(socket) => Ok(socket),
            _ => Err(Errno::NOTSOCK),
        }
    }

    /// `socket(2)`: local sockets, TCP and UDP, and netlink that lists the interface `lo`. Raw IP
    /// sockets and packet sockets are `EPERM`.
    pub(in crate::sentry) fn sys_socket(
        &mut self,
        family: u64,
        kind: u64,
        protocol: u64,
    ) -> SyscallResult {
        let known = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6].contains(&(family as i32));
        let netlink = family as i32 == NETLINK;
        if family as i32 == libc::AF_PACKET {
            return Err(Errno::PERM.into());
        }
        if !known && !netlink {
            return Err(Errno::AFNOSUPPORT.into());
        }
        if netlink && ![libc::SOCK_RAW, libc::SOCK_DGRAM].contains(&(kind as i32 & !SOCKET_FLAGS)) {
            return Err(Errno::SOCKTNOSUPPORT.into());
        }
        if netlink && protocol as i32 != libc::NETLINK_ROUTE {
            return Err(Errno::PROTONOSUPPORT.into());
        }
        let local = family as i32 == libc::AF_UNIX;
        let protocols = match (local, kind as i32 & !SOCKET_FLAGS) {
            (true, _) => [0, libc::PF_UNIX],
            (false, libc::SOCK_DGRAM) => [0, libc::IPPROTO_UDP],
            _ => [0, libc::IPPROTO_TCP],
        };
        let pings = [libc::IPPROTO_ICMP, libc::IPPROTO_ICMPV6].contains(&(protocol as i32));
        match kind as i32 & !SOCKET_FLAGS {
            libc::SOCK_RAW if known && !local && protocol != 0 => return Err(Errno::PERM.into()),
            libc::SOCK_DGRAM if known && !local && pings => return Err(Errno::ACCESS.into()),
            libc::SOCK_STREAM | libc::SOCK_DGRAM | libc::SOCK_SEQPACKET
                if known && !protocols.contains(&(protocol as i32)) =>
            {
                return Err(Errno::PROTONOSUPPORT.into());
            }
            _ => {}
        }
        // Raw local sockets are for datagrams.
        let raw = (local || netlink) && kind as i32 & !SOCKET_FLAGS == libc::SOCK_RAW;
        if raw || kind as i32 & !SOCKET_FLAGS == libc::SOCK_DGRAM {
            self.state.table.check_room()?;
            let inbox = self.change().channels.add_inbox().ok_or(Errno::NFILE)?;
            let socket = Socket::for_datagrams(family as u16, inbox);
            return self.add(FileObject::Socket(socket), kind as i32 & SOCKET_FLAGS | libc::O_RDWR);
        }
        let packets = kind as i32 & !SOCKET_FLAGS == libc::SOCK_SEQPACKET && local;
        match kind as i32 & !SOCKET_FLAGS {
            libc::SOCK_STREAM => {}
            _ if packets => {}
            libc::SOCK_RAW => return Err(Errno::PROTONOSUPPORT.into()),
            kind if (1..=10).contains(&kind) => return Err(Errno::SOCKTNOSUPPORT.into()),
            _ => return Err(Errno::INVAL.into()),
        }
        let socket = Socket { packets, ..Socket::new(family as u16) };
        self.add(FileObject::Socket(socket), kind as i32 & SOCKET_FLAGS | libc::O_RDWR)
    }

    /// `socketpair(2)`: the protocol is not checked.
    pub(in crate::sentry) fn sys_socketpair(
        &mut self,
        process: &mut Process,
        family: u64,
        kind: u64,
        protocol: u64,
        to: u64,
    ) -> SyscallResult {
        let datagrams = [libc::SOCK_DGRAM, libc::SOCK_RAW].contains(&(kind as i32 & !SOCKET_FLAGS));
        let packets = kind as i32 & !SOCKET_FLAGS == libc::SOCK_SEQPACKET;
        let known = datagrams || packets || kind as i32 & !SOCKET_FLAGS == libc::SOCK_STREAM;
        match family as i32 {
            libc::AF_UNIX if known && protocol > 1 => return Err(Errno::PROTONOSUPPORT.into()),
            libc::AF_UNIX if known => {}
            libc::AF_UNIX | libc::AF_INET | libc::AF_INET6 => {
                let any = (1..=10).contains(&(kind as i32 & !SOCKET_FLAGS));
                let internet = family as i32 != libc::AF_UNIX && (datagrams || known);
                let fits = match kind as i32 & !SOCKET_FLAGS {
                    libc::SOCK_STREAM => [0, libc::IPPROTO_TCP],
                    libc::SOCK_DGRAM => [0, libc::IPPROTO_UDP],
                    // No protocol has packets, and a raw one must be named.
                    _ => [-1, -1],
                };
                return Err(match internet {
                    true if fits.contains(&(protocol as i32)) => Errno::OPNOTSUPP,
                    true if kind as i32 & !SOCKET_FLAGS == libc::SOCK_RAW && protocol != 0 => {
                        Errno::PERM
                    }
                    true => Errno::PROTONOSUPPORT,
                    false if any || kind as i32 & !SOCKET_FLAGS == 0 => Errno::SOCKTNOSUPPORT,
                    false => Errno::INVAL,
                }
                .into());
            }
            _ => return Err(Errno::AFNOSUPPORT.into()),
        }
        let flags = kind as i32 & libc::O_NONBLOCK | libc::O_RDWR;
        let mate = self.state.own_credentials(EFFECTIVE);
        let state = self.change();
        if !state.channels.has_room_for_pair() {
            return Err(Errno::NFILE.into());
        }
        let mut channel = || match datagrams {
            true => state.channels.add_inbox().ok_or(Errno::NFILE),
            false => state.channels.add().ok_or(Errno::NFILE),
        };
        let (one, other) = (channel()?, channel()?);
        let side = |incoming, outgoing| {
            let address = Address::loopback(libc::AF_UNIX as u16, 0);
            let socket = match datagrams {
                true => Socket {
                    peer: address,
                    mate,
                    ..Socket::for_datagrams(libc::AF_UNIX as u16, incoming)
                },
                false => Socket {
                    mate,
                    packets,
                    ..Socket::connected(address.clone(), address, incoming, outgoing)
                },
            };
            Description::new(FileObject::Socket(socket), flags)
        };
        let close = kind as i32 & libc::SOCK_CLOEXEC != 0;
        let numbers: Pair = state.add_pair(side(one, other), side(other, one), close)?;
        if datagrams {
            let number = |at: usize| u64::from(numbers[at]) | u64::from(numbers[at + 1]) << 8;
            for (own, other) in [(number(0), number(4)), (number(4), number(0))] {
                let other = state.table.id(other)?;
                if let FileObject::Socket(socket) = &mut state.table.get_mut(own)?.open
                    && let SocketState::Datagrams { mate, .. } = &mut socket.stage
                {
                    *mate = Some(other);
                }
            }
        }
        self.report_pair(process, to, numbers)
    }

    /// `bind(2)`: IP addresses are those of loopback and unspecified ones, and ports below 1,024
    /// take no privilege.
    pub(in crate::sentry) fn sys_bind(
        &mut self,
        process: &Process,
        descriptor: u64,
        at: u64,
        len: u64,
    ) -> SyscallResult {
        let socket = self.socket_of(descriptor)?;
        let mut address = address_in(process, at, len)?;
        if i32::from(socket.family) == NETLINK && !socket.is_bound() {
            return self.bind_netlink(descriptor, &address.0);
        }
        if socket.is_local() && (!address.is_for_local() || len > MAX_ADDRESS as u64) {
            return Err(Errno::INVAL.into());
        }
        if socket.own != Address::loopback(socket.family, 0) {
            return Err(Errno::INVAL.into());
        }
        if address.is_unnamed() && socket.is_local() {
            address = self.state.free_name()?;
        }
        // As a program of the first days wrote it: any address without a family.
        let unset = i32::from(address.family()) == libc::AF_UNSPEC
            && i32::from(socket.family) == libc::AF_INET
            && address.0.get(4..8) == Some(&[0; 4]);
        if unset {
            address.0[..2].copy_from_slice(&socket.family.to_le_bytes());
        }
        if !address.is_of(socket.family) {
            let short = (len as usize) < Address::least(socket.family);
            return Err(if short { Errno::INVAL } else { Errno::AFNOSUPPORT }.into());
        }
        if !address.is_local() {
            return Err(Errno::ADDRNOTAVAIL.into());
        }
        let datagrams = socket.is_for_datagrams();
        let given = address.clone().bound();
        if address.is_internet() && address.port() == 0 {
            address.set_port(self.state.free_port(datagrams)?);
        } else if self.state.is_taken(socket, &address) || self.state.is_closing(socket, &address) {
            return Err(Errno::ADDRINUSE.into());
        }
        if let Some(path) = address.path() {
            self.name_socket(path)?;
        }
        let socket = self.socket_mut(descriptor)?;
        (socket.own, socket.given) = (address.bound(), given);
        Ok(ZERO)
    }

    /// Gives a local socket a name in the tree, as bind does.
    fn name_socket(&mut self, path: &[u8]) -> SyscallResult<()> {
        let from = libc::AT_FDCWD as u64;
        let ResolvedPath::Place(place) = self.reach(from, path, Walk::name)? else {
            return Err(Errno::PERM.into());
        };
        if place.found.is_some() {
            return Err(Errno::ADDRINUSE.into());
        }
        self.create_name(&place, New::Device(SOCKET), 0o777)
    }

    /// Refuses a path that names no local socket any more.
    pub(in crate::sentry) fn check_name(&self, address: &Address) -> SyscallResult<()> {
        let Some(path) = address.path() else { return Ok(()) };
        let ResolvedPath::Place(place) = self.reach(libc::AT_FDCWD as u64, path, |walk| walk)?
        else {
            return Err(Errno::CONNREFUSED.into());
        };
        let node = place.node()?;
        let stat = self.state.tree.stat(node)?;
        if stat.kind == Kind::Device && stat.device == SOCKET {
            self.state.may(node, WRITE)?;
            return Ok(());
        }
        Err(Errno::CONNREFUSED.into())
    }

    /// `shutdown(2)`, as on Linux.
    pub(in crate::sentry) fn sys_shutdown(&mut self, descriptor: u64, how: u64) -> SyscallResult {
        let stage = self.socket_of(descriptor)?.stage.clone();
        let (read, write) = match how as i32 {
            libc::SHUT_RD => (true, false),
            libc::SHUT_WR => (false, true),
            libc::SHUT_RDWR => (true, true),
            _ => return Err(Errno::INVAL.into()),
        };
        let (incoming, outgoing) = match stage {
            SocketState::Connected { incoming, outgoing } => (incoming, outgoing),
            // Threads that wait in `accept` get an error, and pending connections end.
            SocketState::Listening(queue) if read => {
                self.socket_mut(descriptor)?.stage = SocketState::New;
                let state = self.change();
                for arrival in queue {
                    if let Some(channel) = state.channels.get_mut(arrival.outgoing) {
                        channel.reset = true;
                    }
                    state.refuse_connection(&arrival);
                    state.leave(arrival.incoming, false);
                    state.leave(arrival.outgoing, true);
                }
                return Ok(ZERO);
            }
            SocketState::Listening(_) => return Ok(ZERO),
            SocketState::Datagrams { inbox, .. } => {
                let socket = self.socket_of(descriptor)?;
                let (local, connected) = (socket.is_local(), !socket.peer.0.is_empty());
                if !local && !connected {
                    return Err(Errno::NOTCONN.into());
                }
                self.socket_mut(descriptor)?.mute |= write;
                let channel = self.change().channels.get_mut(inbox).ok_or(Errno::IO)?;
                channel.shut |= read;
                channel.edges += 1;
                return Ok(ZERO);
            }
            // Nothing can be sent or received anyway.
            SocketState::New if self.socket_of(descriptor)?.is_local() => return Ok(ZERO),
            _ => return Err(Errno::NOTCONN.into()),
        };
        if write {
            // The side that ends a connection first keeps its address.
            let socket = self.socket_of(descriptor)?.clone();
            self.change().note_closed(&socket);
        }
        let outgoing_left = outgoing.filter(|_| !write);
        let stage = SocketState::Connected { incoming, outgoing: outgoing_left };
        let socket = self.socket_mut(descriptor)?;
        socket.stage = stage;
        socket.left = outgoing.filter(|_| write).or(socket.left);
        let state = self.change();
        // Received bytes may still be read.
        if read && let Some(channel) = incoming.and_then(|id| state.channels.get_mut(id)) {
            channel.shut = true;
            channel.edges += 1;
        }
        if let Some(id) = outgoing.filter(|_| write) {
            state.leave(id, true);
        }
        Ok(ZERO)
    }

    /// Stores the address of a socket.
    fn write_address(
        &self,
        process: &mut Process,
        address: &Address,
        to: u64,
        len: u64,
    ) -> SyscallResult {
        let room = copy_in(process, len, 4)?;
        let room = i32::from_le_bytes([room[0], room[1], room[2], room[3]]);
        if room < 0 {
            return Err(Errno::INVAL.into());
        }
        if to == 0 && room > 0 {
            return Err(Errno::FAULT.into());
        }
        address_out(process, address, to, len)?;
        Ok(ZERO)
    }

    /// `getsockname(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getsockname(
        &mut self,
        process: &mut Process,
        &[fd, addr, addrlen, _, _, _]: &[u64; 6],
    ) -> SyscallResult {
        let socket = self.socket_of(fd)?;
        let address = match socket.is_bound() || !socket.own.is_internet() {
            true => socket.own.clone(),
            false => Address::any(socket.family),
        };
        self.write_address(process, &address, addr, addrlen)
    }

    /// Whether the peer of an IP connection has reset it, and the error was reported.
    fn is_broken_off(&self, socket: &Socket) -> bool {
        let SocketState::Connected { incoming: Some(incoming), outgoing: Some(outgoing) } =
            socket.stage
        else {
            return false;
        };
        let channel = |id| self.state.channels.get(id);
        socket.own.is_internet()
            && channel(incoming).is_some_and(|channel| channel.shut && channel.writers == 0)
            && channel(outgoing).is_some_and(|channel| channel.readers == 0)
    }

    /// `getpeername(2)`, as on Linux.
    pub(in crate::sentry) fn sys_getpeername(
        &mut self,
        process: &mut Process,
        &[fd, addr, addrlen, _, _, _]: &[u64; 6],
    ) -> SyscallResult {
        let socket = self.socket_of(fd)?;
        if i32::from(socket.family) == NETLINK {
            // The kernel's address: no port and no groups.
            let mut kernel = socket.family.to_le_bytes().to_vec();
            kernel.resize(NETLINK_ADDRESS, 0);
            return self.write_address(process, &Address(kernel), addr, addrlen);
        }
        let named = socket.is_local() || socket.peer.port() != 0;
        let mail = socket.is_for_datagrams() && !socket.peer.0.is_empty() && named;
        if !matches!(socket.stage, SocketState::Connected { .. }) && !mail {
            return Err(Errno::NOTCONN.into());
        }
        if self.is_broken_off(socket) {
            return Err(Errno::NOTCONN.into());
        }
        let address = self.sender_address(fd, socket.peer.clone())?;
        self.write_address(process, &address, addr, addrlen)
    }
}
