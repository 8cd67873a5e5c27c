//! Datagrams: between local sockets, and over loopback addresses. Each socket has one channel,
//! which others put whole messages into.
//!
//! Promises: a message arrives whole, once, in order, or not at all; messages on their way are
//! bounded by the receiver's channel. A local sender waits for room; over loopback, messages
//! without room are lost, as on a network.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::channels::Ancillary;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::{ERR, HUP, IN, OUT, RDHUP, SEND_ROOM};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::kernel::users::REAL;
use crate::sentry::mm::user_memory::copy_out;
use crate::sentry::net::sockets::{
    Address, CORKED, ReceivedMessage, SentControl, Socket, SocketState,
};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::connect::source;

/// Maximum bytes of a datagram over loopback.
const LONGEST_INTERNET: usize = 65507;
/// Maximum bytes of unfinished datagrams of all sockets.
pub(in crate::sentry) const MAX_CORKED_BYTES: usize = 16 << 20;

impl Kernel {
    pub(in crate::sentry) fn datagram_socket(&self, id: u64) -> Option<(&Socket, u64)> {
        match self.table.description(id).map(|description| &description.open) {
            Some(FileObject::Socket(socket)) => match &socket.stage {
                SocketState::Datagrams { inbox, .. } => Some((socket, *inbox)),
                _ => None,
            },
            _ => None,
        }
    }

    /// Refuses `more` bytes of unfinished datagrams if all sockets have too many.
    pub(in crate::sentry) fn check_corked(&self, more: usize) -> Result<(), Errno> {
        let sockets =
            self.table.descriptions().filter_map(|(_, description)| match &description.open {
                FileObject::Socket(socket) => Some(socket.corked.len()),
                _ => None,
            });
        let all = sockets.sum::<usize>() + more;
        if all <= MAX_CORKED_BYTES { Ok(()) } else { Err(Errno::NOBUFS) }
    }

    /// The readiness of a datagram socket.
    pub(in crate::sentry) fn mail_readiness(&self, socket: &Socket) -> (u16, u64) {
        let SocketState::Datagrams { inbox, mate, refused } = &socket.stage else { return (0, 0) };
        let Some(channel) = self.channels.get(*inbox) else { return (ERR, 0) };
        let full = mate
            .and_then(|mate| self.datagram_socket(mate))
            .and_then(|(_, inbox)| self.channels.get(inbox))
            .is_some_and(|channel| !channel.takes_any());
        let when = |holds: bool, events: u16| if holds { events } else { 0 };
        let deaf = channel.shut;
        let events = when(channel.letter().is_some() || *refused || deaf, IN)
            | when(deaf, RDHUP)
            | when(deaf && socket.mute, HUP)
            | when(!full, OUT)
            | when(*refused, ERR)
            | when(channel.takes_any(), SEND_ROOM);
        (events, channel.edges + u64::from(*refused))
    }
}

impl Sentry {
    /// Whether the last message had no receiver, which is reported once.
    pub(in crate::sentry) fn take_refusal(&mut self, descriptor: u64) -> SyscallResult<bool> {
        match &self.socket_of(descriptor)?.stage {
            SocketState::Datagrams { refused: true, .. } => {}
            _ => return Ok(false),
        }
        if let SocketState::Datagrams { refused, .. } = &mut self.socket_mut(descriptor)?.stage {
            *refused = false;
        }
        Ok(true)
    }

    /// Sends a datagram to `to`, or to the connected peer.
    pub(in crate::sentry) fn post_letter(
        &mut self,
        descriptor: u64,
        bytes: &[u8],
        to: Option<Address>,
        control: SentControl<'_>,
    ) -> SyscallResult {
        if self.take_refusal(descriptor)? {
            return Err(Errno::CONNREFUSED.into());
        }
        let socket = self.socket_of(descriptor)?;
        let named = socket.options.is_on(libc::SOL_SOCKET, libc::SO_PASSCRED);
        if socket.is_local() && named && !socket.is_bound() {
            let name = self.state.free_name()?;
            self.socket_mut(descriptor)?.own = name;
        }
        let socket = self.socket_of(descriptor)?;
        let (family, internet) = (socket.family, socket.own.is_internet());
        if internet && bytes.len() > LONGEST_INTERNET {
            return Err(Errno::MSGSIZE.into());
        }
        let connected = !socket.peer.0.is_empty();
        let to = to.map(|to| to.adapted(family));
        if let Some(to) = &to {
            socket.check_protocol(to)?;
        }
        let to = to.or_else(|| Some(socket.peer.clone()).filter(|_| internet && connected));
        let mate = match &socket.stage {
            SocketState::Datagrams { mate, .. } if to.is_none() => *mate,
            _ => None,
        };
        if let Some(to) = &to {
            if !to.is_of(family) {
                let wrong = to.family() == family || !internet;
                return Err(if wrong { Errno::INVAL } else { Errno::AFNOSUPPORT }.into());
            }
            if internet && to.port() == 0 {
                return Err(Errno::INVAL.into());
            }
            if !to.is_local() && !to.is_for_names() {
                return Err(Errno::NETUNREACH.into());
            }
        }
        if socket.mute {
            return Err(Errno::PIPE.into());
        }
        if internet && socket.own.port() == 0 {
            let port = self.state.free_port(true)?;
            let mut own = Address::any(family);
            own.set_port(port);
            self.socket_mut(descriptor)?.own = own;
        }
        // The address that the receiver gets.
        let mut own = self.socket_of(descriptor)?.own.clone();
        if let (Some(to), Some(ip)) = (&to, own.ip())
            && ip.is_unspecified()
        {
            own = Address::of_ip(family, source(to), own.port());
        }
        let found = match (&to, mate) {
            (Some(to), _) if !internet => {
                self.check_name(to)?;
                Some(self.state.addressee(to, &own).ok_or(Errno::CONNREFUSED)?)
            }
            (Some(to), _) => self.state.addressee(to, &own),
            (None, Some(mate)) => match self.state.datagram_socket(mate) {
                Some(there) => Some((mate, there.1)),
                None => {
                    // The connection ends with its receiver, which is reported once.
                    let socket = self.socket_mut(descriptor)?;
                    socket.peer = Address::default();
                    if let SocketState::Datagrams { mate, .. } = &mut socket.stage {
                        *mate = None;
                    }
                    return Err(Errno::CONNREFUSED.into());
                }
            },
            (None, None) if internet => return Err(Errno::DESTADDRREQ.into()),
            (None, None) => return Err(Errno::NOTCONN.into()),
        };
        let sent = SyscallControl::Value(bytes.len() as u64);
        let Some((id, inbox)) = found else {
            if let Some(to) = to.filter(Address::is_for_names) {
                return self.ask_name(descriptor, bytes, to);
            }
            // A connected socket gets the error with its next call.
            if connected
                && let SocketState::Datagrams { refused, .. } =
                    &mut self.socket_mut(descriptor)?.stage
            {
                *refused = true;
            }
            return Ok(sent);
        };
        let channel = self.state.channels.get(inbox).ok_or(Errno::IO)?;
        if !internet {
            let this = self.state.table.id(descriptor)?;
            // A connected socket hears its peer alone.
            let others = match self.state.datagram_socket(id).map(|(socket, _)| &socket.stage) {
                Some(SocketState::Datagrams { mate: Some(mate), .. }) => *mate != this,
                _ => false,
            };
            if others {
                return Err(Errno::PERM.into());
            }
            if channel.shut {
                return Err(Errno::PIPE.into());
            }
            if bytes.len() > channel.longest() {
                return Err(Errno::MSGSIZE.into());
            }
        }
        if !channel.takes(bytes.len()) {
            if internet {
                return Ok(sent);
            }
            if self.state.table.get(descriptor)?.flags & libc::O_NONBLOCK as u32 != 0 {
                return Err(Errno::AGAIN.into());
            }
            let until = self.limited(&self.state.table.get(descriptor)?.open, OUT);
            if self.passed(until) {
                return Err(Errno::AGAIN.into());
            }
            return Ok(SyscallControl::Wait(Wait::new(
                WaitReason::Files(vec![(id, SEND_ROOM)]),
                until,
            )));
        }
        let heard = self.state.datagram_socket(id).map_or(family, |(socket, _)| socket.family);
        let from = match own.ip() {
            Some(ip) => Address::of_ip(heard, ip, own.port()),
            None if self.socket_of(descriptor)?.is_bound() => own,
            None => Address::default(),
        };
        let data = self.pack_up(descriptor, inbox, control)?;
        if let Some(channel) = self.change().channels.get_mut(inbox) {
            channel.post(bytes, from, data);
        }
        Ok(sent)
    }

    /// Control data on its way over a channel: descriptors, and the sender if one of both sides
    /// wants its credentials sent.
    pub(in crate::sentry) fn pack_up(
        &mut self,
        descriptor: u64,
        channel: u64,
        control: SentControl<'_>,
    ) -> Result<Ancillary, Errno> {
        let wanted = self.state.channels.get(channel).is_some_and(|channel| channel.named);
        let own = self.socket_of(descriptor)?;
        let named = own.is_local()
            && (control.named || wanted || own.options.is_on(libc::SOL_SOCKET, libc::SO_PASSCRED));
        let sender = named.then(|| self.state.own_credentials(REAL));
        let parcel = match control.rights {
            [] => None,
            rights => Some(self.change().table.carry(rights)?),
        };
        let options = &self.socket_of(descriptor)?.options;
        let names = match i32::from(self.socket_of(descriptor)?.family) {
            libc::AF_INET => [(libc::IPPROTO_IP, libc::IP_TTL), (libc::IPPROTO_IP, libc::IP_TOS)],
            libc::AF_INET6 => [
                (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
            ],
            _ => return Ok(Ancillary { parcel, sender, ..Ancillary::default() }),
        };
        let mut packet = names.map(|(level, name)| options.number(level, name).unwrap_or(0) as u8);
        for (value, given) in packet.iter_mut().zip(control.packet) {
            *value = given.unwrap_or(*value);
        }
        Ok(Ancillary { parcel, sender, packet })
    }

    /// Receives a datagram into pieces of memory; the rest of it is lost.
    pub(in crate::sentry) fn take_letter(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        inbox: u64,
        pieces: &[(u64, u64)],
        stays: bool,
    ) -> SyscallResult<(SyscallControl, ReceivedMessage)> {
        if self.take_refusal(descriptor)? {
            return Err(Errno::CONNREFUSED.into());
        }
        let channel = self.state.channels.get(inbox).ok_or(Errno::IO)?;
        let Some(letter) = channel.letter().cloned() else {
            let waits = self.state.table.get(descriptor)?.flags & libc::O_NONBLOCK as u32 == 0;
            if channel.shut && waits {
                return Ok((ZERO, ReceivedMessage::default()));
            }
            return Ok((self.wait_for(descriptor, IN, 0)?, ReceivedMessage::default()));
        };
        let bytes = channel.peek(letter.len);
        let mut rest = &bytes[..];
        for &(to, len) in pieces {
            let (now, later) = rest.split_at(rest.len().min(len as usize));
            if let Err(error) = copy_out(process, to, now) {
                // A message that finds no place is lost, with its descriptors.
                let channel = self.change().channels.get_mut(inbox).filter(|_| !stays);
                let letter = channel.and_then(|channel| channel.open_letter());
                if let Some(parcel) = letter.and_then(|letter| letter.parcel) {
                    self.change().drop_parcel(parcel);
                }
                return Err(error);
            }
            rest = later;
        }
        let done = (bytes.len() - rest.len()) as u64;
        let whole = (!rest.is_empty()).then_some(bytes.len() as u64);
        let (from, parcel, sender) = (Some(letter.from), letter.parcel, letter.sender);
        let packet = letter.packet;
        let mut came = ReceivedMessage { from, parcel, stays, sender, packet, whole };
        if !stays && let Some(channel) = self.change().channels.get_mut(inbox) {
            came.parcel = channel.open_letter().and_then(|letter| letter.parcel);
        }
        Ok((SyscallControl::Value(done), came))
    }

    /// Takes a packet of a connection.
    pub(in crate::sentry) fn take_packet(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        incoming: u64,
        pieces: &[(u64, u64)],
        stays: bool,
    ) -> SyscallResult<(SyscallControl, ReceivedMessage)> {
        let channel = self.state.channels.get(incoming).ok_or(Errno::IO)?;
        if channel.letter().is_none() && channel.reset {
            return Err(self.take_reset(incoming).into());
        }
        if channel.letter().is_none() && channel.has_ended() {
            return Ok((ZERO, ReceivedMessage::default()));
        }
        let (outcome, came) = self.take_letter(process, descriptor, incoming, pieces, stays)?;
        // The connected peer is the only sender.
        let from = came.from.is_some().then(|| self.named_peer(descriptor)).transpose()?;
        Ok((outcome, ReceivedMessage { from, ..came }))
    }

    /// The address that bytes over a local connection come from: nothing if its peer has no name.
    pub(in crate::sentry) fn named_peer(&self, descriptor: u64) -> Result<Address, Errno> {
        let peer = &self.socket_of(descriptor)?.peer;
        Ok(if peer.is_unnamed() { Address::default() } else { peer.clone() })
    }

    /// The address that received bytes come from: that of a message, or the name that the peer of a
    /// local connection was bound to later.
    pub(in crate::sentry) fn sender_address(
        &self,
        descriptor: u64,
        from: Address,
    ) -> Result<Address, Errno> {
        let socket = self.socket_of(descriptor)?;
        let SocketState::Connected { incoming: Some(incoming), .. } = socket.stage else {
            return Ok(from);
        };
        if !socket.is_local() || !(from.0.is_empty() || from.is_unnamed()) {
            return Ok(from);
        }
        let writers = self.state.table.descriptions().filter_map(|(_, description)| {
            let FileObject::Socket(other) = &description.open else { return None };
            let writes = other.ends().contains(&(incoming, true));
            (writes && other.is_bound()).then(|| other.own.clone())
        });
        Ok(writers.into_iter().next().unwrap_or(from))
    }

    /// Sends a packet over a connection, whole, as soon as there is room.
    pub(in crate::sentry) fn put_packet(
        &mut self,
        descriptor: u64,
        outgoing: u64,
        bytes: &[u8],
        control: SentControl<'_>,
    ) -> SyscallResult {
        let channel = self.state.channels.get(outgoing).ok_or(Errno::IO)?;
        if channel.readers == 0 || channel.shut {
            // No signal comes with it, other than for streams.
            return Err(Errno::PIPE.into());
        }
        if bytes.len() > channel.longest() {
            return Err(Errno::MSGSIZE.into());
        }
        if !channel.takes(bytes.len()) || !channel.takes_any() {
            return self.wait_for(descriptor, OUT, 0);
        }
        let data = self.pack_up(descriptor, outgoing, control)?;
        if let Some(channel) = self.change().channels.get_mut(outgoing) {
            channel.post(bytes, Address::default(), data);
        }
        Ok(SyscallControl::Value(bytes.len() as u64))
    }

    /// Keeps the beginning of an unfinished datagram over loopback, or puts it in front of the
    /// rest.
    pub(in crate::sentry) fn cork(
        &mut self,
        descriptor: u64,
        bytes: &[u8],
        more: bool,
    ) -> SyscallResult<Option<Vec<u8>>> {
        let socket = self.socket_of(descriptor)?;
        if !socket.own.is_internet() || !more && socket.corked.is_empty() {
            return Ok(None);
        }
        if socket.corked.len() + bytes.len() > CORKED {
            return Err(Errno::MSGSIZE.into());
        }
        self.state.check_corked(bytes.len())?;
        let corked = &mut self.socket_mut(descriptor)?.corked;
        corked.extend(bytes);
        Ok(Some(if more { Vec::new() } else { std::mem::take(corked) }))
    }

    /// Has datagrams go to `address`, and come from there alone.
    pub(in crate::sentry) fn connect_datagrams(
        &mut self,
        descriptor: u64,
        address: Address,
    ) -> SyscallResult {
        let address = address.adapted(self.socket_of(descriptor)?.family);
        let socket = self.socket_of(descriptor)?;
        socket.check_protocol(&address)?;
        if i32::from(address.family()) == libc::AF_UNSPEC {
            let socket = self.socket_mut(descriptor)?;
            socket.peer = Address::default();
            if socket.own.is_internet() {
                let unbound = Address::loopback(socket.family, 0);
                let given = std::mem::take(&mut socket.given);
                let named = given.is_internet() && given.port() != 0;
                socket.own = if named { given.clone() } else { unbound };
                socket.given = given;
            }
            if let SocketState::Datagrams { mate, .. } = &mut socket.stage {
                *mate = None;
            }
            return Ok(ZERO);
        }
        if !address.is_of(socket.family) {
            let wrong = address.family() == socket.family || socket.is_local();
            return Err(if wrong { Errno::INVAL } else { Errno::AFNOSUPPORT }.into());
        }
        if !address.is_local() && !address.is_for_names() {
            return Err(Errno::NETUNREACH.into());
        }
        let named = socket.options.is_on(libc::SOL_SOCKET, libc::SO_PASSCRED);
        if socket.is_local() && named && !socket.is_bound() {
            let name = self.state.free_name()?;
            self.socket_mut(descriptor)?.own = name;
        }
        let socket = self.socket_of(descriptor)?;
        let (mut address, mut found) = (address, None);
        if !address.is_internet() {
            self.check_name(&address)?;
            let own = socket.own.clone();
            found = Some(self.state.addressee(&address, &own).ok_or(Errno::CONNREFUSED)?.0);
        } else {
            let (family, port) = (socket.family, socket.own.port());
            let port = if port == 0 { self.state.free_port(true)? } else { port };
            // As in Linux the socket has the address from then on that its messages come from.
            if socket.own.ip().is_none_or(|ip| ip.is_unspecified()) || !socket.is_bound() {
                let own = Address::of_ip(family, source(&address), port);
                self.socket_mut(descriptor)?.own = own;
            }
            if let Some(ip) = address.destination() {
                address = Address::of_ip(family, ip, address.port());
            }
        }
        let socket = self.socket_mut(descriptor)?;
        socket.peer = address;
        if let SocketState::Datagrams { mate, .. } = &mut socket.stage {
            *mate = found;
        }
        let description = self.state.table.id(descriptor)?;
        self.change().heed_options(description);
        Ok(ZERO)
    }
}
