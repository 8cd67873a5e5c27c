//! Names of sockets: which socket has an address, and which addresses and ports are free.

use std::collections::BTreeSet;

use rustix::io::Errno;

use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::net::sockets::{Address, EPHEMERAL, Socket, SocketState};

impl Socket {
    /// Whether it takes messages of the newer protocol alone (`IPV6_V6ONLY`).
    pub(in crate::sentry) fn is_for_newer_protocol(&self) -> bool {
        self.options.is_on(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY)
    }

    fn fitness(&self, address: &Address) -> Option<u8> {
        self.own.fitness(self.is_for_newer_protocol(), address)
    }

    fn shares_port(&self) -> bool {
        self.options.is_on(libc::SOL_SOCKET, libc::SO_REUSEPORT)
    }
}

impl Kernel {
    fn sockets(&self) -> impl DoubleEndedIterator<Item = (u64, &Socket)> + '_ {
        self.table.descriptions().filter_map(|(id, description)| match &description.open {
            FileObject::Socket(socket) => Some((id, socket)),
            _ => None,
        })
    }

    /// Of the sockets that fit a message best the last one, or, of those that share a port, the one
    /// that the sender's port falls to.
    fn choose(&self, fitting: Vec<(u8, u64)>, from: u16) -> Option<u64> {
        let best = fitting.iter().map(|(fitness, _)| *fitness).max()?;
        let best: Vec<u64> =
            fitting.into_iter().filter(|(fitness, _)| *fitness == best).map(|(_, id)| id).collect();
        let shares = |id: &u64| match self.table.description(*id).map(|d| &d.open) {
            Some(FileObject::Socket(socket)) => socket.shares_port(),
            _ => false,
        };
        match best.iter().all(shares) {
            true => best.get(usize::from(from) % best.len()).copied(),
            false => best.last().copied(),
        }
    }

    /// The listener at `address`, for a connection from the port `from`.
    pub(in crate::sentry) fn listener_at(&self, address: &Address, from: u16) -> Option<u64> {
        let listens = |(id, socket): (u64, &Socket)| {
            let listens = matches!(socket.stage, SocketState::Listening(_));
            socket.fitness(address).filter(|_| listens).map(|fitness| (fitness, id))
        };
        self.choose(self.sockets().filter_map(listens).collect(), from)
    }

    /// The receiver of datagrams from the address `own` of the socket `sender` to `to`, and its
    /// channel.
    pub(in crate::sentry) fn addressee(&self, to: &Address, own: &Address) -> Option<(u64, u64)> {
        let fits = |(id, socket): (u64, &Socket)| {
            let fitness = socket.fitness(to).filter(|_| {
                socket.is_for_datagrams() && socket.is_bound() && socket.own.family() != 0
            })?;
            if !to.is_internet() || socket.peer.0.is_empty() {
                return Some((fitness, id));
            }
            // A connected one receives only from its peer.
            let meant = own.fitness(false, &socket.peer).is_some();
            meant.then_some((fitness + 3, id))
        };
        let id = self.choose(self.sockets().filter_map(fits).collect(), own.port())?;
        Some((id, self.datagram_socket(id)?.1))
    }

    /// The sockets of the same kind that have an address in common with one of this address.
    fn holders<'a>(
        &'a self,
        address: &'a Address,
        only: bool,
        datagrams: bool,
    ) -> impl Iterator<Item = &'a Socket> + 'a {
        self.sockets().map(|(_, socket)| socket).filter(move |socket| {
            // A connection of a local socket has the name of its listener.
            (address.is_internet() || !socket.is_connected())
                && socket.is_for_datagrams() == datagrams
                && match address.is_internet() {
                    true => {
                        let other_only = socket.is_for_newer_protocol();
                        address.overlaps(only, &socket.own, other_only)
                    }
                    false => &socket.own == address,
                }
        })
    }

    /// Whether a socket may not have an address, since others have it. A path decides for local
    /// sockets. Those of one port that all share it (`SO_REUSEPORT`) may have one address, and
    /// those that reuse addresses, while none listens there.
    pub(in crate::sentry) fn is_taken(&self, socket: &Socket, address: &Address) -> bool {
        if address.path().is_some() {
            return false;
        }
        let both = |other: &Socket, name| {
            [socket, other].iter().all(|one| one.options.is_on(libc::SOL_SOCKET, name))
        };
        let (only, datagrams) = (socket.is_for_newer_protocol(), socket.is_for_datagrams());
        !self.holders(address, only, datagrams).all(|other| {
            let listens = matches!(other.stage, SocketState::Listening(_));
            address.is_internet()
                && (both(other, libc::SO_REUSEPORT) || both(other, libc::SO_REUSEADDR) && !listens)
        })
    }

    /// Whether another socket listens at the address of one, which do not both share their port.
    pub(in crate::sentry) fn is_heard(&self, socket: &Socket) -> bool {
        self.holders(&socket.own, socket.is_for_newer_protocol(), false).any(|other| {
            matches!(other.stage, SocketState::Listening(_))
                && !(socket.shares_port() && other.shares_port())
        })
    }

    /// Whether there is a connection between two addresses.
    pub(in crate::sentry) fn has_connection(&self, own: &Address, peer: &Address) -> bool {
        let same =
            |one: &Address, other: &Address| (one.ip(), one.port()) == (other.ip(), other.port());
        let mut sockets = self.sockets().map(|(_, socket)| socket);
        sockets.any(|s| s.is_connected() && same(&s.own, own) && same(&s.peer, peer))
    }

    /// Whether a socket that takes datagrams has an address.
    pub(in crate::sentry) fn has_name(&self, address: &Address) -> bool {
        self.holders(address, false, true).next().is_some()
    }

    /// A name that is no file's, and that no socket has (as Linux makes them, five digits behind a
    /// zero).
    pub(in crate::sentry) fn free_name(&self) -> Result<Address, Errno> {
        let name = |number: u32| {
            let family = (libc::AF_UNIX as u16).to_le_bytes();
            Address([&family[..], &[0], format!("{number:05x}").as_bytes()].concat())
        };
        self.free_address((0..1 << 20).map(name)).ok_or(Errno::NOSPC)
    }

    /// The first of some addresses that no socket has.
    pub(in crate::sentry) fn free_address(
        &self,
        mut addresses: impl Iterator<Item = Address>,
    ) -> Option<Address> {
        let taken: BTreeSet<&[u8]> = self.sockets().map(|(_, socket)| &socket.own.0[..]).collect();
        addresses.find(|address| !taken.contains(&address.0[..]))
    }

    /// A port that no socket of the kind has. Later sockets begin to look further on, so that a
    /// port that was closed is not used again at once.
    pub(in crate::sentry) fn free_port(&self, datagrams: bool) -> Result<u16, Errno> {
        let same = self.sockets().filter(|(_, socket)| socket.is_for_datagrams() == datagrams);
        let taken: BTreeSet<u16> = same.map(|(_, socket)| socket.own.port()).collect();
        let first = (self.table.next_id() % EPHEMERAL.len() as u64) as usize;
        let mut ports = EPHEMERAL.skip(first).chain(EPHEMERAL.take(first));
        ports.find(|port| !taken.contains(port)).ok_or(Errno::ADDRINUSE)
    }
}
