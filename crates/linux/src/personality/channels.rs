//! Streams of bytes within a guest: what pipes and connected sockets are made of.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

/// Bytes that a channel holds.
pub(crate) const CAPACITY: usize = 64 << 10;
/// Room that makes one writable again (`PIPE_BUF`).
const ROOM: usize = 4096;
/// Channels a guest may have.
const CHANNELS: usize = 4096;

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum End {
    /// The guest itself.
    Own,
    /// The caller, who has written a request.
    Asks,
    /// The caller: what is written there is an answer.
    Listens,
    /// The host, which writes.
    Feeds,
    /// The host, which reads.
    Drains,
}

impl End {
    /// Whether somebody outside writes there.
    fn writes(self) -> bool {
        matches!(self, Self::Asks | Self::Feeds)
    }

    /// Whether somebody outside reads there.
    fn reads(self) -> bool {
        matches!(self, Self::Listens | Self::Drains)
    }
}

/// Bytes on their way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Channel {
    data: VecDeque<u8>,
    /// Descriptions that read it and write it.
    pub(crate) readers: u32,
    pub(crate) writers: u32,
    pub(crate) end: End,
    /// Goes up whenever there is more to read or more room, or an end closes.
    pub(crate) edges: u64,
}

impl Channel {
    pub(crate) fn len(&self) -> usize {
        self.data.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    pub(crate) fn room(&self) -> usize {
        CAPACITY.saturating_sub(self.data.len())
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.end == End::Listens || self.room() >= ROOM
    }

    /// The first bytes, `len` at most; they stay.
    pub(crate) fn peek(&self, len: usize) -> Vec<u8> {
        self.data.iter().take(len).copied().collect()
    }

    pub(crate) fn skip(&mut self, len: usize) {
        self.data.drain(..len.min(self.data.len()));
        self.edges += 1;
    }

    /// Adds what there is room for; how many bytes that were.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> usize {
        let len = bytes.len().min(self.room());
        self.data.extend(&bytes[..len]);
        self.edges += 1;
        len
    }
}

/// All channels of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Channels {
    list: BTreeMap<u64, Channel>,
    next: u64,
}

impl Channels {
    /// A channel with one reader and one writer; nothing when there are too many.
    pub(crate) fn add(&mut self) -> Option<u64> {
        if self.list.len() >= CHANNELS {
            return None;
        }
        let id = self.next;
        self.next += 1;
        let data = VecDeque::new();
        self.list.insert(id, Channel { data, readers: 1, writers: 1, end: End::Own, edges: 0 });
        Some(id)
    }

    /// A channel of which the caller has one end. A request may be however long.
    pub(crate) fn add_caller(&mut self, end: End, bytes: &[u8]) -> Option<u64> {
        let id = self.add()?;
        let channel = self.list.get_mut(&id)?;
        channel.data.extend(bytes);
        channel.end = end;
        Some(id)
    }

    pub(crate) fn get(&self, id: u64) -> Option<&Channel> {
        self.list.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: u64) -> Option<&mut Channel> {
        self.list.get_mut(&id)
    }

    /// Those of which the caller has an end.
    pub(crate) fn callers(&self) -> impl Iterator<Item = u64> + '_ {
        let calls = |channel: &Channel| matches!(channel.end, End::Asks | End::Listens);
        self.iter().filter(move |(_, channel)| calls(channel)).map(|(id, _)| id)
    }

    /// Whoever has an end outside of the guest has it no more.
    pub(crate) fn let_go(&mut self, id: u64) {
        let Some(channel) = self.list.get_mut(&id) else { return };
        let end = std::mem::replace(&mut channel.end, End::Own);
        if end != End::Own {
            self.leave(id, end.writes());
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Channel)> + '_ {
        self.list.iter().map(|(&id, channel)| (id, channel))
    }

    /// A further reader or writer.
    pub(crate) fn join(&mut self, id: u64, writes: bool) {
        let Some(channel) = self.list.get_mut(&id) else { return };
        let count = if writes { &mut channel.writers } else { &mut channel.readers };
        *count += 1;
        channel.edges += 1;
    }

    /// A reader or a writer less; what nobody reads and nobody writes goes.
    pub(crate) fn leave(&mut self, id: u64, writes: bool) {
        let Some(channel) = self.list.get_mut(&id) else { return };
        let count = if writes { &mut channel.writers } else { &mut channel.readers };
        *count = count.saturating_sub(1);
        channel.edges += 1;
        if channel.readers == 0 && channel.writers == 0 {
            self.list.remove(&id);
        }
    }

    /// What is wrong with channels that somebody else wrote down, if anything is: `ends` are all that descriptions have of them.
    pub(crate) fn check(&self, ends: &[(u64, bool)]) -> Result<(), &'static str> {
        let mut counts: BTreeMap<u64, (u32, u32)> = BTreeMap::new();
        for &(id, writes) in ends {
            let count = counts.entry(id).or_default();
            if writes { count.1 += 1 } else { count.0 += 1 }
        }
        let known = counts.keys().all(|id| self.list.contains_key(id));
        let sound = self.list.iter().all(|(id, channel)| {
            let (readers, writers) = counts.get(id).copied().unwrap_or_default();
            // One of its ends may be the caller's, or the host's.
            let fits = channel.writers == writers + u32::from(channel.end.writes())
                && channel.readers == readers + u32::from(channel.end.reads());
            *id < self.next && fits
        });
        if known && sound && self.list.len() <= CHANNELS {
            Ok(())
        } else {
            Err("its pipes and connections do not fit together")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_lasts_as_long_as_its_ends_and_holds_so_much() {
        let mut channels = Channels::default();
        let id = channels.add().unwrap();
        let channel = channels.get_mut(id).unwrap();
        assert_eq!(channel.push(&vec![7; CAPACITY + 9]), CAPACITY);
        assert!(!channel.is_writable());
        channel.skip(ROOM);
        assert!(channel.is_writable());
        assert_eq!(channel.peek(3), [7; 3]);
        channels.leave(id, true);
        assert_eq!(channels.get(id).map(|channel| channel.writers), Some(0));
        channels.leave(id, false);
        assert!(channels.get(id).is_none());
    }

    #[test]
    fn ends_that_do_not_fit_are_refused() {
        let mut channels = Channels::default();
        let own = channels.add().unwrap();
        let asked = channels.add_caller(End::Asks, b"hello").unwrap();
        let all = [(own, true), (own, false), (asked, false)];
        assert_eq!(channels.check(&all), Ok(()));
        for left_out in 0..all.len() {
            let mut ends = all.to_vec();
            let out = ends.remove(left_out);
            assert!(channels.check(&ends).is_err(), "{out:?}");
        }
        assert!(channels.check(&[&all[..], &[(99, true)]].concat()).is_err());
        assert!(channels.check(&[&all[..], &[(asked, true)]].concat()).is_err());
        channels.next = 0;
        assert!(channels.check(&all).is_err());
    }
}
