//! Queues of messages that have keys and numbers in place of names (`msgget`, of System V).
//!
//! Promises: the number of queues, the bytes in each, and the messages of all are limited. Frozen
//! ones are checked before use.

use std::collections::{BTreeMap, VecDeque};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Queues that there may be (a quarter of Linux's), bytes in each and in one message.
pub(in crate::sentry) const MAX_QUEUES: usize = 1024;
pub(in crate::sentry) const MAX_BYTES: u64 = 16 << 10;
pub(in crate::sentry) const MAX_MESSAGE: u64 = 8 << 10;
/// Maximum messages of all queues. Short ones take more memory than their bytes.
pub(in crate::sentry) const MAX_MESSAGES: usize = 256 << 10;

/// A message: its type and its bytes.
pub(crate) type Message = (i64, Vec<u8>);

/// The message that a thread wants: any, the first of a type, the first of another type, or the
/// first of the lowest type up to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WantedMessage {
    Any,
    Of(i64),
    Except(i64),
    UpTo(i64),
}

/// A queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MessageQueue {
    /// Key 0 finds no queue.
    pub(in crate::sentry) key: u32,
    pub(in crate::sentry) mode: u32,
    /// Bytes that fit.
    pub(in crate::sentry) room: u64,
    messages: VecDeque<Message>,
    /// Seconds of the last send, receive and change, and the processes of the first two.
    pub(in crate::sentry) times: [i64; 3],
    pub(in crate::sentry) last: [u32; 2],
}

impl MessageQueue {
    pub(in crate::sentry) fn new(key: u32, mode: u32, now: i64) -> Self {
        let (messages, times, last) = (VecDeque::new(), [0, 0, now], [0; 2]);
        Self { key, mode, room: MAX_BYTES, messages, times, last }
    }

    /// Bytes and messages in it.
    pub(in crate::sentry) fn held_size(&self) -> (u64, u64) {
        let bytes = self.messages.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        (bytes, self.messages.len() as u64)
    }

    /// Whether a message of `len` bytes fits. Empty ones take room as well.
    pub(in crate::sentry) fn fits(&self, len: u64) -> bool {
        let (bytes, count) = self.held_size();
        bytes + len <= self.room && count < self.room
    }

    pub(in crate::sentry) fn push(&mut self, message: Message) {
        self.messages.push_back(message);
    }

    /// Where the wanted message is.
    pub(in crate::sentry) fn find(&self, wanted: WantedMessage) -> Option<usize> {
        let place =
            |meant: &dyn Fn(i64) -> bool| self.messages.iter().position(|(kind, _)| meant(*kind));
        match wanted {
            WantedMessage::Any => place(&|_| true),
            WantedMessage::Of(wanted) => place(&|kind| kind == wanted),
            WantedMessage::Except(unwanted) => place(&|kind| kind != unwanted),
            WantedMessage::UpTo(most) => {
                let kinds = self.messages.iter().map(|(kind, _)| *kind);
                let lowest = kinds.filter(|kind| *kind <= most).min()?;
                place(&|kind| kind == lowest)
            }
        }
    }

    pub(in crate::sentry) fn at(&self, place: usize) -> Option<&Message> {
        self.messages.get(place)
    }

    pub(in crate::sentry) fn take(&mut self, place: usize) -> Option<Message> {
        self.messages.remove(place)
    }

    /// Sets how many bytes fit: no more than at first.
    pub(in crate::sentry) fn set_room(&mut self, bytes: u64) -> Result<(), Errno> {
        if bytes > MAX_BYTES {
            return Err(Errno::PERM);
        }
        self.room = bytes;
        Ok(())
    }
}

/// All queues of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MessageQueues {
    list: BTreeMap<u32, MessageQueue>,
    next: u32,
}

impl MessageQueues {
    /// All queues by their numbers.
    pub(in crate::sentry) fn listed(&self) -> impl Iterator<Item = (u32, &MessageQueue)> {
        self.list.iter().map(|(id, queue)| (*id, queue))
    }

    /// The highest number in use, and the numbers of queues, messages and bytes.
    pub(in crate::sentry) fn totals(&self) -> (Option<u32>, usize, usize, u64) {
        let bytes = self.list.values().map(|queue| queue.held_size().0).sum();
        (self.list.keys().next_back().copied(), self.list.len(), self.count(), bytes)
    }

    pub(in crate::sentry) fn get(&self, id: u64) -> Result<&MessageQueue, Errno> {
        self.list.get(&(id as u32)).ok_or(Errno::INVAL)
    }

    pub(in crate::sentry) fn get_mut(&mut self, id: u64) -> Result<&mut MessageQueue, Errno> {
        self.list.get_mut(&(id as u32)).ok_or(Errno::INVAL)
    }

    pub(in crate::sentry) fn keyed(&self, key: u32) -> Option<(u32, &MessageQueue)> {
        let found = self.list.iter().find(|(_, queue)| queue.key == key && key != 0);
        found.map(|(id, queue)| (*id, queue))
    }

    /// A further queue; its number.
    pub(in crate::sentry) fn add(&mut self, queue: MessageQueue) -> Result<u32, Errno> {
        if self.list.len() >= MAX_QUEUES || self.next > i32::MAX as u32 {
            return Err(Errno::NOSPC);
        }
        let id = self.next;
        self.next += 1;
        self.list.insert(id, queue);
        Ok(id)
    }

    pub(in crate::sentry) fn remove(&mut self, id: u64) {
        self.list.remove(&(id as u32));
    }

    /// Messages of all queues.
    fn count(&self) -> usize {
        self.list.values().map(|queue| queue.messages.len()).sum()
    }

    /// Whether there is room for a message, or the queue was removed.
    pub(in crate::sentry) fn has_room(&self, id: u32, len: u64) -> bool {
        self.list.get(&id).is_none_or(|queue| queue.fits(len) && self.count() < MAX_MESSAGES)
    }

    /// Messages and queues that an answer looks at, about a queue.
    pub(in crate::sentry) fn looks(&self, id: u32) -> usize {
        let messages = self.list.get(&id).map_or(0, |queue| queue.messages.len());
        2 * messages + self.list.len()
    }

    /// Whether a wait for a message is over.
    pub(in crate::sentry) fn has_message(&self, id: u32, wanted: WantedMessage) -> bool {
        self.list.get(&id).is_none_or(|queue| queue.find(wanted).is_some())
    }

    /// Whether a guest could have made them.
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        let sound = |(id, queue): (&u32, &MessageQueue)| {
            let (bytes, count) = queue.held_size();
            let kinds = queue.messages.iter().all(|(kind, _)| *kind > 0);
            *id < self.next
                && queue.mode & !0o777 == 0
                && queue.room <= MAX_BYTES
                && bytes <= MAX_BYTES
                && count <= MAX_BYTES
                && kinds
        };
        self.list.len() <= MAX_QUEUES && self.count() <= MAX_MESSAGES && self.list.iter().all(sound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_chosen_by_its_type_and_room_is_limited() {
        let mut queue = MessageQueue::new(1, 0o600, 0);
        for kind in [5, 3, 7, 3] {
            queue.push((kind, vec![kind as u8; 4000]));
        }
        assert!(!queue.fits(500) && queue.fits(300));
        assert_eq!(queue.find(WantedMessage::Any), Some(0));
        assert_eq!(queue.find(WantedMessage::Of(3)), Some(1));
        assert_eq!(queue.find(WantedMessage::Except(5)), Some(1));
        assert_eq!(queue.find(WantedMessage::UpTo(6)), Some(1));
        assert_eq!(queue.find(WantedMessage::UpTo(2)), None);
        assert_eq!(queue.set_room(1 << 20), Err(Errno::PERM));
        let mut all = MessageQueues::default();
        let id = all.add(queue).unwrap();
        assert!(all.is_sound() && all.has_room(id, 300) && !all.has_room(id, 500));
        assert!(
            all.has_message(id, WantedMessage::Of(7)) && !all.has_message(id, WantedMessage::Of(8))
        );
        // Empty messages are as many, whatever the number of queues.
        for _ in 0..MAX_MESSAGES as u64 / MAX_BYTES {
            let id = all.add(MessageQueue::new(0, 0o600, 0)).unwrap();
            let queue = all.get_mut(id.into()).unwrap();
            (0..MAX_BYTES - 1).for_each(|_| queue.push((1, Vec::new())));
            assert!(queue.fits(0) && all.is_sound() && all.has_room(id, 0));
        }
        while all.count() < MAX_MESSAGES {
            all.get_mut(id.into()).unwrap().push((1, Vec::new()));
        }
        assert!(all.is_sound() && !all.has_room(id, 0));
        all.get_mut(id.into()).unwrap().push((1, Vec::new()));
        assert!(!all.is_sound());
        all.get_mut(id.into()).unwrap().messages.truncate(4);
        all.get_mut(id.into()).unwrap().push((0, Vec::new()));
        assert!(!all.is_sound());
        all.remove(id.into());
        assert!(all.has_room(id, 500) && all.keyed(1).is_none());
    }
}
