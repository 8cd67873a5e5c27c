//! Host connections to listeners within a guest. They last until both sides close them, and are in
//! every frozen state; a caller that continues from one hangs up foreign connections.

use crate::sentry::kernel::channels::{Channel, ChannelEnd};
use crate::sentry::kernel::peer_credentials::PeerCredentials;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::net::sockets::{Address, EPHEMERAL};

/// A connection that the host has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InboundConnection {
    /// The channel that the host writes.
    to: u64,
    /// The channel that it reads.
    from: u64,
}

/// The bytes of an exchange.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExchangeResult {
    /// Number of bytes that the guest has taken.
    pub taken: usize,
    /// Bytes that it has written.
    pub given: Vec<u8>,
    /// Whether it will write no more.
    pub ended: bool,
}

/// Whether a port within the guest takes connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortState {
    /// It has no listener.
    Closed,
    /// The backlog of its listener is full.
    Full,
    /// It takes them.
    Open,
}

impl Kernel {
    /// The family and the socket of the listener on loopback `port`.
    fn loopback_listener(&self, port: u16) -> Option<(u16, u64)> {
        let families = [libc::AF_INET, libc::AF_INET6].map(|family| family as u16);
        let listens =
            |family: &u16| self.listener_at(&Address::loopback(*family, port), EPHEMERAL.end);
        families.into_iter().find_map(|family| Some((family, listens(&family)?)))
    }

    /// Whether a loopback port takes connections.
    pub(crate) fn port_state(&self, port: u16) -> PortState {
        let Some((_, listener)) = self.loopback_listener(port) else { return PortState::Closed };
        if self.has_backlog(listener) { PortState::Open } else { PortState::Full }
    }

    /// A connection to the listener on loopback `port`: the channels that the other side reads and
    /// writes, which have these ends.
    fn arrive_at(&mut self, port: u16, [reads, writes]: [ChannelEnd; 2]) -> Option<(u64, u64)> {
        let (family, listener) = self.loopback_listener(port)?;
        let peer = Address::loopback(family, EPHEMERAL.end);
        let own = Address::loopback(family, port);
        let (from, to) = self.arrive(listener, peer, own, PeerCredentials::default()).ok()?;
        for (id, end) in [(to, writes), (from, reads)] {
            self.channels.get_mut(id)?.end = end;
        }
        Some((from, to))
    }

    /// Connects to the guest's listener on loopback `port`; `None` without one, or with a full
    /// backlog.
    pub(crate) fn dial(&mut self, port: u16) -> Option<InboundConnection> {
        let (from, to) = self.arrive_at(port, [ChannelEnd::Drains, ChannelEnd::Feeds])?;
        Some(InboundConnection { to, from })
    }

    /// As [`Kernel::dial`], for a host socket at the sentry: the channel that the guest reads, and
    /// the one that it writes.
    pub(crate) fn arrive_from_outside(&mut self, port: u16) -> Option<(u64, u64)> {
        let (from, to) = self.arrive_at(port, [ChannelEnd::Goes, ChannelEnd::Comes])?;
        Some((to, from))
    }

    /// Whether `bytes` could be taken, up to `room` be returned, or the other side has closed.
    pub(crate) fn has_news(&self, dialed: InboundConnection, bytes: usize, room: usize) -> bool {
        let (to, from) = (self.channels.get(dialed.to), self.channels.get(dialed.from));
        let takes = bytes > 0 && to.is_none_or(|to| to.readers == 0 || to.room() > 0);
        let gives = from.is_none_or(|from| match from.is_empty() {
            true => from.writers == 0,
            false => room > 0,
        });
        takes || gives
    }

    /// Passes as many of `bytes` as there is room for, and takes at most `room` bytes of output.
    pub(crate) fn exchange(
        &mut self,
        dialed: InboundConnection,
        bytes: &[u8],
        room: usize,
    ) -> ExchangeResult {
        let taken = match self.channels.get_mut(dialed.to).filter(|to| to.readers > 0) {
            Some(to) if !bytes.is_empty() => to.push(bytes),
            Some(_) => 0,
            // The reader has closed.
            None => bytes.len(),
        };
        let Some(from) = self.channels.get_mut(dialed.from) else {
            return ExchangeResult { taken, given: Vec::new(), ended: true };
        };
        let given = from.peek(room);
        if !given.is_empty() {
            // A connection over loopback carries no descriptors.
            let _ = from.skip(given.len());
        }
        ExchangeResult { taken, given, ended: from.is_empty() && from.writers == 0 }
    }

    /// The host writes no more; with `both` it reads no more either.
    pub(crate) fn hang_up_on(&mut self, dialed: InboundConnection, both: bool) {
        self.channels.let_go(dialed.to);
        if both {
            self.channels.let_go(dialed.from);
        }
    }

    /// The channels of host connections except `known`.
    pub(crate) fn strangers(&self, known: &[InboundConnection]) -> Vec<u64> {
        let own = |(id, channel): (u64, &Channel)| match channel.end {
            ChannelEnd::Feeds => known.iter().all(|one| one.to != id).then_some(id),
            ChannelEnd::Drains => known.iter().all(|one| one.from != id).then_some(id),
            _ => None,
        };
        self.channels.iter().filter_map(own).collect()
    }

    /// Lets go of such.
    pub(crate) fn close_other_connections(&mut self, strangers: &[u64]) {
        strangers.iter().for_each(|id| self.channels.let_go(*id));
    }
}
