//! Sockets of a guest: streams and datagrams between its descriptors, to its caller, and to granted servers.

use serde::{Deserialize, Serialize};

use crate::sentry::net::socket_options::SocketOptions;

/// Bytes of an unfinished datagram, at most.
pub(in crate::sentry) const CORKED: usize = 65507;
/// Connections that wait to be accepted, at most.
pub(crate) const BACKLOG: usize = 128;
/// Longest address (`struct sockaddr_un`).
pub(crate) const MAX_ADDRESS: usize = 110;

/// An address, as the guest writes it (`struct sockaddr`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address(pub(crate) Vec<u8>);

impl Address {
    /// The loopback address of a family, or a nameless one.
    /// The address of an internet socket that is not bound.
    pub(crate) fn any(family: u16) -> Self {
        let len = if i32::from(family) == libc::AF_INET { 16 } else { 28 };
        let mut bytes = family.to_le_bytes().to_vec();
        bytes.resize(len, 0);
        Self(bytes)
    }

    pub(crate) fn loopback(family: u16, port: u16) -> Self {
        let mut bytes = family.to_le_bytes().to_vec();
        match i32::from(family) {
            libc::AF_INET => {
                bytes.extend(port.to_be_bytes());
                bytes.extend([127, 0, 0, 1]);
                bytes.resize(16, 0);
            }
            libc::AF_INET6 => {
                bytes.extend(port.to_be_bytes());
                bytes.resize(23, 0);
                bytes.push(1);
                bytes.resize(28, 0);
            }
            _ => {}
        }
        Self(bytes)
    }

    pub(crate) fn family(&self) -> u16 {
        self.0.get(..2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    pub(crate) fn is_internet(&self) -> bool {
        [libc::AF_INET, libc::AF_INET6].contains(&i32::from(self.family()))
    }

    pub(crate) fn port(&self) -> u16 {
        match self.0.get(2..4) {
            Some(bytes) if self.is_internet() => u16::from_be_bytes([bytes[0], bytes[1]]),
            _ => 0,
        }
    }

    pub(crate) fn set_port(&mut self, port: u16) {
        if let Some(bytes) = self.0.get_mut(2..4) {
            bytes.copy_from_slice(&port.to_be_bytes());
        }
    }

    /// Whether it has only a family.
    pub(crate) fn is_unnamed(&self) -> bool {
        self.0.len() == 2
    }

    /// Whether it is whole, and of this family.
    pub(crate) fn is_of(&self, family: u16) -> bool {
        let least = match i32::from(family) {
            libc::AF_INET => 16,
            libc::AF_INET6 => 24,
            _ => 3,
        };
        self.family() == family && self.0.len() >= least
    }

    /// Whether it is this machine's: the loopback address, or any.
    pub(crate) fn is_local(&self) -> bool {
        match i32::from(self.family()) {
            libc::AF_INET => self.0.get(4).is_some_and(|&first| first == 127 || first == 0),
            libc::AF_INET6 => {
                let Some(ip) = self.0.get(8..24) else { return false };
                let zeros = ip[..15].iter().all(|&byte| byte == 0) && ip[15] <= 1;
                let mapped =
                    ip[..10].iter().all(|&byte| byte == 0) && ip[10..13] == [255, 255, 127];
                zeros || mapped
            }
            _ => true,
        }
    }

    /// Whether its length is at most that of an address.
    pub(crate) fn is_short(&self) -> bool {
        self.0.len() <= MAX_ADDRESS + 18
    }

    /// The path of a local socket; `None` for an unnamed or abstract one.
    pub(crate) fn path(&self) -> Option<&[u8]> {
        let name = self.0.get(2..).filter(|_| i32::from(self.family()) == libc::AF_UNIX)?;
        let name = name.split(|&byte| byte == 0).next()?;
        (!name.is_empty()).then_some(name)
    }

    /// Whether a connection to `other` arrives at a socket that is bound here.
    pub(crate) fn takes(&self, other: &Self) -> bool {
        if self.is_internet() {
            return other.is_internet() && self.port() == other.port();
        }
        match (self.path(), other.path()) {
            // With a zero behind it, or without.
            (Some(own), Some(path)) => own == path,
            _ => self == other,
        }
    }
}

/// A connection that is made but not accepted yet: channels as the accepting side has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IncomingConnection {
    pub(crate) incoming: u64,
    pub(crate) outgoing: u64,
    pub(crate) peer: Address,
    /// PID of the connecting process; 0 for the caller.
    pub(crate) process: u32,
}

/// The state of a socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SocketState {
    New,
    Listening(Vec<IncomingConnection>),
    /// Channels to read and to write, until they are shut down.
    Connected {
        incoming: Option<u64>,
        outgoing: Option<u64>,
    },
    /// It is being connected to the outside; its channels are there already.
    Reaching {
        incoming: u64,
        outgoing: u64,
    },
    /// It failed with this error, which was not reported yet.
    Refused(i32),
    /// It takes datagrams out of this channel.
    Datagrams {
        inbox: u64,
        /// The local socket that it is connected to.
        mate: Option<u64>,
        /// Whether a message had no receiver, which its sender was not notified of yet.
        refused: bool,
    },
}

/// A socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Socket {
    pub(crate) family: u16,
    pub(crate) own: Address,
    pub(crate) peer: Address,
    pub(crate) stage: SocketState,
    /// Goes up with every arrival.
    pub(crate) edges: u64,
    /// Whether it connects packets instead of bytes.
    pub(crate) packets: bool,
    /// PID of the peer at connection, or of the listener; 0 without one.
    pub(crate) mate: u32,
    pub(crate) options: SocketOptions,
    /// The beginning of an unfinished datagram.
    pub(crate) corked: Vec<u8>,
}

impl Socket {
    pub(crate) fn new(family: u16) -> Self {
        let own = Address::loopback(family, 0);
        Self {
            family,
            own,
            peer: Address::default(),
            stage: SocketState::New,
            edges: 0,
            packets: false,
            mate: 0,
            options: SocketOptions::default(),
            corked: Vec::new(),
        }
    }

    /// One for datagrams, which takes them out of a channel.
    pub(crate) fn for_datagrams(family: u16, inbox: u64) -> Self {
        Self {
            stage: SocketState::Datagrams { inbox, mate: None, refused: false },
            ..Self::new(family)
        }
    }

    pub(crate) fn is_for_datagrams(&self) -> bool {
        matches!(self.stage, SocketState::Datagrams { .. })
    }

    /// Whether it has a bound address.
    pub(crate) fn is_bound(&self) -> bool {
        self.own != Address::loopback(self.family, 0)
    }

    pub(crate) fn connected(own: Address, peer: Address, incoming: u64, outgoing: u64) -> Self {
        let stage = SocketState::Connected { incoming: Some(incoming), outgoing: Some(outgoing) };
        Self { own: own.clone(), peer, stage, ..Self::new(own.family()) }
    }

    /// Whether a guest could have made it.
    pub(crate) fn is_sound(&self) -> bool {
        let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
        let short = Address::is_short;
        let queue = match &self.stage {
            SocketState::Listening(queue) => {
                queue.len() <= BACKLOG && queue.iter().all(|arrival| short(&arrival.peer))
            }
            _ => true,
        };
        let plain = self.options.is_sound() && self.corked.len() <= CORKED;
        let addresses = short(&self.own) && short(&self.peer);
        families.contains(&self.family.into()) && addresses && queue && plain
    }

    /// The channels that it has an end of, and whether it writes them.
    pub(crate) fn ends(&self) -> Vec<(u64, bool)> {
        match &self.stage {
            SocketState::New | SocketState::Refused(_) => Vec::new(),
            SocketState::Reaching { incoming, outgoing } => {
                vec![(*incoming, false), (*outgoing, true)]
            }
            SocketState::Datagrams { inbox, .. } => vec![(*inbox, false)],
            SocketState::Listening(queue) => {
                queue.iter().flat_map(|a| [(a.incoming, false), (a.outgoing, true)]).collect()
            }
            SocketState::Connected { incoming, outgoing } => {
                let read = incoming.map(|id| (id, false));
                read.into_iter().chain(outgoing.map(|id| (id, true))).collect()
            }
        }
    }
}

/// Data that came with received bytes.
#[derive(Debug, Default)]
pub(in crate::sentry) struct ReceivedMessage {
    pub(in crate::sentry) from: Option<Address>,
    pub(in crate::sentry) parcel: Option<u64>,
    /// Bytes of a truncated datagram.
    pub(in crate::sentry) whole: Option<u64>,
}

/// Ports for sockets that bind to port 0.
pub(in crate::sentry) const EPHEMERAL: std::ops::Range<u16> = 32768..60999;
