//! `connect`: within the guest, and to the outside.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::{OUT, SEND_ROOM};
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::kernel::users::EFFECTIVE;
use crate::sentry::net::sockets::{Address, MAX_ADDRESS, NETLINK, SocketState};
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult, ZERO};
use crate::sentry::syscalls::socket::address_in;

/// The address that messages to a local address come from, unless their socket has one.
pub(in crate::sentry) fn source(to: &Address) -> IpAddr {
    match to.ip() {
        Some(IpAddr::V6(_)) => Ipv6Addr::LOCALHOST.into(),
        _ => Ipv4Addr::LOCALHOST.into(),
    }
}

impl Sentry {
    /// `connect(2)`: outside of loopback, TCP reaches destinations that the opener of the guest
    /// grants, and UDP only name servers, for which the sentry answers. A local socket is found by
    /// the exact path of its `bind`.
    pub(in crate::sentry) fn sys_connect(
        &mut self,
        process: &Process,
        descriptor: u64,
        at: u64,
        len: u64,
    ) -> SyscallResult {
        let waits = self.state.table.get(descriptor)?.flags & libc::O_NONBLOCK as u32 == 0;
        let socket = self.socket_of(descriptor)?;
        let is_stream = socket.own.is_internet() && !socket.is_for_datagrams();
        if is_stream && matches!(socket.stage, SocketState::Connected { .. } | SocketState::New) {
            let address = address_in(process, at, len)?;
            if i32::from(address.family()) == libc::AF_UNSPEC {
                return self.disconnect(descriptor);
            }
        }
        match socket.stage {
            SocketState::New => {}
            SocketState::Reaching { .. } if self.resumed.is_none() && !waits => {
                return Err(Errno::ALREADY.into());
            }
            SocketState::Connected { .. }
            | SocketState::Reaching { .. }
            | SocketState::Refused(_) => {
                return self.go_on_connecting(descriptor);
            }
            SocketState::Listening(_) => return Err(Errno::INVAL.into()),
            SocketState::Datagrams { .. } if i32::from(socket.family) == NETLINK => {
                return self.connect_netlink(descriptor, &address_in(process, at, len)?);
            }
            SocketState::Datagrams { .. } => {
                return self.connect_datagrams(descriptor, address_in(process, at, len)?);
            }
        }
        let address = address_in(process, at, len)?;
        if socket.is_local() && (!address.is_for_local() || len > MAX_ADDRESS as u64) {
            return Err(Errno::INVAL.into());
        }
        if !address.is_of(socket.family) {
            let short = (len as usize) < Address::least(socket.family);
            return Err(if short { Errno::INVAL } else { Errno::AFNOSUPPORT }.into());
        }
        socket.check_protocol(&address)?;
        if !address.is_local() {
            return self.connect_outside(descriptor, address);
        }
        self.check_name(&address)?;
        let (family, port) = (socket.family, socket.own.port());
        let mut own = socket.own.clone();
        if own.is_internet() {
            let port = if port == 0 { self.state.free_port(false)? } else { port };
            own = match own.ip() {
                Some(ip) if socket.is_bound() && !ip.is_unspecified() => own,
                _ => Address::of_ip(family, source(&address), port),
            };
        } else if !socket.is_bound() && socket.options.is_on(libc::SOL_SOCKET, libc::SO_PASSCRED) {
            own = self.state.free_name()?;
        }
        let Some(to) = self.state.listener_at(&address, own.port()) else {
            return match self.connect_to_itself(descriptor, own, &address) {
                Err(SyscallError::Errno(Errno::CONNREFUSED)) if address.is_internet() && !waits => {
                    self.socket_mut(descriptor)?.stage = SocketState::Refused(libc::ECONNREFUSED);
                    Err(Errno::INPROGRESS.into())
                }
                connected => connected,
            };
        };
        let Some(FileObject::Socket(listener)) = self.state.table.description(to).map(|d| &d.open)
        else {
            return Err(Errno::CONNREFUSED.into());
        };
        if listener.packets != socket.packets {
            // By another name it is not found.
            let named = address.path().is_some();
            return Err(if named { Errno::PROTOTYPE } else { Errno::CONNREFUSED }.into());
        }
        // A local listener has no more connections waiting than it asked for.
        if let (true, SocketState::Listening(queue)) = (listener.is_local(), &listener.stage)
            && queue.len() > listener.backlog_len()
        {
            return self.wait_to_connect(descriptor, to);
        }
        // One over IP waits to be established then.
        let pending = match &listener.stage {
            SocketState::Listening(queue) => queue.len() > listener.backlog_len(),
            _ => false,
        };
        let deferred = listener.options.number(libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT);
        let (mate, heard) = (listener.mate, listener.family);
        let named = |name: &Address| match name.destination() {
            Some(ip) => Address::of_ip(heard, ip, name.port()),
            None => name.clone(),
        };
        let (theirs, there) = (named(&own), named(&address));
        let address = match address.destination() {
            Some(ip) => Address::of_ip(family, ip, address.port()),
            None => listener.own.clone(),
        };
        if own.is_internet() && self.state.has_connection(&own, &address) {
            return Err(Errno::ADDRNOTAVAIL.into());
        }
        let process = self.state.own_credentials(EFFECTIVE);
        let (incoming, outgoing) = self.change().arrive(to, theirs, there, process)?;
        if let Some(seconds) = deferred.and_then(|seconds| u64::try_from(seconds).ok())
            && seconds > 0
        {
            let until = self.now().saturating_add(seconds * 1_000_000_000);
            self.change().defer_last(to, until);
        }
        let socket = self.socket_mut(descriptor)?;
        let stage = match pending {
            true => SocketState::Reaching { incoming, outgoing },
            false => SocketState::Connected { incoming: Some(incoming), outgoing: Some(outgoing) },
        };
        (socket.own, socket.peer, socket.stage, socket.mate) = (own, address, stage, mate);
        // A signal may interrupt a caller that waits, which then learns of it later as well.
        socket.connecting = !socket.is_local() && (!waits || pending);
        let begun = socket.connecting;
        let description = self.state.table.id(descriptor)?;
        self.change().heed_options(description);
        if pending {
            return self.go_on_connecting(descriptor);
        }
        // A caller that does not wait learns of it later, though it is there already.
        if begun { Err(Errno::INPROGRESS.into()) } else { Ok(ZERO) }
    }

    /// Breaks the connection of a TCP socket off, which can connect or listen again. It keeps the
    /// address that the program gave it.
    fn disconnect(&mut self, descriptor: u64) -> SyscallResult {
        let socket = self.socket_of(descriptor)?;
        let SocketState::Connected { incoming, outgoing } = socket.stage else { return Ok(ZERO) };
        let (left, unbound) = (socket.left, Address::loopback(socket.family, 0));
        let given = Some(socket.given.clone()).filter(|given| given.port() != 0);
        let state = self.change();
        if let Some(channel) = outgoing.or(left).and_then(|id| state.channels.get_mut(id)) {
            channel.reset = true;
            channel.edges += 1;
        }
        incoming.into_iter().for_each(|id| state.leave(id, false));
        outgoing.into_iter().for_each(|id| state.leave(id, true));
        let socket = self.socket_mut(descriptor)?;
        (socket.stage, socket.peer, socket.left) = (SocketState::New, Address::default(), None);
        (socket.own, socket.connecting) = (given.unwrap_or(unbound), false);
        Ok(ZERO)
    }

    /// Connects a socket of netlink to the kernel, which is its only peer, and gives it a port.
    fn connect_netlink(&mut self, descriptor: u64, to: &Address) -> SyscallResult {
        if i32::from(to.family()) != NETLINK || to.0.len() < 12 {
            return Err(Errno::INVAL.into());
        }
        if to.0[4..12] != [0; 8] {
            return Err(Errno::PERM.into());
        }
        match self.socket_of(descriptor)?.is_bound() {
            true => Ok(ZERO),
            false => self.bind_netlink(descriptor, &to.0),
        }
    }

    /// A wait for room among the connections of a listener.
    fn wait_to_connect(&self, descriptor: u64, to: u64) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        let until = self.limited(&description.open, OUT);
        if description.flags & libc::O_NONBLOCK as u32 != 0 || self.passed(until) {
            return Err(Errno::AGAIN.into());
        }
        Ok(SyscallControl::Wait(Wait::new(WaitReason::Files(vec![(to, SEND_ROOM)]), until)))
    }

    /// A TCP socket that connects to its own address is its own peer, as in Linux. Other addresses
    /// have no listener.
    fn connect_to_itself(
        &mut self,
        descriptor: u64,
        own: Address,
        address: &Address,
    ) -> SyscallResult {
        if !own.is_internet() || own.fitness(true, address).is_none() {
            return Err(Errno::CONNREFUSED.into());
        }
        let channel = self.change().channels.add().ok_or(Errno::NFILE)?;
        let socket = self.socket_mut(descriptor)?;
        let stage = SocketState::Connected { incoming: Some(channel), outgoing: Some(channel) };
        (socket.own, socket.peer, socket.stage) = (own.clone(), own, stage);
        Ok(ZERO)
    }
}
