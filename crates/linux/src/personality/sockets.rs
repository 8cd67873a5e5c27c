//! Sockets of a guest: streams and datagrams between its own descriptors, to whoever calls it, and to servers that are granted.

use serde::{Deserialize, Serialize};

use super::options::Options;

/// Bytes of a datagram that more is to follow of, at most.
pub(super) const CORKED: usize = 65507;
/// Connections that wait to be accepted, at most.
pub(crate) const BACKLOG: usize = 128;
/// Longest address (`struct sockaddr_un`).
pub(crate) const LONGEST: usize = 110;

/// An address, as the guest writes it (`struct sockaddr`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address(pub(crate) Vec<u8>);

impl Address {
    /// The loopback address of a family, or a nameless one.
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

    /// Whether it says nothing but a family.
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

    /// Whether it is as long as addresses are, at most.
    pub(crate) fn is_short(&self) -> bool {
        self.0.len() <= LONGEST + 18
    }

    /// The path by which a local socket is found; nothing of one without a name, or with one that is no file's.
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
pub(crate) struct Arrival {
    pub(crate) incoming: u64,
    pub(crate) outgoing: u64,
    pub(crate) peer: Address,
    /// Who has connected; nought if it is nobody of the guest's.
    pub(crate) process: u32,
}

/// What a socket is up to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stage {
    New,
    Listening(Vec<Arrival>),
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
    /// That failed, with this error, which nobody was told yet.
    Refused(i32),
    /// It takes datagrams out of this channel.
    Datagrams {
        inbox: u64,
        /// The local socket that it is connected to.
        mate: Option<u64>,
        /// Whether a message has found nobody, which its sender was not told yet.
        refused: bool,
    },
}

/// A socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Socket {
    pub(crate) family: u16,
    pub(crate) own: Address,
    pub(crate) peer: Address,
    pub(crate) stage: Stage,
    /// Goes up with every arrival.
    pub(crate) edges: u64,
    /// Whether what it connects are packets, not bytes.
    pub(crate) packets: bool,
    /// The process at the other end as it was connected, or its own one that listens; nought if there is none.
    pub(crate) mate: u32,
    pub(crate) options: Options,
    /// The beginning of a datagram that more is to follow of.
    pub(crate) corked: Vec<u8>,
}

impl Socket {
    pub(crate) fn new(family: u16) -> Self {
        let own = Address::loopback(family, 0);
        Self {
            family,
            own,
            peer: Address::default(),
            stage: Stage::New,
            edges: 0,
            packets: false,
            mate: 0,
            options: Options::default(),
            corked: Vec::new(),
        }
    }

    /// One for datagrams, which takes them out of a channel.
    pub(crate) fn for_datagrams(family: u16, inbox: u64) -> Self {
        Self { stage: Stage::Datagrams { inbox, mate: None, refused: false }, ..Self::new(family) }
    }

    pub(crate) fn is_for_datagrams(&self) -> bool {
        matches!(self.stage, Stage::Datagrams { .. })
    }

    /// Whether it has an address of its own.
    pub(crate) fn is_bound(&self) -> bool {
        self.own != Address::loopback(self.family, 0)
    }

    pub(crate) fn connected(own: Address, peer: Address, incoming: u64, outgoing: u64) -> Self {
        let stage = Stage::Connected { incoming: Some(incoming), outgoing: Some(outgoing) };
        Self { own: own.clone(), peer, stage, ..Self::new(own.family()) }
    }

    /// Whether it is what a guest could have.
    pub(crate) fn is_sound(&self) -> bool {
        let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6];
        let short = Address::is_short;
        let queue = match &self.stage {
            Stage::Listening(queue) => {
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
            Stage::New | Stage::Refused(_) => Vec::new(),
            Stage::Reaching { incoming, outgoing } => vec![(*incoming, false), (*outgoing, true)],
            Stage::Datagrams { inbox, .. } => vec![(*inbox, false)],
            Stage::Listening(queue) => {
                queue.iter().flat_map(|a| [(a.incoming, false), (a.outgoing, true)]).collect()
            }
            Stage::Connected { incoming, outgoing } => {
                let read = incoming.map(|id| (id, false));
                read.into_iter().chain(outgoing.map(|id| (id, true))).collect()
            }
        }
    }
}
