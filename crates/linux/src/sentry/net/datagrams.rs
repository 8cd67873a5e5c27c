//! Datagrams: between local sockets, and over loopback addresses. Each socket has one channel, which others put whole messages into.
//!
//! Promises: a message arrives whole, once, in order, or not at all; messages on their way are bounded by the
//! receiver's channel. A local sender waits for room; over loopback, messages without room are lost, as on a network.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::readiness::{ERR, IN, OUT, ROOM};
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::net::sockets::{Address, CORKED, ReceivedMessage, Socket, SocketState};
use crate::sentry::{Kernel, Sentry, SyscallControl, SyscallResult, copy_out};

/// Maximum bytes of a datagram over loopback, and between local sockets.
const LONGEST_INTERNET: usize = 65507;
const LONGEST_LOCAL: usize = crate::sentry::kernel::channels::MAX_MESSAGE;

impl Kernel {
    fn datagram_socket(&self, id: u64) -> Option<(&Socket, u64)> {
        match self.table.description(id).map(|description| &description.open) {
            Some(FileObject::Socket(socket)) => match &socket.stage {
                SocketState::Datagrams { inbox, .. } => Some((socket, *inbox)),
                _ => None,
            },
            _ => None,
        }
    }

    /// The receiver of datagrams from `own` to `to`, and its channel.
    fn addressee(&self, to: &Address, own: &Address) -> Option<(u64, u64)> {
        let all = self.table.descriptions();
        // A path may have been another's before: the last socket that bound it owns it.
        let mut found = all.filter_map(|(id, _)| {
            let (socket, inbox) = self.datagram_socket(id)?;
            // A connected one receives only from its peer.
            let heard =
                socket.peer.0.is_empty() || !to.is_internet() || socket.peer.port() == own.port();
            (socket.own.takes(to) && socket.is_bound() && heard).then_some((id, inbox))
        });
        found.next_back()
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
        let events = when(channel.letter().is_some() || *refused, IN)
            | when(!full, OUT)
            | when(*refused, ERR)
            | when(channel.takes_any(), ROOM);
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
        rights: &[u64],
    ) -> SyscallResult {
        if self.take_refusal(descriptor)? {
            return Err(Errno::CONNREFUSED.into());
        }
        let socket = self.socket_of(descriptor)?;
        let (family, internet) = (socket.family, socket.own.is_internet());
        let longest = if internet { LONGEST_INTERNET } else { LONGEST_LOCAL };
        if bytes.len() > longest {
            return Err(Errno::MSGSIZE.into());
        }
        let connected = !socket.peer.0.is_empty();
        let to = to.or_else(|| Some(socket.peer.clone()).filter(|_| internet && connected));
        let mate = match &socket.stage {
            SocketState::Datagrams { mate, .. } if to.is_none() => *mate,
            _ => None,
        };
        if let Some(to) = &to {
            if !to.is_of(family) {
                return Err(Errno::AFNOSUPPORT.into());
            }
            if !to.is_local() && !to.is_for_names() {
                return Err(Errno::NETUNREACH.into());
            }
        }
        if internet && socket.own.port() == 0 {
            let port = self.state.free_port(true)?;
            self.socket_mut(descriptor)?.own.set_port(port);
        }
        let own = self.socket_of(descriptor)?.own.clone();
        let found = match (&to, mate) {
            (Some(to), _) if !internet => {
                self.check_name(to)?;
                Some(self.state.addressee(to, &own).ok_or(Errno::CONNREFUSED)?)
            }
            (Some(to), _) => self.state.addressee(to, &own),
            (None, Some(mate)) => {
                let there = self.state.datagram_socket(mate).ok_or(Errno::CONNREFUSED)?;
                Some((mate, there.1))
            }
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
            return Ok(SyscallControl::Wait(Wait::new(WaitReason::Files(vec![(id, ROOM)]), until)));
        }
        let from = match internet {
            true => Address::loopback(family, own.port()),
            false if self.socket_of(descriptor)?.is_bound() => own,
            false => Address::default(),
        };
        let state = self.change();
        let parcel = match rights {
            [] => None,
            rights => Some(state.table.carry(rights)?),
        };
        if let Some(channel) = state.channels.get_mut(inbox) {
            channel.post(bytes, from, parcel);
        }
        Ok(sent)
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
        let mut came = ReceivedMessage { from: Some(letter.from), parcel: None, whole };
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
            return Ok((crate::sentry::ZERO, ReceivedMessage::default()));
        }
        let (outcome, came) = self.take_letter(process, descriptor, incoming, pieces, stays)?;
        // The connected peer is the only sender.
        Ok((outcome, ReceivedMessage { from: None, ..came }))
    }

    /// Sends a packet over a connection, whole, as soon as there is room.
    pub(in crate::sentry) fn put_packet(
        &mut self,
        descriptor: u64,
        outgoing: u64,
        bytes: &[u8],
        quiet: bool,
        rights: &[u64],
    ) -> SyscallResult {
        let channel = self.state.channels.get(outgoing).ok_or(Errno::IO)?;
        if channel.readers == 0 || channel.shut {
            return self.broken_pipe(quiet);
        }
        if bytes.len() > LONGEST_LOCAL {
            return Err(Errno::MSGSIZE.into());
        }
        if !channel.takes_any() {
            return self.wait_for(descriptor, OUT, 0);
        }
        let state = self.change();
        let parcel = match rights {
            [] => None,
            rights => Some(state.table.carry(rights)?),
        };
        if let Some(channel) = state.channels.get_mut(outgoing) {
            channel.post(bytes, Address::default(), parcel);
        }
        Ok(SyscallControl::Value(bytes.len() as u64))
    }

    /// Keeps the beginning of an unfinished datagram over loopback, or puts it in front of the rest.
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
        let socket = self.socket_of(descriptor)?;
        if i32::from(address.family()) == libc::AF_UNSPEC {
            let socket = self.socket_mut(descriptor)?;
            socket.peer = Address::default();
            if let SocketState::Datagrams { mate, .. } = &mut socket.stage {
                *mate = None;
            }
            return Ok(crate::sentry::ZERO);
        }
        if !address.is_of(socket.family) {
            return Err(Errno::AFNOSUPPORT.into());
        }
        if !address.is_local() && !address.is_for_names() {
            return Err(Errno::NETUNREACH.into());
        }
        let mut found = None;
        if !address.is_internet() {
            self.check_name(&address)?;
            let own = socket.own.clone();
            found = Some(self.state.addressee(&address, &own).ok_or(Errno::CONNREFUSED)?.0);
        } else if socket.own.port() == 0 {
            let (family, port) = (socket.family, self.state.free_port(true)?);
            self.socket_mut(descriptor)?.own = Address::loopback(family, port);
        }
        let socket = self.socket_mut(descriptor)?;
        socket.peer = address;
        if let SocketState::Datagrams { mate, .. } = &mut socket.stage {
            *mate = found;
        }
        Ok(crate::sentry::ZERO)
    }
}
