//! Connections to the outside, in the guest: sockets whose channels end at the sentry.
//!
//! Promises: an address that was not granted is as unreachable as without a network; of a
//! connection nothing is in a frozen state but that it is over.

use afresh_egress::{ConnectionRecord, DestinationQuery, Outcome};
use rustix::io::Errno;

use crate::sentry::Sentry;
use crate::sentry::kernel::channels::ChannelEnd;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::OUT;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::net::sockets::{Address, Socket, SocketState};
use crate::sentry::result::{SyscallError, SyscallResult, ZERO};

impl Sentry {
    /// Begins or continues a connection to the outside.
    pub(in crate::sentry) fn connect_outside(
        &mut self,
        descriptor: u64,
        address: Address,
    ) -> SyscallResult {
        let ip = address.ip().ok_or(Errno::NETUNREACH)?;
        let state = &self.state;
        let asked = match state.names.name_of(ip) {
            Some(name) => DestinationQuery::Name(name),
            None => DestinationQuery::Address(ip),
        };
        let route = self.lines.route(asked, address.port()).ok_or(Errno::NETUNREACH)?;
        let record = ConnectionRecord::of(asked, address.port(), Outcome::Allowed);
        let socket = self.socket_of(descriptor)?;
        let (family, port) = (socket.family, socket.own.port());
        let port = if port == 0 { self.state.free_port(false)? } else { port };
        let state = self.change();
        let from = state.channels.add().ok_or(Errno::NFILE)?;
        let Some(to) = state.channels.add() else {
            state.leave(from, false);
            state.leave(from, true);
            return Err(Errno::NFILE.into());
        };
        for (id, end) in [(from, ChannelEnd::Comes), (to, ChannelEnd::Goes)] {
            if let Some(channel) = state.channels.get_mut(id) {
                channel.end = end;
            }
        }
        let own = Address::loopback(family, port);
        let stage = SocketState::Reaching { incoming: from, outgoing: to };
        let socket = self.socket_mut(descriptor)?;
        (socket.own, socket.peer, socket.stage, socket.edges) = (own, address, stage, 0);
        socket.connecting = true;
        if !self.lines.begin(route, record, from, to) {
            self.change().line_failed(from, to, libc::EAGAIN);
        }
        self.go_on_connecting(descriptor)
    }

    /// A connection that is being made: the caller waits, or gets `EINPROGRESS`.
    pub(in crate::sentry) fn go_on_connecting(&mut self, descriptor: u64) -> SyscallResult {
        let resumed = self.resumed.is_some();
        match self.socket_of(descriptor)?.stage {
            SocketState::Connected { .. } if resumed || self.socket_of(descriptor)?.connecting => {
                self.socket_mut(descriptor)?.connecting = false;
                Ok(ZERO)
            }
            SocketState::Refused(error) => {
                self.socket_mut(descriptor)?.stage = SocketState::New;
                Err(Errno::from_raw_os_error(error).into())
            }
            SocketState::Reaching { .. } => match self.wait_for(descriptor, OUT, 0) {
                // A non-blocking caller polls later.
                Err(SyscallError::Errno(Errno::AGAIN)) => Err(Errno::INPROGRESS.into()),
                waits => waits,
            },
            _ => Err(Errno::ISCONN.into()),
        }
    }
}

impl Kernel {
    fn socket_by(&mut self, from: u64) -> Option<&mut Socket> {
        let sockets = self.table.descriptions_mut().filter_map(|d| match &mut d.open {
            FileObject::Socket(socket) => Some(socket),
            _ => None,
        });
        let mut own = sockets.filter(
            |s| matches!(s.stage, SocketState::Reaching { incoming, .. } if incoming == from),
        );
        own.next()
    }

    /// Whether the socket that reads a channel is being connected.
    pub(in crate::sentry) fn is_reaching(&self, from: u64) -> bool {
        self.table.descriptions().any(|(_, d)| match &d.open {
            FileObject::Socket(Socket {
                stage: SocketState::Reaching { incoming, .. }, ..
            }) => *incoming == from,
            _ => false,
        })
    }

    /// The connection with these channels is there.
    pub(crate) fn line_is_made(&mut self, from: u64) {
        if let Some(socket) = self.socket_by(from)
            && let SocketState::Reaching { incoming, outgoing } = socket.stage
        {
            let (incoming, outgoing) = (Some(incoming), Some(outgoing));
            socket.stage = SocketState::Connected { incoming, outgoing };
        }
    }

    /// It failed.
    pub(crate) fn line_failed(&mut self, from: u64, to: u64, error: i32) {
        if let Some(socket) = self.socket_by(from) {
            socket.stage = SocketState::Refused(error);
            self.leave(from, false);
            self.leave(to, true);
        }
        self.line_ends(from, to);
    }

    /// It broke, or its server closed.
    pub(crate) fn line_ends(&mut self, from: u64, to: u64) {
        self.channels.let_go(from);
        self.channels.let_go(to);
    }

    /// The server reset the connection.
    pub(crate) fn line_broke(&mut self, from: u64) {
        if let Some(channel) = self.channels.get_mut(from) {
            channel.reset = true;
        }
    }

    /// The sentry releases its end of a channel.
    pub(crate) fn let_line_go(&mut self, id: u64) {
        self.channels.let_go(id);
    }

    /// Whether the sentry has an end of it.
    pub(crate) fn has_line(&self, id: u64) -> bool {
        self.channels.get(id).is_some_and(|c| matches!(c.end, ChannelEnd::Comes | ChannelEnd::Goes))
    }

    /// Bytes that may come into a channel.
    pub(crate) fn line_room(&self, from: u64) -> usize {
        match self.channels.get(from) {
            Some(channel) if channel.end == ChannelEnd::Comes && channel.readers > 0 => {
                channel.room()
            }
            _ => 0,
        }
    }

    /// Whether a channel has no reader any more.
    pub(crate) fn line_is_deaf(&self, from: u64) -> bool {
        self.has_line(from) && self.channels.get(from).is_some_and(|c| c.readers == 0)
    }

    /// Bytes came.
    pub(crate) fn line_came(&mut self, from: u64, bytes: &[u8]) {
        if let Some(channel) = self.channels.get_mut(from) {
            channel.push(bytes);
        }
    }

    /// Whether bytes are waiting to be sent.
    pub(crate) fn line_bytes(&self, to: u64) -> bool {
        self.has_line(to) && self.channels.get(to).is_some_and(|channel| !channel.is_empty())
    }

    /// The first bytes to send.
    pub(crate) fn line_peek(&self, to: u64, most: usize) -> Vec<u8> {
        match self.channels.get(to) {
            Some(channel) if channel.end == ChannelEnd::Goes => channel.peek(most),
            _ => Vec::new(),
        }
    }

    /// Removes the `len` bytes that were sent.
    pub(crate) fn line_sent(&mut self, to: u64, len: usize) {
        if let Some(channel) = self.channels.get_mut(to) {
            // An IP connection carries no descriptors.
            let _ = channel.skip(len);
        }
    }

    /// Whether all is sent that ever will be.
    pub(crate) fn line_is_shut(&self, to: u64) -> bool {
        let shut = |c: &crate::sentry::kernel::channels::Channel| c.writers == 0 && c.is_empty();
        self.has_line(to) && self.channels.get(to).is_some_and(shut)
    }

    /// Whether it has connections to the outside, or makes some.
    pub(crate) fn has_lines(&self) -> bool {
        self.channels.iter().any(|(_, c)| matches!(c.end, ChannelEnd::Comes | ChannelEnd::Goes))
    }

    /// Ends all connections to the outside, and fails those that are being made.
    pub(crate) fn cut_lines(&mut self) {
        let made = |stage: &SocketState| match stage {
            // Others are within the guest, and wait for room in a listener's backlog.
            SocketState::Reaching { incoming, outgoing } if self.has_line(*incoming) => {
                Some((*incoming, *outgoing))
            }
            _ => None,
        };
        let reaching: Vec<_> = self
            .table
            .descriptions()
            .filter_map(|(_, d)| match &d.open {
                FileObject::Socket(socket) => made(&socket.stage),
                _ => None,
            })
            .collect();
        for (from, to) in reaching {
            self.line_failed(from, to, libc::ECONNRESET);
        }
        let left: Vec<u64> = self.channels.iter().map(|(id, _)| id).collect();
        for id in left {
            if self.has_line(id) {
                self.channels.let_go(id);
            }
        }
    }
}
