//! Bytes of a TCP connection that its sender holds back (`MSG_MORE`, `TCP_CORK`).
//!
//! Promises: they are received with the next bytes that are not held back, with a whole segment,
//! when the sender closes, or after [`CORK_TIMEOUT`]. Those of a snapshot are received at once.

use super::{Channel, Channels};
use crate::sentry::kernel::time::MonotonicTime;

/// The time after which Linux sends held bytes, in nanoseconds.
const CORK_TIMEOUT: u64 = 200_000_000;
/// Bytes of a segment over loopback, which is sent when it is whole.
const SEGMENT: usize = 65_483 / 2;

/// Bytes at the end of a channel that are held back, and the end of the time for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cork {
    bytes: usize,
    until: MonotonicTime,
}

impl Channel {
    /// Bytes that are held back.
    pub(super) fn held_back(&self) -> usize {
        self.cork.map_or(0, |cork| cork.bytes)
    }
}

impl Channels {
    /// Holds the last `len` bytes of a channel back.
    pub(in crate::sentry) fn hold_back(&mut self, id: u64, len: usize, now: MonotonicTime) {
        self.watched.touch(id);
        let Some(channel) = self.list.get_mut(&id).filter(|_| len > 0) else { return };
        let until = now.saturating_add(CORK_TIMEOUT);
        let cork = channel.cork.unwrap_or(Cork { bytes: 0, until });
        let bytes = (cork.bytes + len) % SEGMENT;
        channel.cork = (bytes > 0).then_some(Cork { bytes, ..cork });
        match channel.cork {
            Some(_) => self.corked.insert(id),
            None => self.corked.remove(&id),
        };
    }

    /// Has the held bytes of a channel be received.
    pub(in crate::sentry) fn release_cork(&mut self, id: u64) {
        if !self.corked.remove(&id) {
            return;
        }
        if let Some(channel) = self.get_mut(id) {
            channel.cork = None;
            channel.edges += 1;
        }
    }

    /// Whether a channel has held bytes.
    pub(in crate::sentry) fn has_corks(&self) -> bool {
        !self.corked.is_empty()
    }

    /// The moments at which held bytes are received.
    pub(in crate::sentry) fn cork_ends(&self) -> impl Iterator<Item = MonotonicTime> + '_ {
        let channels = self.corked.iter().filter_map(|id| self.list.get(id));
        channels.filter_map(|channel| channel.cork).map(|cork| cork.until)
    }

    /// Has held bytes be received whose time is over. Returns whether there were any.
    pub(in crate::sentry) fn release_late_corks(&mut self, now: MonotonicTime) -> bool {
        let late = |id: &u64| {
            let cork = self.list.get(id).and_then(|channel| channel.cork);
            cork.is_none_or(|cork| cork.until <= now)
        };
        let late: Vec<u64> = self.corked.iter().copied().filter(late).collect();
        late.iter().for_each(|id| self.release_cork(*id));
        !late.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_bytes_are_received_with_others_or_when_their_time_is_over() {
        let mut channels = Channels::default();
        let id = channels.add().unwrap();
        let push = |channels: &mut Channels, bytes: &[u8]| {
            channels.list.get_mut(&id).unwrap().push(bytes);
        };
        push(&mut channels, b"one");
        push(&mut channels, b"two");
        channels.hold_back(id, 3, 7);
        let channel = channels.get(id).unwrap();
        assert_eq!((channel.len(), channel.peek(99)), (3, b"one".to_vec()));
        assert_eq!(channels.cork_ends().collect::<Vec<_>>(), [7 + CORK_TIMEOUT]);
        assert!(!channels.release_late_corks(6 + CORK_TIMEOUT));
        assert_eq!(channels.get(id).unwrap().len(), 3);
        assert!(channels.release_late_corks(7 + CORK_TIMEOUT));
        assert_eq!((channels.get(id).unwrap().len(), channels.cork_ends().count()), (6, 0));
        // A whole segment is sent.
        push(&mut channels, &[0; SEGMENT - 2]);
        channels.hold_back(id, SEGMENT - 2, 0);
        assert_eq!(channels.get(id).unwrap().len(), 6);
        push(&mut channels, b"more");
        channels.hold_back(id, 4, 0);
        assert_eq!(channels.get(id).unwrap().len(), 6 + SEGMENT);
        assert!(channels.leave(id, true).is_empty());
        assert_eq!(channels.get(id).unwrap().len(), 8 + SEGMENT, "its sender has closed");
    }
}
