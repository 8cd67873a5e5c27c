//! Watches on files and directories (`inotify`): changes by calls of the guest are queued for the
//! watchers.
//!
//! Promises: events come in order, repeated events count once, and a full queue reports that events
//! were lost. Queues are in every state. Changes by the host in granted directories cause no event,
//! and neither do writes through mappings.

mod events;

use std::collections::{BTreeMap, VecDeque};

use afresh_files::Node;
use serde::{Deserialize, Serialize};

use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::poll_events::IN;
use crate::sentry::name_lengths::NAME;

/// Files that all descriptors together may watch (`max_user_watches`).
pub(in crate::sentry) const WATCHES: usize = 1 << 16;

/// Events that one descriptor keeps (`max_queued_events`). With names of 255 bytes, all instances
/// keep 40 MiB at most.
pub(in crate::sentry) const QUEUED: usize = 1 << 11;

/// Maximum descriptors that watch (`max_user_instances`).
pub(in crate::sentry) const MAX_INSTANCES: u32 = 64;

/// Bytes of an event without its name.
const HEAD: usize = 16;

/// A watched file, and its mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct InotifyWatch {
    pub(in crate::sentry) number: i32,
    pub(in crate::sentry) mask: u32,
}

/// Something that has happened (`struct inotify_event`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct InotifyEvent {
    watch: i32,
    mask: u32,
    cookie: u32,
    name: Vec<u8>,
}

impl InotifyEvent {
    pub(in crate::sentry) fn len(&self) -> usize {
        HEAD + if self.name.is_empty() { 0 } else { (self.name.len() + 1).next_multiple_of(HEAD) }
    }

    pub(in crate::sentry) fn bytes(&self) -> Vec<u8> {
        let rest = self.len() - HEAD;
        let head = StructBuilder::default().int(self.watch as u32).int(self.mask).int(self.cookie);
        let mut bytes = head.int(rest as u32).0;
        bytes.extend(&self.name);
        bytes.resize(HEAD + rest, 0);
        bytes
    }
}

/// The watches of one descriptor, and its queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Inotify {
    pub(in crate::sentry) list: BTreeMap<Node, InotifyWatch>,
    pub(in crate::sentry) last: i32,
    pub(in crate::sentry) queue: VecDeque<InotifyEvent>,
    pub(in crate::sentry) edges: u64,
}

impl Inotify {
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        let named = self.queue.iter().all(|event| event.name.len() <= NAME);
        let numbered = self.list.values().all(|watch| (1..=self.last).contains(&watch.number));
        let bounded = self.list.len() <= WATCHES && self.queue.len() <= QUEUED + 1;
        named && numbered && bounded && self.edges < 1 << 62
    }

    /// Its readiness.
    pub(in crate::sentry) fn readiness(&self) -> (u16, u64) {
        (if self.queue.is_empty() { 0 } else { IN }, self.edges)
    }

    /// Bytes that may be read.
    pub(in crate::sentry) fn readable(&self) -> usize {
        self.queue.iter().map(InotifyEvent::len).sum()
    }

    fn push(&mut self, event: InotifyEvent) {
        if self.queue.back() == Some(&event) || self.queue.len() > QUEUED {
            return;
        }
        self.edges += 1;
        let lost =
            InotifyEvent { watch: -1, mask: libc::IN_Q_OVERFLOW, cookie: 0, name: Vec::new() };
        self.queue.push_back(if self.queue.len() < QUEUED { event } else { lost });
    }

    /// Queues an event on a file, with its name for watchers of the directory.
    fn happened(&mut self, node: Node, mask: u32, cookie: u32, name: &[u8]) {
        let Some(watch) = self.list.get(&node).copied() else { return };
        if mask & watch.mask & libc::IN_ALL_EVENTS == 0 {
            return;
        }
        self.push(InotifyEvent { watch: watch.number, mask, cookie, name: name.to_vec() });
        if watch.mask & libc::IN_ONESHOT != 0 {
            self.drop_watch(node);
        }
    }

    /// Whether a watch of a directory is for files alone that have a name (`IN_EXCL_UNLINK`).
    fn excludes_removed(&self, directory: Node) -> bool {
        self.list.get(&directory).is_some_and(|watch| watch.mask & libc::IN_EXCL_UNLINK != 0)
    }

    pub(in crate::sentry) fn drop_watch(&mut self, node: Node) {
        if let Some(InotifyWatch { number, .. }) = self.list.remove(&node) {
            let (mask, cookie, name) = (libc::IN_IGNORED, 0, Vec::new());
            self.push(InotifyEvent { watch: number, mask, cookie, name });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_delivered_once_and_bounded() {
        let mut watches = Inotify::default();
        watches
            .list
            .insert(Node(7), InotifyWatch { number: 1, mask: libc::IN_MODIFY | libc::IN_OPEN });
        watches.last = 1;
        for mask in
            [libc::IN_MODIFY, libc::IN_MODIFY, libc::IN_ACCESS, libc::IN_OPEN, libc::IN_MODIFY]
        {
            watches.happened(Node(7), mask, 0, b"name");
        }
        watches.happened(Node(8), libc::IN_MODIFY, 0, b"");
        assert_eq!(watches.queue.len(), 3);
        assert_eq!((watches.readable(), watches.queue[0].bytes().len()), (96, 32));
        for turn in 0..2 * QUEUED as u32 {
            watches.happened(Node(7), libc::IN_MODIFY, turn, b"");
        }
        assert_eq!(watches.queue.back().map(|event| event.mask), Some(libc::IN_Q_OVERFLOW));
        assert!(watches.is_sound() && watches.queue.len() == QUEUED + 1);
        let odd: [&dyn Fn(&mut Inotify); 4] = [
            &|watches| watches.queue.push_back(watches.queue[0].clone()),
            &|watches| watches.last = 0,
            &|watches| watches.edges = u64::MAX,
            &|watches| watches.queue[0].name = vec![b'x'; NAME + 1],
        ];
        for (index, change) in odd.iter().enumerate() {
            let mut watches = watches.clone();
            change(&mut watches);
            assert!(!watches.is_sound(), "{index}");
        }
    }
}
