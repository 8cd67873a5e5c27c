//! Queues of messages that have names (`mq_open`, of POSIX).
//!
//! A queue lasts until it has neither a name nor an open descriptor. Promises: the number of queues
//! and the bytes in each are limited. Frozen ones are checked before use.

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Queues that there may be, messages in each, and bytes of one message (`/proc/sys/fs/mqueue`).
pub(in crate::sentry) const MAX_QUEUES: usize = 256;
pub(in crate::sentry) const MAX_COUNT: u64 = 10;
pub(in crate::sentry) const MAX_SIZE: u64 = 8192;
/// Priorities are below this (`MQ_PRIO_MAX`).
pub(in crate::sentry) const PRIORITIES: u32 = 32768;

/// The request for a signal at the next message: process, signal (none for `SIGEV_NONE`), and
/// value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ArrivalRequest {
    pub(in crate::sentry) process: u32,
    pub(in crate::sentry) signal: Option<u8>,
    pub(in crate::sentry) value: u64,
}

/// A queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PosixQueue {
    pub(in crate::sentry) name: Option<Vec<u8>>,
    pub(in crate::sentry) mode: u32,
    /// Messages that fit, and bytes of each.
    pub(in crate::sentry) count: u64,
    pub(in crate::sentry) size: u64,
    /// By priority: the order of arrival, within one.
    messages: BTreeMap<(u32, u64), Vec<u8>>,
    /// Goes up with each message that comes or goes.
    pub(in crate::sentry) edges: u64,
    pub(in crate::sentry) request: Option<ArrivalRequest>,
    /// Open descriptions of it.
    open: u32,
}

impl PosixQueue {
    pub(in crate::sentry) fn new(name: Vec<u8>, mode: u32, count: u64, size: u64) -> Self {
        let (name, messages) = (Some(name), BTreeMap::new());
        Self { name, mode, count, size, messages, edges: 0, request: None, open: 0 }
    }

    pub(in crate::sentry) fn len(&self) -> u64 {
        self.messages.len() as u64
    }

    /// Bytes of all its messages.
    pub(in crate::sentry) fn bytes(&self) -> u64 {
        self.messages.values().map(|bytes| bytes.len() as u64).sum()
    }

    pub(in crate::sentry) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(in crate::sentry) fn is_full(&self) -> bool {
        self.len() >= self.count
    }

    pub(in crate::sentry) fn push(&mut self, priority: u32, bytes: Vec<u8>) {
        self.edges += 1;
        // The highest priority is first.
        self.messages.insert((PRIORITIES - 1 - priority, self.edges), bytes);
    }

    /// The first message, and its priority.
    pub(in crate::sentry) fn first(&self) -> Option<(u32, &[u8])> {
        let ((rank, _), bytes) = self.messages.first_key_value()?;
        Some((PRIORITIES - 1 - rank, bytes))
    }

    pub(in crate::sentry) fn take(&mut self) {
        self.edges += 1;
        self.messages.pop_first();
    }

    fn is_sound(&self) -> bool {
        let messages = self.messages.iter().all(|((rank, order), bytes)| {
            *rank < PRIORITIES && *order <= self.edges && bytes.len() as u64 <= self.size
        });
        let named = self.name.as_ref().is_none_or(|name| is_name(name).is_ok());
        let sized = (1..=MAX_COUNT).contains(&self.count) && (1..=MAX_SIZE).contains(&self.size);
        let asks = self
            .request
            .is_none_or(|request| request.signal.is_none_or(|signal| (1..=64).contains(&signal)));
        let fits = self.len() <= self.count && self.edges < 1 << 62 && self.mode & !0o777 == 0;
        messages && named && sized && asks && fits
    }
}

/// Refuses an invalid name of a queue.
pub(in crate::sentry) fn is_name(name: &[u8]) -> Result<(), Errno> {
    match name {
        [] => Err(Errno::NOENT),
        b"." | b".." => Err(Errno::ACCESS),
        name if name.contains(&b'/') => Err(Errno::ACCESS),
        name if name.len() > crate::sentry::name_lengths::NAME => Err(Errno::NAMETOOLONG),
        _ => Ok(()),
    }
}

/// All named queues of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PosixQueues {
    list: BTreeMap<u32, PosixQueue>,
    next: u32,
}

impl PosixQueues {
    pub(in crate::sentry) fn get(&self, id: u32) -> Option<&PosixQueue> {
        self.list.get(&id)
    }

    pub(in crate::sentry) fn get_mut(&mut self, id: u32) -> Option<&mut PosixQueue> {
        self.list.get_mut(&id)
    }

    pub(in crate::sentry) fn named(&self, name: &[u8]) -> Option<(u32, &PosixQueue)> {
        let found = self.list.iter().find(|(_, queue)| queue.name.as_deref() == Some(name));
        found.map(|(id, queue)| (*id, queue))
    }

    /// A further queue; its number.
    pub(in crate::sentry) fn add(&mut self, queue: PosixQueue) -> Result<u32, Errno> {
        if self.list.len() >= MAX_QUEUES {
            return Err(Errno::NOSPC);
        }
        let id = self.next;
        self.next = id.checked_add(1).ok_or(Errno::NOSPC)?;
        self.list.insert(id, queue);
        Ok(id)
    }

    /// A further open description of a queue.
    pub(in crate::sentry) fn join(&mut self, id: u32) {
        if let Some(queue) = self.list.get_mut(&id) {
            queue.open += 1;
        }
    }

    /// An open description less.
    pub(in crate::sentry) fn leave(&mut self, id: u32) {
        if let Some(queue) = self.list.get_mut(&id) {
            queue.open = queue.open.saturating_sub(1);
        }
        self.sweep(id);
    }

    pub(in crate::sentry) fn unlink(&mut self, name: &[u8]) -> Result<(), Errno> {
        let (id, _) = self.named(name).ok_or(Errno::NOENT)?;
        if let Some(queue) = self.list.get_mut(&id) {
            queue.name = None;
        }
        self.sweep(id);
        Ok(())
    }

    /// Removes a queue that nothing leads to any more.
    fn sweep(&mut self, id: u32) {
        if self.list.get(&id).is_some_and(|queue| queue.name.is_none() && queue.open == 0) {
            self.list.remove(&id);
        }
    }

    /// The requests of a process that ends.
    pub(in crate::sentry) fn drop_requests(&mut self, process: u32) {
        for queue in self.list.values_mut() {
            queue.request = queue.request.filter(|request| request.process != process);
        }
    }

    /// Whether a process has requested notices of a queue.
    pub(in crate::sentry) fn has_requests(&self, process: u32) -> bool {
        let mut requests = self.list.values().filter_map(|queue| queue.request);
        requests.any(|request| request.process == process)
    }

    /// Whether a guest could have made them: `open` are the queues that descriptions are of.
    pub(in crate::sentry) fn is_sound(&self, open: impl Iterator<Item = u32>) -> bool {
        let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
        open.for_each(|id| *counts.entry(id).or_default() += 1);
        let known = counts.keys().all(|id| self.list.contains_key(id));
        let sound = |(id, queue): (&u32, &PosixQueue)| {
            let open = counts.get(id).copied().unwrap_or_default();
            let kept = queue.name.is_some() || open > 0;
            *id < self.next && queue.open == open && kept && queue.is_sound()
        };
        let mut names = std::collections::BTreeSet::new();
        let unique = self.list.values().filter_map(|q| q.name.as_ref()).all(|n| names.insert(n));
        known && unique && self.list.len() <= MAX_QUEUES && self.list.iter().all(sound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_by_priority_and_a_queue_lasts_as_long_as_it_can_be_reached() {
        let mut all = PosixQueues::default();
        let id = all.add(PosixQueue::new(b"q".to_vec(), 0o600, 3, 8)).unwrap();
        all.join(id);
        let queue = all.get_mut(id).unwrap();
        for (priority, text) in [(1, "low"), (9, "high"), (1, "last")] {
            queue.push(priority, text.as_bytes().to_vec());
        }
        assert!(queue.is_full() && queue.bytes() == 11);
        for expected in [(9, &b"high"[..]), (1, b"low"), (1, b"last")] {
            assert_eq!(queue.first(), Some(expected));
            queue.take();
        }
        assert!(queue.is_empty() && all.is_sound([id].into_iter()));
        assert!(!all.is_sound([id, id].into_iter()) && !all.is_sound([id, 9].into_iter()));
        assert_eq!((all.unlink(b"q"), all.unlink(b"q")), (Ok(()), Err(Errno::NOENT)));
        assert!(all.get(id).is_some() && all.named(b"q").is_none());
        all.leave(id);
        assert!(all.get(id).is_none() && all.is_sound(std::iter::empty()));
        assert_eq!(is_name(b"a/b"), Err(Errno::ACCESS));
        assert_eq!(is_name(&[b'x'; 256]), Err(Errno::NAMETOOLONG));
        for _ in 0..MAX_QUEUES {
            let name = all.next.to_string().into_bytes();
            all.add(PosixQueue::new(name, 0o600, 1, 1)).unwrap();
        }
        assert_eq!(all.add(PosixQueue::new(Vec::new(), 0, 1, 1)), Err(Errno::NOSPC));
    }
}
