//! Host ports whose connections reach a port within the guest.
//!
//! Promises: a host port belongs to this process from the call that publishes it. Connections are
//! reset while the guest does not listen, and wait on the host while the guest's backlog is full.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{self, SocketFlags, sockopt};

use crate::sentry::Sentry;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::net::inbound::PortState;

/// The time between two tries to accept a connection that the host could not give.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum connections that are accepted at a time.
const MAX_ACCEPTED: usize = 64;

/// Connections that the host completes before the guest accepts them, at most
/// `net.core.somaxconn`. The standard library asks for 128, and a client of a longer burst waits a
/// second.
const ACCEPT_BACKLOG: i32 = 4096;

/// A host port.
#[derive(Debug)]
pub(crate) struct PublishedPort {
    /// It listens: another process can bind the address of a socket that does not.
    socket: OwnedFd,
    /// The port within the guest.
    port: u16,
    /// Whether the host could not give the last connection, such as without descriptors.
    has_failed: bool,
}

impl PublishedPort {
    /// Takes the host's `address` for a port of a guest. Returns the address with its port, which
    /// the kernel has chosen for port 0.
    pub(crate) fn bind(address: SocketAddr, port: u16) -> io::Result<(Self, SocketAddr)> {
        let socket = TcpListener::bind(address)?;
        net::listen(&socket, ACCEPT_BACKLOG)?;
        socket.set_nonblocking(true)?;
        let bound = socket.local_addr()?;
        Ok((Self { socket: socket.into(), port, has_failed: false }, bound))
    }

    /// The next connection, if one waits.
    fn accept(&mut self) -> Option<TcpStream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let accepted = net::accept_with(&self.socket, flags);
        self.has_failed = !matches!(accepted, Ok(_) | Err(Errno::AGAIN | Errno::CONNABORTED));
        accepted.ok().map(TcpStream::from)
    }
}

/// Closes a connection, which its client sees as reset.
fn reset(stream: TcpStream) {
    // Without this it is closed as by a program that sends nothing.
    let _ = sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
}

impl Sentry {
    /// Passes new connections to published ports on to the guest. Returns whether the guest sees a
    /// change.
    pub(in crate::sentry) fn admit_connections(&mut self, ports: &mut [PublishedPort]) -> bool {
        let mut is_changed = false;
        for port in ports {
            for _ in 0..MAX_ACCEPTED {
                let state = self.state.port_state(port.port);
                if state == PortState::Full {
                    break;
                }
                let Some(stream) = port.accept() else { break };
                match state {
                    PortState::Open => is_changed |= self.admit(stream, port.port),
                    PortState::Closed | PortState::Full => reset(stream),
                }
            }
        }
        is_changed
    }

    /// Passes one connection on. It is reset where the guest or this host has too many.
    fn admit(&mut self, stream: TcpStream, port: u16) -> bool {
        if !self.lines.admits() {
            reset(stream);
            return false;
        }
        // The guest has its own delays.
        let _ = stream.set_nodelay(true);
        let Some((from, to)) = self.change().arrive_from_outside(port) else {
            reset(stream);
            return false;
        };
        if let Err(stream) = self.lines.admit(stream, from, to) {
            self.change().line_ends(from, to);
            reset(stream);
        }
        true
    }
}

/// The published ports of a run.
#[derive(Debug)]
pub(crate) struct PublishedPorts {
    pub(in crate::sentry) list: Vec<PublishedPort>,
    looked: Instant,
}

impl PublishedPorts {
    pub(crate) fn new(list: Vec<PublishedPort>) -> Self {
        Self { list, looked: Instant::now() }
    }

    /// Those whose connections can be admitted or reset now.
    pub(in crate::sentry) fn acceptors(&self, state: &Kernel) -> Vec<BorrowedFd<'_>> {
        let takes = |port: &&PublishedPort| {
            !port.has_failed && state.port_state(port.port) != PortState::Full
        };
        self.list.iter().filter(takes).map(|port| port.socket.as_fd()).collect()
    }

    /// How long a wait may last: a host that could not give a connection is tried again.
    pub(in crate::sentry) fn bounded(&self, length: Duration) -> Duration {
        match self.list.iter().any(|port| port.has_failed) {
            true => length.min(RETRY_INTERVAL),
            false => length,
        }
    }

    /// Whether they are looked at now, once in an `interval`.
    pub(in crate::sentry) fn are_due(&mut self, interval: Duration) -> bool {
        let are_due = !self.list.is_empty() && self.looked.elapsed() >= interval;
        if are_due {
            self.looked = Instant::now();
        }
        are_due
    }
}
