//! Streams of bytes within a guest, which pipes and connected sockets are made of.

pub(in crate::sentry) mod capacities;
mod corks;
mod edges;
mod soundness;
mod watching;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use corks::Cork;
use watching::WatchedChannels;

use crate::sentry::kernel::peer_credentials::PeerCredentials;
use crate::sentry::net::sockets::Address;

/// Bytes that a channel holds.
pub(crate) const CAPACITY: usize = 64 << 10;
/// Maximum and minimum bytes of one, if a program sets its size (`pipe-max-size`).
pub(in crate::sentry) const MAX_RESERVED: usize = 1 << 20;
/// Maximum bytes of one between sockets: half of the largest buffer that a program may set.
pub(in crate::sentry) const MAX_SOCKET_BYTES: usize = 4 << 20;
pub(in crate::sentry) const PAGE: usize = 4096;
/// Room that makes a pipe writable again.
const PIPE_BUF: usize = 4096;
/// Channels a guest may have.
pub(in crate::sentry) const CHANNELS: usize = 4096;

/// Counters of a channel stay below this, however long it lasts.
const MAX_COUNTER: u64 = 1 << 62;
/// Room that makes a local socket of datagrams writable, at most.
const LETTER_ROOM: usize = CAPACITY / 2;
/// Bytes of the head of a datagram.
const DATAGRAM_HEAD: usize = 32;
/// Datagrams that a channel of the usual size holds. Smaller ones hold fewer.
pub(in crate::sentry) const LETTERS: usize = 256;
/// Messages with descriptors or credentials that a channel holds.
pub(in crate::sentry) const MAX_MESSAGES: usize = 1024;

/// Data that bytes are sent with: descriptors, and the process that sent them if its credentials
/// count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ancillary {
    pub(crate) parcel: Option<u64>,
    pub(crate) sender: Option<PeerCredentials>,
    /// The hop limit and the class of a packet.
    pub(crate) packet: [u8; 2],
}

/// A message in a stream: its bytes, from and until, counted from the channel's first, and the data
/// that they were sent with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct InFlightMessage {
    id: Option<u64>,
    sender: Option<PeerCredentials>,
    from: u64,
    until: u64,
}

/// A datagram, whose bytes are in its channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Datagram {
    pub(crate) len: usize,
    pub(crate) from: Address,
    pub(crate) parcel: Option<u64>,
    /// The process that sent it, if its credentials count.
    pub(crate) sender: Option<PeerCredentials>,
    /// Its hop limit and class.
    pub(crate) packet: [u8; 2],
}

/// The other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ChannelEnd {
    /// The guest itself.
    Own,
    /// The caller's end, which wrote a request.
    Asks,
    /// The caller: bytes written there are an answer.
    Listens,
    /// The host, which writes.
    Feeds,
    /// The host, which reads.
    Drains,
    /// An outside server, whose bytes the sentry writes.
    Comes,
    /// A server outside, for which the sentry reads.
    Goes,
}

impl ChannelEnd {
    /// Whether the other end is outside and writes.
    fn writes(self) -> bool {
        matches!(self, Self::Asks | Self::Feeds | Self::Comes)
    }

    /// Whether the other end is outside and reads.
    fn reads(self) -> bool {
        matches!(self, Self::Listens | Self::Drains | Self::Goes)
    }
}

/// Bytes on their way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Channel {
    #[serde(with = "crate::packed_bytes::queue")]
    data: VecDeque<u8>,
    /// Descriptions that read it and write it.
    pub(crate) readers: u32,
    pub(crate) writers: u32,
    pub(crate) end: ChannelEnd,
    /// Goes up whenever there is more to read or more room, or an end closes.
    pub(crate) edges: u64,
    /// Bytes that were read.
    taken: u64,
    parcels: VecDeque<InFlightMessage>,
    /// The datagrams among its bytes.
    letters: VecDeque<Datagram>,
    /// Bytes that it holds at most.
    capacity: usize,
    /// Whether its reader has shut it down (`SHUT_RD`): what it holds is read, and then its end.
    pub(crate) shut: bool,
    /// Whether its writer broke the connection off, which the reader was not notified of yet.
    pub(crate) reset: bool,
    /// Whether its reader wants the credentials of its writers (`SO_PASSCRED`).
    pub(crate) named: bool,
    /// The bytes at its end that its writer holds back.
    #[serde(skip)]
    cork: Option<Cork>,
}

impl Channel {
    /// Bytes that its reader can have.
    pub(crate) fn len(&self) -> usize {
        self.data.len() - self.held_back()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn room(&self) -> usize {
        match self.parcels.len() < MAX_MESSAGES {
            true => self.capacity.saturating_sub(self.data.len()),
            false => 0,
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.end == ChannelEnd::Listens || self.room() >= PIPE_BUF
    }

    /// Bytes that were written to it so far.
    pub(crate) fn passed(&self) -> u64 {
        self.taken.saturating_add(self.len() as u64)
    }

    /// Whether nothing comes after the bytes that it holds.
    pub(crate) fn has_ended(&self) -> bool {
        self.writers == 0 || self.shut
    }

    /// The first bytes, `len` at most; they stay.
    pub(crate) fn peek(&self, len: usize) -> Vec<u8> {
        let len = len.min(self.len());
        let (front, back) = self.data.as_slices();
        let front = &front[..len.min(front.len())];
        [front, &back[..(len - front.len()).min(back.len())]].concat()
    }

    /// The number of bytes that one read may return: a message with descriptors ends the read, and,
    /// for a reader of credentials, so do bytes of another sender.
    pub(crate) fn together(&self) -> usize {
        let (first, mut at) = (self.sender(), self.taken);
        let until = |end: u64| (end - self.taken) as usize;
        for message in &self.parcels {
            let start = message.from.max(at);
            if self.named && first.is_some() && start > at {
                return until(at);
            }
            if self.named && message.sender != first {
                return until(start);
            }
            if message.id.is_some() {
                return until(message.until);
            }
            at = message.until;
        }
        if self.named && first.is_some() { until(at) } else { self.len() }
    }

    /// The sender of the first byte, if its credentials count.
    pub(crate) fn sender(&self) -> Option<PeerCredentials> {
        let first = self.parcels.front().filter(|message| message.from <= self.taken)?;
        first.sender
    }

    /// The descriptors that a read of `len` bytes receives.
    pub(crate) fn parcel(&self, len: usize) -> Option<u64> {
        let end = self.taken + len as u64;
        // Without room for bytes a message is received as well.
        let read = |message: &&InFlightMessage| message.from < end.max(self.taken + 1);
        self.parcels.iter().take_while(read).find_map(|message| message.id)
    }

    /// Forgets the first bytes, at most as many as may be read together. Hands back the descriptors
    /// that came with them.
    #[must_use]
    pub(crate) fn skip(&mut self, len: usize) -> Option<u64> {
        let len = len.min(self.len());
        let parcel = self.parcel(len);
        self.data.drain(..len);
        self.taken += len as u64;
        self.edges += 1;
        let taken = self.taken;
        self.parcels.iter_mut().filter(|m| m.id == parcel).for_each(|m| m.id = None);
        self.parcels.retain(|m| m.until > taken && (m.id.is_some() || m.sender.is_some()));
        parcel
    }

    /// Attaches data to the last `len` bytes.
    pub(crate) fn attach(&mut self, data: Ancillary, len: usize) {
        let until = self.taken + self.data.len() as u64;
        let (id, sender, from) = (data.parcel, data.sender, until - len as u64);
        if len == 0 || id.is_none() && sender.is_none() {
            return;
        }
        if let Some(last) = self.parcels.back_mut()
            && (last.id, id, last.sender, last.until) == (None, None, sender, from)
        {
            last.until = until;
            return;
        }
        self.parcels.push_back(InFlightMessage { id, sender, from, until });
    }

    /// Whether a datagram fits.
    pub(crate) fn takes(&self, len: usize) -> bool {
        let fits = self.room() >= len || self.letters.is_empty() && len <= self.longest();
        fits && self.letters.len() < LETTERS.min(self.capacity / (CAPACITY / LETTERS))
    }

    /// Bytes of the longest datagram: the size of its buffer that `SO_SNDBUF` returns, less the
    /// head.
    pub(crate) fn longest(&self) -> usize {
        2 * self.capacity - DATAGRAM_HEAD
    }

    /// Whether any datagram between local sockets fits.
    pub(crate) fn takes_any(&self) -> bool {
        self.takes(LETTER_ROOM.min(self.capacity / 2))
    }

    /// Adds a datagram, for which there is room.
    pub(crate) fn post(&mut self, bytes: &[u8], from: Address, data: Ancillary) {
        let len = bytes.len();
        self.data.extend(bytes);
        self.edges += 1;
        let Ancillary { parcel, sender, packet } = data;
        self.letters.push_back(Datagram { len, from, parcel, sender, packet });
    }

    /// The first datagram.
    pub(crate) fn letter(&self) -> Option<&Datagram> {
        self.letters.front()
    }

    /// Takes the first datagram away.
    pub(crate) fn open_letter(&mut self) -> Option<Datagram> {
        let letter = self.letters.pop_front()?;
        self.data.drain(..letter.len.min(self.data.len()));
        self.taken += letter.len as u64;
        self.edges += 1;
        Some(letter)
    }

    /// All descriptors that are on their way in it.
    fn parcels(&self) -> impl Iterator<Item = u64> + '_ {
        let letters = self.letters.iter().filter_map(|letter| letter.parcel);
        self.parcels.iter().filter_map(|parcel| parcel.id).chain(letters)
    }

    /// Adds as many bytes as there is room for, and returns their number.
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
    /// Channels with bytes that are held back.
    #[serde(skip)]
    corked: BTreeSet<u64>,
    /// Channels of open files that send signals.
    #[serde(skip)]
    watched: WatchedChannels,
}

impl Channels {
    /// A channel with one reader and one writer; nothing when there are too many.
    pub(crate) fn add(&mut self) -> Option<u64> {
        if self.list.len() >= CHANNELS {
            return None;
        }
        let capacity = self.first_capacity();
        let id = self.next;
        self.next += 1;
        let channel = Channel {
            data: VecDeque::new(),
            readers: 1,
            writers: 1,
            end: ChannelEnd::Own,
            edges: 0,
            taken: 0,
            parcels: VecDeque::new(),
            letters: VecDeque::new(),
            capacity,
            shut: false,
            reset: false,
            named: false,
            cork: None,
        };
        self.list.insert(id, channel);
        Some(id)
    }

    /// A channel for datagrams, which any socket writes.
    pub(crate) fn add_inbox(&mut self) -> Option<u64> {
        let id = self.add()?;
        self.list.get_mut(&id)?.writers = 0;
        Some(id)
    }

    /// Whether two further ones fit, of a connection.
    pub(in crate::sentry) fn has_room_for_pair(&self) -> bool {
        self.list.len() + 2 <= CHANNELS
    }

    /// A channel with one end at the caller. A request may have any length.
    pub(crate) fn add_caller(&mut self, end: ChannelEnd, bytes: &[u8]) -> Option<u64> {
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
        self.watched.touch(id);
        self.list.get_mut(&id)
    }

    /// Channels with an end at the caller.
    pub(crate) fn callers(&self) -> impl Iterator<Item = u64> + '_ {
        let calls =
            |channel: &Channel| matches!(channel.end, ChannelEnd::Asks | ChannelEnd::Listens);
        self.iter().filter(move |(_, channel)| calls(channel)).map(|(id, _)| id)
    }

    /// Closes the outside ends.
    pub(crate) fn let_go(&mut self, id: u64) {
        let Some(channel) = self.list.get_mut(&id) else { return };
        let end = std::mem::replace(&mut channel.end, ChannelEnd::Own);
        if end != ChannelEnd::Own {
            // The host is sent no descriptors.
            let _ = self.leave(id, end.writes());
        }
    }

    /// The senders whose credentials count, of all messages and datagrams.
    pub(in crate::sentry) fn senders_mut(
        &mut self,
    ) -> impl Iterator<Item = &mut PeerCredentials> + '_ {
        self.list.values_mut().flat_map(|channel| {
            let messages = channel.parcels.iter_mut().map(|message| &mut message.sender);
            messages.chain(channel.letters.iter_mut().map(|letter| &mut letter.sender)).flatten()
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Channel)> + '_ {
        self.list.iter().map(|(&id, channel)| (id, channel))
    }

    /// A further reader or writer.
    pub(crate) fn join(&mut self, id: u64, writes: bool) {
        let Some(channel) = self.get_mut(id) else { return };
        let count = if writes { &mut channel.writers } else { &mut channel.readers };
        *count += 1;
        channel.edges += 1;
    }

    /// Removes a reader or a writer, and the channel with its last one.
    /// Returns descriptors that cannot be received any more.
    #[must_use]
    pub(crate) fn leave(&mut self, id: u64, writes: bool) -> Vec<u64> {
        self.watched.touch(id);
        let Some(channel) = self.list.get_mut(&id) else { return Vec::new() };
        let count = if writes { &mut channel.writers } else { &mut channel.readers };
        *count = count.saturating_sub(1);
        channel.edges += 1;
        if channel.writers == 0 || channel.readers == 0 {
            channel.cork = None;
            self.corked.remove(&id);
        }
        let mut lost = Vec::new();
        if channel.readers == 0 {
            lost.extend(channel.parcels());
            channel.parcels.clear();
            channel.letters.iter_mut().for_each(|letter| letter.parcel = None);
        }
        if channel.readers == 0 && channel.writers == 0 {
            self.list.remove(&id);
        }
        lost
    }

    /// All descriptors that are on their way.
    pub(crate) fn parcels(&self) -> impl Iterator<Item = u64> + '_ {
        self.list.values().flat_map(Channel::parcels)
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
        assert_eq!(channel.skip(PIPE_BUF), None);
        assert!(channel.is_writable());
        assert_eq!(channel.peek(3), [7; 3]);
        assert!(channels.leave(id, true).is_empty());
        assert_eq!(channels.get(id).map(|channel| channel.writers), Some(0));
        assert!(channels.leave(id, false).is_empty());
        assert!(channels.get(id).is_none());
    }

    fn parcel_of(parcel: u64) -> Ancillary {
        Ancillary { parcel: Some(parcel), ..Ancillary::default() }
    }

    #[test]
    fn bytes_of_two_senders_are_read_apart_by_who_asks_for_them() {
        let mut channels = Channels::default();
        let id = channels.add().unwrap();
        let channel = channels.get_mut(id).unwrap();
        let peer = |process| PeerCredentials { process, user: None };
        let by =
            |sender: Option<u32>| Ancillary { sender: sender.map(peer), ..Ancillary::default() };
        for (bytes, sender) in [("no", None), ("one", Some(1)), ("more", Some(1)), ("two", Some(2))]
        {
            channel.push(bytes.as_bytes());
            channel.attach(by(sender), bytes.len());
        }
        assert_eq!((channel.together(), channel.sender()), (12, None));
        channel.named = true;
        for (len, sender) in [(2, None), (7, Some(1)), (3, Some(2))] {
            let sender = sender.map(peer);
            assert_eq!((channel.together(), channel.sender()), (len, sender));
            assert_eq!(channel.skip(len - 1), None);
            assert_eq!(
                (channel.together(), channel.sender(), channel.is_sound()),
                (1, sender, true)
            );
            assert_eq!(channel.skip(1), None);
        }
        assert!(channel.is_empty() && channel.parcels.is_empty());
        // A sender that has changed its user is another.
        let other = Some(PeerCredentials { user: Some([33, 33]), ..peer(1) });
        for sender in [Some(peer(1)), other] {
            channel.push(b"x");
            channel.attach(Ancillary { sender, ..Ancillary::default() }, 1);
        }
        assert_eq!((channel.together(), channel.skip(1), channel.sender()), (1, None, other));
        assert_eq!(channel.skip(1), None);
        // Messages are so many, whatever their length.
        for n in 0..2 * MAX_MESSAGES {
            let put = channel.push(b"x");
            channel.attach(by(Some(n as u32)), put);
        }
        assert!(channel.len() == MAX_MESSAGES && channel.room() == 0 && channel.is_sound());
    }

    #[test]
    fn descriptors_come_with_the_bytes_that_they_were_sent_with() {
        let mut channels = Channels::default();
        let id = channels.add().unwrap();
        let channel = channels.get_mut(id).unwrap();
        assert_eq!((channel.push(b"plain"), channel.push(b"gift")), (5, 4));
        channel.attach(parcel_of(7), 4);
        assert_eq!(channel.push(b"more"), 4);
        // Earlier bytes may be read with a message, later ones may not.
        assert_eq!((channel.together(), channel.skip(3), channel.together()), (9, None, 6));
        assert_eq!((channel.skip(4), channel.together()), (Some(7), 6));
        assert_eq!(channel.peek(99), b"ftmore");
        channel.attach(parcel_of(8), 1);
        assert!(channel.is_sound());
        channel.attach(parcel_of(9), 2);
        assert!(!channel.is_sound(), "two for the same bytes");
        assert_eq!(channels.leave(id, false), [8, 9]);
        assert_eq!(channels.parcels().count(), 0);
    }

    #[test]
    fn datagrams_stay_apart() {
        let mut channels = Channels::default();
        let id = channels.add_inbox().unwrap();
        let channel = channels.get_mut(id).unwrap();
        for bytes in [&b"one"[..], b"", b"three"] {
            assert!(channel.takes(bytes.len()));
            channel.post(bytes, Address::default(), Ancillary::default());
        }
        assert!(channel.is_sound());
        for len in [3, 0, 5] {
            assert_eq!(channel.letter().map(|letter| letter.len), Some(len));
            assert_eq!(channel.open_letter().map(|letter| letter.len), Some(len));
        }
        assert!(channel.open_letter().is_none() && channel.is_empty());
        (0..LETTERS).for_each(|_| channel.post(b"x", Address::default(), Ancillary::default()));
        assert!(!channel.takes(0) && channel.is_sound());
        channel.data.pop_front();
        assert!(!channel.is_sound());
        let mut channel = Channel { letters: VecDeque::new(), ..channel.clone() };
        assert!(channel.is_sound());
        channel.taken = u64::MAX;
        assert!(!channel.is_sound());
    }

    #[test]
    fn ends_that_do_not_fit_are_refused() {
        let mut channels = Channels::default();
        let own = channels.add().unwrap();
        let asked = channels.add_caller(ChannelEnd::Asks, b"hello").unwrap();
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
