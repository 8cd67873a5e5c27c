//! Connections of the host's own to what listens within a guest. They last as long as either side keeps them, and are in every frozen
//! state; whoever goes on from one hangs up those that are not theirs.

use super::State;
use super::channels::{Channel, End};
use super::socket_calls::EPHEMERAL;
use super::sockets::Address;

/// A connection that the host has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialed {
    /// The channel that the host writes.
    to: u64,
    /// The channel that it reads.
    from: u64,
}

/// What has gone through a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exchanged {
    /// How many bytes the guest has taken; what is left has no room yet.
    pub taken: usize,
    /// What it has written.
    pub given: Vec<u8>,
    /// Whether it will write no more.
    pub ended: bool,
}

impl State {
    /// Connects to who listens on `port` of the guest's loopback; nothing where nobody does, or takes no more.
    pub(crate) fn dial(&mut self, port: u16) -> Option<Dialed> {
        let families = [libc::AF_INET, libc::AF_INET6].map(|family| family as u16);
        let listens = |family: &u16| self.listener_at(&Address::loopback(*family, port));
        let (family, listener) =
            families.into_iter().find_map(|family| Some((family, listens(&family)?)))?;
        let peer = Address::loopback(family, EPHEMERAL.end);
        let (from, to) = self.arrive(listener, peer, 0).ok()?;
        for (id, end) in [(to, End::Feeds), (from, End::Drains)] {
            self.channels.get_mut(id)?.end = end;
        }
        Some(Dialed { to, from })
    }

    /// Whether `bytes` could be taken, or up to `room` be given, or the other side is gone.
    pub(crate) fn has_news(&self, dialed: Dialed, bytes: usize, room: usize) -> bool {
        let (to, from) = (self.channels.get(dialed.to), self.channels.get(dialed.from));
        let takes = bytes > 0 && to.is_none_or(|to| to.readers == 0 || to.room() > 0);
        let gives = from.is_none_or(|from| match from.is_empty() {
            true => from.writers == 0,
            false => room > 0,
        });
        takes || gives
    }

    /// Hands `bytes` over, as many as there is room for, and takes at most `room` of what was written.
    pub(crate) fn exchange(&mut self, dialed: Dialed, bytes: &[u8], room: usize) -> Exchanged {
        let taken = match self.channels.get_mut(dialed.to).filter(|to| to.readers > 0) {
            Some(to) if !bytes.is_empty() => to.push(bytes),
            Some(_) => 0,
            // Nobody reads it any more.
            None => bytes.len(),
        };
        let Some(from) = self.channels.get_mut(dialed.from) else {
            return Exchanged { taken, given: Vec::new(), ended: true };
        };
        let given = from.peek(room);
        if !given.is_empty() {
            // A connection over loopback carries no descriptors.
            let _ = from.skip(given.len());
        }
        Exchanged { taken, given, ended: from.is_empty() && from.writers == 0 }
    }

    /// The host writes no more; with `both` it reads no more either.
    pub(crate) fn hang_up_on(&mut self, dialed: Dialed, both: bool) {
        self.channels.let_go(dialed.to);
        if both {
            self.channels.let_go(dialed.from);
        }
    }

    /// The channels of the host's connections that are none of `known`.
    pub(crate) fn strangers(&self, known: &[Dialed]) -> Vec<u64> {
        let own = |(id, channel): (u64, &Channel)| match channel.end {
            End::Feeds => known.iter().all(|one| one.to != id).then_some(id),
            End::Drains => known.iter().all(|one| one.from != id).then_some(id),
            _ => None,
        };
        self.channels.iter().filter_map(own).collect()
    }

    /// Lets go of such.
    pub(crate) fn hang_up_strangers(&mut self, strangers: &[u64]) {
        strangers.iter().for_each(|id| self.channels.let_go(*id));
    }
}
