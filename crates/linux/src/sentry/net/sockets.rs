//! Sockets of a guest: streams and datagrams between its descriptors, to its caller, and to granted
//! servers.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::peer_credentials::PeerCredentials;
use crate::sentry::kernel::time::MonotonicTime;
pub(crate) use crate::sentry::net::addresses::{Address, MAX_ADDRESS};
use crate::sentry::net::socket_options::SocketOptions;

/// Bytes of an unfinished datagram, at most.
pub(in crate::sentry) const CORKED: usize = 65507;
/// Connections that wait to be accepted, at most.
pub(crate) const BACKLOG: usize = 128;
pub(in crate::sentry) const NETLINK: i32 = libc::AF_NETLINK;
/// Bytes of a buffer of a netlink socket whose size was not set (`net.core.wmem_default` and
/// `rmem_default`).
pub(in crate::sentry) const NETLINK_BUFFER: u32 = 212_992;

/// A connection that is made but not accepted yet: channels as the accepting side has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IncomingConnection {
    pub(crate) incoming: u64,
    pub(crate) outgoing: u64,
    pub(crate) peer: Address,
    /// The address that was connected to.
    pub(crate) own: Address,
    /// The connecting process; none for the caller.
    pub(crate) process: PeerCredentials,
    /// The end of the time in which it is accepted only with data (`TCP_DEFER_ACCEPT`). A thawed
    /// one is accepted at once.
    #[serde(skip)]
    pub(crate) until: Option<MonotonicTime>,
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
    /// Goes up with every arrival, and when a deferred one is accepted.
    pub(crate) edges: u64,
    /// Whether it connects packets instead of bytes.
    pub(crate) packets: bool,
    /// The peer at connection, or the listener.
    pub(crate) mate: PeerCredentials,
    /// The address that the program gave it, which it has again when it is disconnected.
    pub(crate) given: Address,
    /// Whether it sends no more datagrams (`SHUT_WR`).
    pub(crate) mute: bool,
    /// Whether a connect that did not wait, or was interrupted, was not reported yet.
    pub(crate) connecting: bool,
    /// Connections that may wait behind the next one.
    pub(crate) backlog: u32,
    /// The channel that it wrote until it was shut down.
    pub(crate) left: Option<u64>,
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
            mate: PeerCredentials::default(),
            given: Address::default(),
            mute: false,
            connecting: false,
            backlog: 0,
            left: None,
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

    pub(crate) fn is_local(&self) -> bool {
        i32::from(self.family) == libc::AF_UNIX
    }

    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.stage, SocketState::Connected { .. })
    }

    /// Refuses an address whose protocol is another than that of the address that the socket is
    /// bound to.
    pub(in crate::sentry) fn check_protocol(&self, to: &Address) -> Result<(), Errno> {
        let (Some(own), Some(to)) = (self.own.ip(), to.ip()) else { return Ok(()) };
        let only = self.options.is_on(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY);
        let bound = self.is_bound() && !own.is_unspecified();
        match (own.is_ipv6(), to.is_ipv6()) {
            (_, false) if only => Err(Errno::NETUNREACH),
            (true, false) if bound => Err(Errno::NETUNREACH),
            (false, true) if self.is_bound() => Err(Errno::AFNOSUPPORT),
            _ => Ok(()),
        }
    }

    /// Whether it has a bound address.
    pub(crate) fn is_bound(&self) -> bool {
        self.own != Address::loopback(self.family, 0)
    }

    pub(crate) fn connected(own: Address, peer: Address, incoming: u64, outgoing: u64) -> Self {
        let stage = SocketState::Connected { incoming: Some(incoming), outgoing: Some(outgoing) };
        Self { own: own.clone(), peer, stage, ..Self::new(own.family()) }
    }

    /// Connections that wait to be accepted beyond the first, as `listen` bounds them: a snapshot
    /// may claim more.
    pub(in crate::sentry) fn backlog_len(&self) -> usize {
        (self.backlog as usize).min(BACKLOG - 1)
    }

    /// Whether a guest could have made it.
    pub(crate) fn is_sound(&self) -> bool {
        let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
        let short = Address::is_short;
        let queue = match &self.stage {
            SocketState::Listening(queue) => {
                let sound = |a: &IncomingConnection| short(&a.peer) && short(&a.own);
                queue.len() <= BACKLOG && queue.iter().all(sound)
            }
            _ => true,
        };
        let plain = self.options.is_sound() && self.corked.len() <= CORKED && self.edges < 1 << 62;
        let addresses = short(&self.own) && short(&self.peer) && short(&self.given);
        families.contains(&self.family.into()) && addresses && queue && plain
    }

    /// Its peer, and those that wait to be accepted.
    pub(crate) fn peers_mut(&mut self) -> impl Iterator<Item = &mut PeerCredentials> + '_ {
        let queue = match &mut self.stage {
            SocketState::Listening(queue) => &mut queue[..],
            _ => &mut [],
        };
        [&mut self.mate].into_iter().chain(queue.iter_mut().map(|arrival| &mut arrival.process))
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
    /// Whether the message stays, with its descriptors (`MSG_PEEK`).
    pub(in crate::sentry) stays: bool,
    /// The process that sent it, if its credentials count.
    pub(in crate::sentry) sender: Option<PeerCredentials>,
    /// Hop limit and class of a datagram.
    pub(in crate::sentry) packet: [u8; 2],
    /// Bytes of a truncated datagram.
    pub(in crate::sentry) whole: Option<u64>,
}

/// The control data of a message to send.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::sentry) struct SentControl<'a> {
    /// Descriptors.
    pub(in crate::sentry) rights: &'a [u64],
    /// Whether the sender's credentials are among it.
    pub(in crate::sentry) named: bool,
    /// Whether more bytes follow, with which these are sent (`MSG_MORE`).
    pub(in crate::sentry) more: bool,
    /// Hop limit and class of a datagram, which override the options of its socket.
    pub(in crate::sentry) packet: [Option<u8>; 2],
}

/// Ports for sockets that bind to port 0.
pub(in crate::sentry) const EPHEMERAL: std::ops::Range<u16> = 32768..60999;
