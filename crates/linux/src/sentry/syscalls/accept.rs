//! System calls that wait for connections: `listen` and `accept`.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::IN;
use crate::sentry::kernel::users::EFFECTIVE;
use crate::sentry::net::sockets::{Address, BACKLOG, IncomingConnection, Socket, SocketState};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::socket::{SOCKET_FLAGS, address_out};

/// Connections that may wait in front of the one that is accepted next.
const MAX_BACKLOG: u32 = BACKLOG as u32 - 1;

impl Sentry {
    /// `listen(2)`: the backlog is at most 127.
    pub(in crate::sentry) fn sys_listen(&mut self, descriptor: u64, backlog: u64) -> SyscallResult {
        let socket = self.socket_of(descriptor)?;
        match socket.stage {
            // A local socket has a name before it listens.
            SocketState::New if socket.is_local() && !socket.is_bound() => {
                return Err(Errno::INVAL.into());
            }
            SocketState::New => {}
            SocketState::Listening(_) => {
                self.socket_mut(descriptor)?.backlog = (backlog as u32).min(MAX_BACKLOG);
                let listener = self.state.table.id(descriptor)?;
                self.change().establish_connections(listener);
                return Ok(ZERO);
            }
            SocketState::Connected { .. }
            | SocketState::Reaching { .. }
            | SocketState::Refused(_) => {
                return Err(Errno::INVAL.into());
            }
            SocketState::Datagrams { .. } => return Err(Errno::OPNOTSUPP.into()),
        }
        let port = match socket.own.is_internet() && socket.own.port() == 0 {
            true => Some(self.state.free_port(false)?),
            false => None,
        };
        if let Some(port) = port {
            let family = self.socket_of(descriptor)?.family;
            let mut any = Address::any(family);
            any.set_port(port);
            self.socket_mut(descriptor)?.own = any;
        }
        // Another one may have begun to listen since they were bound.
        let socket = self.socket_of(descriptor)?;
        if socket.own.is_internet() && self.state.is_heard(socket) {
            return Err(Errno::ADDRINUSE.into());
        }
        let own = self.state.own_credentials(EFFECTIVE);
        let socket = self.socket_mut(descriptor)?;
        socket.stage = SocketState::Listening(Vec::new());
        socket.backlog = (backlog as u32).min(MAX_BACKLOG);
        socket.mate = own;
        Ok(ZERO)
    }

    /// `accept(2)`: as `accept4`.
    pub(in crate::sentry) fn sys_accept(
        &mut self,
        process: &mut Process,
        fd: u64,
        address: u64,
        len: u64,
    ) -> SyscallResult {
        self.sys_accept4(process, fd, address, len, 0)
    }

    /// `accept4(2)`, as on Linux.
    pub(in crate::sentry) fn sys_accept4(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags as i32 & !SOCKET_FLAGS != 0 {
            return Err(Errno::INVAL.into());
        }
        let socket = self.socket_of(descriptor)?;
        let SocketState::Listening(queue) = &socket.stage else {
            let datagrams = socket.is_for_datagrams();
            return Err(if datagrams { Errno::OPNOTSUPP } else { Errno::INVAL }.into());
        };
        let at = self.state.acceptable(queue, self.now()).next();
        let Some((at, arrival)) = at.and_then(|at| Some((at, queue.get(at)?.clone()))) else {
            return self.wait_for(descriptor, IN, 0);
        };
        self.state.table.check_room()?;
        let written = address_out(process, &arrival.peer, to, len);
        let local = socket.is_local().then(|| socket.own.clone());
        let (family, packets, options) = (socket.family, socket.packets, socket.options.clone());
        let listening = self.socket_mut(descriptor)?;
        if let SocketState::Listening(queue) = &mut listening.stage {
            queue.remove(at);
            // A deferred one counted among the edges when it was ready, which must not go down.
            listening.edges += u64::from(arrival.until.is_some());
        }
        let listener = self.state.table.id(descriptor)?;
        // One with data may be accepted before others that came earlier, also beyond the backlog.
        self.change().line_is_made(arrival.outgoing);
        self.change().establish_connections(listener);
        if let Err(error) = written {
            // The connection is lost, as in Linux.
            let state = self.change();
            state.leave(arrival.incoming, false);
            state.leave(arrival.outgoing, true);
            return Err(error);
        }
        let IncomingConnection { incoming, outgoing, peer, own, process: mate, .. } = arrival;
        let socket = Socket::connected(local.unwrap_or(own), peer, incoming, outgoing);
        let options = options.accepted();
        let socket = Socket { family, packets, options, mate, ..socket };
        let added = self.add(FileObject::Socket(socket), flags as i32 | libc::O_RDWR)?;
        if let SyscallControl::Value(number) = added {
            let description = self.state.table.id(number)?;
            self.change().heed_options(description);
        }
        Ok(added)
    }
}
