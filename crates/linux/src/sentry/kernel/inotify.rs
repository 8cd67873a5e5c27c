//! Watches on files and directories (`inotify`): changes by calls of the guest are queued for the
//! watchers.
//!
//! Promises: events come in order, repeated events count once, and a full queue reports that events
//! were lost. Queues are in every state. Changes by the host in granted directories cause no event,
//! and neither do writes through mappings.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use afresh_files::{Kind, Node, ResolvedName};
use serde::{Deserialize, Serialize};

use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::poll_events::IN;
use crate::sentry::{Kernel, NAME};

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

    pub(in crate::sentry) fn drop_watch(&mut self, node: Node) {
        if let Some(InotifyWatch { number, .. }) = self.list.remove(&node) {
            let (mask, cookie, name) = (libc::IN_IGNORED, 0, Vec::new());
            self.push(InotifyEvent { watch: number, mask, cookie, name });
        }
    }
}

impl Kernel {
    /// Notifies all watchers.
    fn for_each(&mut self, mut each: impl FnMut(&mut Inotify)) {
        for description in self.table.descriptions_mut() {
            if let FileObject::Watches(watches) = &mut description.open {
                each(watches);
            }
        }
    }

    fn kind_bit(&self, node: Node) -> u32 {
        let kind = self.tree.stat(node).map(|stat| stat.kind);
        if kind == Ok(Kind::Directory) { libc::IN_ISDIR } else { 0 }
    }

    /// An event on a file, for watchers of it and of its directory.
    pub(in crate::sentry) fn tell_file(&mut self, node: Node, mask: u32) {
        self.tell_found(node, None, mask);
    }

    /// As [`Kernel::tell_file`]; by this name, if it has had several.
    pub(in crate::sentry) fn tell_found(
        &mut self,
        node: Node,
        found: Option<&(Node, Arc<[u8]>)>,
        mask: u32,
    ) {
        if self.watchers == 0 {
            return;
        }
        let mask = mask | self.kind_bit(node);
        let found = found.filter(|(above, name)| self.tree.lookup(*above, name) == Ok(node));
        let name = self.tree.name(node).or_else(|| found.cloned());
        self.for_each(|watches| {
            if let Some((above, name)) = &name {
                watches.happened(*above, mask, 0, name);
            }
            watches.happened(node, mask, 0, b"");
        });
    }

    /// A name was made.
    pub(in crate::sentry) fn tell_made(&mut self, place: &ResolvedName) {
        if self.watchers == 0 {
            return;
        }
        let Ok(node) = self.tree.lookup(place.directory, &place.name) else { return };
        let mask = libc::IN_CREATE | self.kind_bit(node);
        self.for_each(|watches| watches.happened(place.directory, mask, 0, &place.name));
    }

    /// A name was removed, which was a directory's or not.
    pub(in crate::sentry) fn tell_removed(&mut self, place: &ResolvedName) {
        let (Some((node, kind)), 1..) = (place.found, self.watchers) else { return };
        let bit = if kind == Kind::Directory { libc::IN_ISDIR } else { 0 };
        self.tell_unnamed(node, kind, |watches| {
            watches.happened(place.directory, libc::IN_DELETE | bit, 0, &place.name);
        });
    }

    /// A file has lost a name, which `then` reports. A file without names has no watches.
    fn tell_unnamed(&mut self, node: Node, kind: Kind, then: impl Fn(&mut Inotify)) {
        let is_directory = kind == Kind::Directory;
        let gone = is_directory || self.tree.stat(node).map_or(0, |stat| stat.links) == 0;
        self.for_each(|watches| {
            if !is_directory {
                watches.happened(node, libc::IN_ATTRIB, 0, b"");
            }
            if gone {
                watches.happened(node, libc::IN_DELETE_SELF, 0, b"");
                watches.drop_watch(node);
            }
            then(watches);
        });
    }

    /// A name was given away: for another, or in exchange.
    pub(in crate::sentry) fn tell_moved(
        &mut self,
        from: &ResolvedName,
        to: &ResolvedName,
        exchanged: bool,
    ) {
        if self.watchers == 0 {
            return;
        }
        let ways = [(from, to), (to, from)];
        for (from, to) in ways.into_iter().take(1 + usize::from(exchanged)) {
            let Some((node, kind)) = from.found else { continue };
            if to.found.is_some_and(|(there, _)| there == node) {
                return;
            }
            let bit = if kind == Kind::Directory { libc::IN_ISDIR } else { 0 };
            self.moves = self.moves % (u32::MAX - 1) + 1;
            let cookie = self.moves;
            self.for_each(|watches| {
                watches.happened(from.directory, libc::IN_MOVED_FROM | bit, cookie, &from.name);
                watches.happened(to.directory, libc::IN_MOVED_TO | bit, cookie, &to.name);
                watches.happened(node, libc::IN_MOVE_SELF, 0, b"");
            });
        }
        if let Some((node, kind)) = to.found.filter(|_| !exchanged) {
            self.tell_unnamed(node, kind, |_| ());
        }
    }

    /// A description is opened, or closed for good.
    pub(in crate::sentry) fn tell_open(&mut self, description: &Description, opened: bool) {
        let only_named = description.flags & libc::O_PATH as u32 != 0;
        let (Some(open), 1.., false) = (description.open.file(), self.watchers, only_named) else {
            return;
        };
        let (node, writes) = (open.node, open.access.write);
        self.tell_found(
            node,
            description.found.as_ref(),
            match (opened, writes) {
                (true, _) => libc::IN_OPEN,
                (false, true) => libc::IN_CLOSE_WRITE,
                (false, false) => libc::IN_CLOSE_NOWRITE,
            },
        );
    }

    /// Counts the watching descriptors from their descriptions.
    pub(in crate::sentry) fn count_watchers(&mut self) {
        let watches = |(_, d): &(u64, &Description)| matches!(d.open, FileObject::Watches(_));
        self.watchers = self.table.descriptions().filter(watches).count() as u32;
    }

    /// Watches of all descriptors.
    pub(in crate::sentry) fn all_watches(&self) -> usize {
        let counts = self.table.descriptions().map(|(_, description)| match &description.open {
            FileObject::Watches(watches) => watches.list.len(),
            _ => 0,
        });
        counts.sum()
    }

    /// Whether there are no more watches and descriptors of them than a guest may have.
    pub(in crate::sentry) fn are_watches_bounded(&self) -> bool {
        let watches = |(_, d): &(u64, &Description)| matches!(d.open, FileObject::Watches(_));
        let descriptors = self.table.descriptions().filter(watches).count();
        descriptors <= MAX_INSTANCES as usize && self.all_watches() <= WATCHES
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
