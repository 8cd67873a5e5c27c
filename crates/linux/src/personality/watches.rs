//! Watching files and directories (`inotify`): what the guest's own calls change is queued for whoever watches.
//!
//! Promises: events come in order, those that repeat the last one are told once, and so many at most are kept: what is lost is told. They are
//! in every state. What the host changes in directories that it has granted is not told, nor what is written through mappings.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use afresh_files::{Kind, Node, Place};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::encode::Bytes;
use super::permissions::READ;
use super::readiness::IN;
use super::table::{Description, Open};
use super::{DONE, NAME, Outcome, Person, Served, State, copy_out, path_in};
use crate::platform::Process;

/// Files that one descriptor may watch (`max_user_watches`, of all).
pub(super) const WATCHES: usize = 1 << 16;
/// Events that one descriptor keeps (`max_queued_events`).
pub(super) const QUEUED: usize = 1 << 14;
/// Bytes of an event without its name.
const HEAD: usize = 16;

/// What is watched, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Watch {
    number: i32,
    mask: u32,
}

/// Something that has happened (`struct inotify_event`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Event {
    watch: i32,
    mask: u32,
    cookie: u32,
    name: Vec<u8>,
}

impl Event {
    fn len(&self) -> usize {
        HEAD + if self.name.is_empty() { 0 } else { (self.name.len() + 1).next_multiple_of(HEAD) }
    }

    fn bytes(&self) -> Vec<u8> {
        let rest = self.len() - HEAD;
        let head = Bytes::default().int(self.watch as u32).int(self.mask).int(self.cookie);
        let mut bytes = head.int(rest as u32).0;
        bytes.extend(&self.name);
        bytes.resize(HEAD + rest, 0);
        bytes
    }
}

/// All that one descriptor watches, and what it has not been told yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Watches {
    list: BTreeMap<Node, Watch>,
    last: i32,
    queue: VecDeque<Event>,
    edges: u64,
}

impl Watches {
    pub(super) fn is_sound(&self) -> bool {
        let named = self.queue.iter().all(|event| event.name.len() <= NAME);
        let numbered = self.list.values().all(|watch| (1..=self.last).contains(&watch.number));
        let bounded = self.list.len() <= WATCHES && self.queue.len() <= QUEUED + 1;
        named && numbered && bounded && self.edges < 1 << 62
    }

    /// What it is ready for.
    pub(super) fn readiness(&self) -> (u16, u64) {
        (if self.queue.is_empty() { 0 } else { IN }, self.edges)
    }

    /// Bytes that may be read.
    pub(super) fn readable(&self) -> usize {
        self.queue.iter().map(Event::len).sum()
    }

    fn push(&mut self, event: Event) {
        if self.queue.back() == Some(&event) || self.queue.len() > QUEUED {
            return;
        }
        self.edges += 1;
        let lost = Event { watch: -1, mask: libc::IN_Q_OVERFLOW, cookie: 0, name: Vec::new() };
        self.queue.push_back(if self.queue.len() < QUEUED { event } else { lost });
    }

    /// Something has happened to a file, which is told with this name, if it is told as what is in a directory.
    fn happened(&mut self, node: Node, mask: u32, cookie: u32, name: &[u8]) {
        let Some(watch) = self.list.get(&node).copied() else { return };
        if mask & watch.mask & libc::IN_ALL_EVENTS == 0 {
            return;
        }
        self.push(Event { watch: watch.number, mask, cookie, name: name.to_vec() });
        if watch.mask & libc::IN_ONESHOT != 0 {
            self.drop_watch(node);
        }
    }

    fn drop_watch(&mut self, node: Node) {
        if let Some(Watch { number, .. }) = self.list.remove(&node) {
            let (mask, cookie, name) = (libc::IN_IGNORED, 0, Vec::new());
            self.push(Event { watch: number, mask, cookie, name });
        }
    }
}

impl State {
    /// Tells all who watch.
    fn tell(&mut self, mut each: impl FnMut(&mut Watches)) {
        for description in self.table.descriptions_mut() {
            if let Open::Watches(watches) = &mut description.open {
                each(watches);
            }
        }
    }

    fn kind_bit(&self, node: Node) -> u32 {
        let kind = self.tree.stat(node).map(|stat| stat.kind);
        if kind == Ok(Kind::Directory) { libc::IN_ISDIR } else { 0 }
    }

    /// Something has happened to a file: told to who watches it, or the directory that it is in.
    pub(super) fn tell_file(&mut self, node: Node, mask: u32) {
        self.tell_found(node, None, mask);
    }

    /// As [`State::tell_file`]; by this name, if it has had several.
    pub(super) fn tell_found(&mut self, node: Node, found: Option<&(Node, Arc<[u8]>)>, mask: u32) {
        if self.watchers == 0 {
            return;
        }
        let mask = mask | self.kind_bit(node);
        let found = found.filter(|(above, name)| self.tree.lookup(*above, name) == Ok(node));
        let name = self.tree.name(node).or_else(|| found.cloned());
        self.tell(|watches| {
            if let Some((above, name)) = &name {
                watches.happened(*above, mask, 0, name);
            }
            watches.happened(node, mask, 0, b"");
        });
    }

    /// A name was made.
    pub(super) fn tell_made(&mut self, place: &Place) {
        if self.watchers == 0 {
            return;
        }
        let Ok(node) = self.tree.lookup(place.directory, &place.name) else { return };
        let mask = libc::IN_CREATE | self.kind_bit(node);
        self.tell(|watches| watches.happened(place.directory, mask, 0, &place.name));
    }

    /// A name was removed, which was a directory's or not.
    pub(super) fn tell_removed(&mut self, place: &Place) {
        let (Some((node, kind)), 1..) = (place.found, self.watchers) else { return };
        let bit = if kind == Kind::Directory { libc::IN_ISDIR } else { 0 };
        self.tell_unnamed(node, kind, |watches| {
            watches.happened(place.directory, libc::IN_DELETE | bit, 0, &place.name);
        });
    }

    /// A file has a name less, which `then` tells. Nobody watches what has none any more.
    fn tell_unnamed(&mut self, node: Node, kind: Kind, then: impl Fn(&mut Watches)) {
        let is_directory = kind == Kind::Directory;
        let gone = is_directory || self.tree.stat(node).map_or(0, |stat| stat.links) == 0;
        self.tell(|watches| {
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
    pub(super) fn tell_moved(&mut self, from: &Place, to: &Place, exchanged: bool) {
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
            self.tell(|watches| {
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
    pub(super) fn tell_open(&mut self, description: &Description, opened: bool) {
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

    /// How many descriptors watch, as their descriptions say.
    pub(super) fn count_watchers(&mut self) {
        let watches = |(_, d): &(u64, &Description)| matches!(d.open, Open::Watches(_));
        self.watchers = self.table.descriptions().filter(watches).count() as u32;
    }
}

impl Person {
    /// `inotify_init1`.
    pub(super) fn new_watches(&mut self, flags: u64) -> Served {
        if flags as i32 & !(libc::IN_CLOEXEC | libc::IN_NONBLOCK) != 0 {
            return Err(Errno::INVAL.into());
        }
        let added = self.add(Open::Watches(Watches::default()), flags as i32 | libc::O_RDONLY)?;
        self.change().watchers += 1;
        Ok(added)
    }

    fn watches(&mut self, descriptor: u64) -> Result<&mut Watches, Errno> {
        match &mut self.change().table.get_mut(descriptor)?.open {
            Open::Watches(watches) => Ok(watches),
            _ => Err(Errno::INVAL),
        }
    }

    pub(super) fn watch(&mut self, process: &Process, set: u64, path: u64, mask: u64) -> Served {
        let mask = mask as u32;
        let (adds, makes) = (mask & libc::IN_MASK_ADD != 0, mask & libc::IN_MASK_CREATE != 0);
        if mask & libc::IN_ALL_EVENTS == 0 || adds && makes {
            return Err(Errno::INVAL.into());
        }
        self.watches(set)?;
        // An empty path is no path, whatever else.
        let here = libc::AT_FDCWD as u64;
        if path_in(process, path)?.is_empty() {
            return Err(Errno::NOENT.into());
        }
        let node = self.follow(process, here, path, mask & libc::IN_DONT_FOLLOW == 0)?;
        let stat = self.state.tree.stat(node)?;
        if mask & libc::IN_ONLYDIR != 0 && stat.kind != Kind::Directory {
            return Err(Errno::NOTDIR.into());
        }
        self.state.may(node, READ)?;
        let watches = self.watches(set)?;
        let kept = mask & (libc::IN_ALL_EVENTS | libc::IN_ONESHOT);
        if let Some(watch) = watches.list.get_mut(&node) {
            if makes {
                return Err(Errno::EXIST.into());
            }
            watch.mask = if adds { watch.mask | kept } else { kept };
            return Ok(Outcome::Value(watch.number as u64));
        }
        if watches.list.len() >= WATCHES || watches.last == i32::MAX {
            return Err(Errno::NOSPC.into());
        }
        watches.last += 1;
        let number = watches.last;
        watches.list.insert(node, Watch { number, mask: kept });
        Ok(Outcome::Value(number as u64))
    }

    pub(super) fn unwatch(&mut self, set: u64, number: u64) -> Served {
        let watches = self.watches(set)?;
        let found = watches.list.iter().find(|(_, watch)| watch.number == number as i32);
        let node = *found.ok_or(Errno::INVAL)?.0;
        watches.drop_watch(node);
        Ok(DONE)
    }

    /// Reads as many events as there is room for, all of each.
    pub(super) fn read_events(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        wanted: u64,
    ) -> Served {
        let Open::Watches(watches) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        let Some(first) = watches.queue.front() else {
            return self.wait_for(descriptor, IN, 0);
        };
        if first.len() as u64 > wanted {
            return Err(Errno::INVAL.into());
        }
        let (mut bytes, mut count) = (Vec::new(), 0);
        for event in &watches.queue {
            if (bytes.len() + event.len()) as u64 > wanted {
                break;
            }
            bytes.extend(event.bytes());
            count += 1;
        }
        let mut rest = &bytes[..];
        for &(to, len) in pieces {
            let (now, later) = rest.split_at(rest.len().min(len as usize));
            copy_out(process, to, now)?;
            rest = later;
        }
        let watches = self.watches(descriptor)?;
        watches.queue.drain(..count);
        watches.edges += 1;
        Ok(Outcome::Value(bytes.len() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_told_once_and_bounded() {
        let mut watches = Watches::default();
        watches.list.insert(Node(7), Watch { number: 1, mask: libc::IN_MODIFY | libc::IN_OPEN });
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
        let odd: [&dyn Fn(&mut Watches); 4] = [
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
