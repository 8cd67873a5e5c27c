//! Watchers of directories, in the shape of the E2B agent: events that a client polls, or a stream
//! of them.
//!
//! Promises: after each call and each slice of background work the directory is compared with how
//! it was before, so changes are in the order of calls. Entries and events that wait are bounded,
//! and count in the memory of the sandbox; a watcher with more is ended with an error. May break
//! it: a file that is made and removed within one call is not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use afresh::Session;
use afresh::files::{Kind, Node, Refused, Tree};
use serde_json::{Value, json};

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::agent::commands::Subscriber;
use crate::sandbox::agent::connect::{self, ConnectError};
use crate::sandbox::request_body::requests::WatchRequest;
use crate::sandbox::transfer::file_entry::{connect_error, entry};

/// Maximum watchers of a sandbox.
const MAX_WATCHERS: usize = 16;
/// Maximum entries below a watched directory, and bytes of their names.
const MAX_ENTRIES: usize = 10_000;
const MAX_NAME_BYTES: usize = 1 << 20;
/// Maximum events that wait for a client that polls, and their bytes as JSON. A path may have
/// several thousand bytes.
const MAX_EVENTS: usize = 1000;
const MAX_EVENT_BYTES: usize = 1 << 20;
/// Memory of an entry without its name.
const ENTRY_BYTES: usize = 128;
/// Maximum levels of directories.
const MAX_DEPTH: usize = 32;

/// The watchers of a sandbox.
#[derive(Default)]
pub(crate) struct Watchers {
    all: Mutex<Vec<Watcher>>,
    /// Files that uploads have created since the last comparison.
    uploaded: Mutex<BTreeSet<Node>>,
    /// Bytes of the entries and events of all watchers.
    bytes: AtomicU64,
    /// The number of the next watcher.
    next: AtomicU64,
}

struct Watcher {
    id: String,
    place: Arc<WatchedDirectory>,
    seen: Arc<Entries>,
    /// Memory of `seen`.
    seen_bytes: usize,
    receiver: EventReceiver,
    /// Bytes of the events that wait for the next poll.
    waiting: usize,
}

/// The directory of a watcher, which no client changes.
struct WatchedDirectory {
    /// Streams have no id.
    number: u64,
    path: String,
    recursive: bool,
    with_entry: bool,
}

pub(crate) enum EventReceiver {
    /// Events that wait for the next poll, or the reason why there are no more.
    Polled(Result<Vec<Value>, ConnectError>),
    /// `None` once it has ended.
    Streamed(Option<Subscriber>),
}

/// Entries below a directory, by their names from there.
type Entries = BTreeMap<String, Entry>;

#[derive(Clone, Copy, PartialEq, Eq)]
struct Entry {
    node: Node,
    kind: Kind,
    mode: u32,
    size: u64,
    modified: u64,
}

/// The entries below a directory.
fn scan(tree: &Tree, path: &str, recursive: bool) -> Result<Entries, Refused> {
    let mut found = Entries::new();
    let mut bytes = 0;
    let mut left = vec![(tree.find(path)?, String::new(), 1)];
    while let Some((directory, above, depth)) = left.pop() {
        for listed in tree.list(directory)? {
            let name = format!("{above}{}", String::from_utf8_lossy(&listed.name));
            bytes += name.len();
            if found.len() >= MAX_ENTRIES || bytes > MAX_NAME_BYTES {
                return Err(Refused::TooLarge);
            }
            let stat = tree.stat(listed.node)?;
            if recursive && stat.kind == Kind::Directory && depth < MAX_DEPTH {
                left.push((listed.node, format!("{name}/"), depth + 1));
            }
            let modified = stat.times.modified.nanos();
            let entry = Entry {
                node: stat.node,
                kind: stat.kind,
                mode: stat.mode,
                size: stat.size,
                modified,
            };
            found.insert(name, entry);
        }
    }
    Ok(found)
}

/// The events that lead from one state to the next: names and types, in the words of the agent. The
/// agent changes the owner of a file that it creates for an upload, which is an event.
fn compare(old: &Entries, new: &Entries, uploaded: &BTreeSet<Node>) -> Vec<(String, &'static str)> {
    let mut events = Vec::new();
    let moved: BTreeMap<Node, &String> = old
        .iter()
        .filter(|(name, was)| new.get(*name).is_none_or(|is| is.node != was.node))
        .map(|(name, was)| (was.node, name))
        .collect();
    let mut renamed = BTreeSet::new();
    for (name, is) in new {
        let was = old.get(name).filter(|was| was.node == is.node);
        let Some(was) = was else {
            match moved.get(&is.node) {
                Some(before) => {
                    renamed.insert(*before);
                    events.push(((*before).clone(), "EVENT_TYPE_RENAME"));
                    events.push((name.clone(), "EVENT_TYPE_CREATE"));
                }
                None => {
                    events.push((name.clone(), "EVENT_TYPE_CREATE"));
                    if uploaded.contains(&is.node) {
                        events.push((name.clone(), "EVENT_TYPE_CHMOD"));
                    }
                    if is.kind == Kind::File && is.size > 0 {
                        events.push((name.clone(), "EVENT_TYPE_WRITE"));
                    }
                }
            }
            continue;
        };
        if is.kind != Kind::Directory && (is.modified, is.size) != (was.modified, was.size) {
            events.push((name.clone(), "EVENT_TYPE_WRITE"));
        }
        if is.mode != was.mode {
            events.push((name.clone(), "EVENT_TYPE_CHMOD"));
        }
    }
    let removed = old.keys().filter(|name| !new.contains_key(*name) && !renamed.contains(*name));
    events.extend(removed.map(|name| (name.clone(), "EVENT_TYPE_REMOVE")));
    events
}

fn exhausted(why: String) -> ConnectError {
    ConnectError::new("resource_exhausted", why)
}

/// Memory of the entries of a watcher.
fn bytes_of(entries: &Entries) -> usize {
    entries.keys().map(|name| name.len() + ENTRY_BYTES).sum()
}

impl WatchedDirectory {
    fn event(&self, tree: &Tree, name: &str, kind: &str) -> Value {
        let mut event = json!({"name": name, "type": kind});
        if self.with_entry
            && let Ok(entry) = entry(tree, &format!("{}/{name}", self.path))
        {
            event["entry"] = entry;
        }
        event
    }
}

impl Watcher {
    fn note(&mut self, event: Value) {
        let full = match &mut self.receiver {
            EventReceiver::Polled(Ok(waiting)) if waiting.len() < MAX_EVENTS => {
                self.waiting += event.to_string().len();
                if self.waiting <= MAX_EVENT_BYTES {
                    waiting.push(event);
                    return;
                }
                true
            }
            EventReceiver::Streamed(Some(client)) => {
                client.send(connect::message(0, &json!({ "filesystem": event }))).is_err()
            }
            EventReceiver::Polled(waiting) => waiting.is_ok(),
            EventReceiver::Streamed(None) => false,
        };
        if full {
            self.end(&exhausted("events were not read; watch the directory again".to_owned()));
        }
    }

    /// Ends it with the reason.
    fn end(&mut self, why: &ConnectError) {
        self.seen = Arc::default();
        self.seen_bytes = 0;
        self.waiting = 0;
        match &mut self.receiver {
            EventReceiver::Polled(waiting) => *waiting = Err(why.clone()),
            EventReceiver::Streamed(client) => {
                if let Some(client) = client.take() {
                    client.end(connect::broken_off(why));
                }
            }
        }
    }

    /// Whether it has no more events: it has failed, and its client has not learnt of that yet.
    fn is_ended(&self) -> bool {
        matches!(self.receiver, EventReceiver::Polled(Err(_)) | EventReceiver::Streamed(None))
    }

    fn is_left(&self) -> bool {
        match &self.receiver {
            EventReceiver::Polled(_) => false,
            EventReceiver::Streamed(client) => client.as_ref().is_none_or(Subscriber::is_left),
        }
    }
}

impl Watchers {
    /// Compares the directories with how they were.
    pub(crate) fn observe(&self, session: &mut Session) {
        let uploaded = std::mem::take(&mut *lock(&self.uploaded));
        let is_idle = {
            let mut all = lock(&self.all);
            all.retain(|watcher| !watcher.is_left());
            all.iter().all(Watcher::is_ended)
        };
        if is_idle {
            return;
        }
        let Ok(files) = session.files() else { return };
        self.look(&files.tree(), &uploaded);
    }

    /// Compares the directories with how they were, and notes the events. The lock is only held for
    /// an event at a time: clients take events, and remove watchers, meanwhile.
    fn look(&self, tree: &Tree, uploaded: &BTreeSet<Node>) {
        let watched: Vec<_> = lock(&self.all)
            .iter()
            .filter(|watcher| !watcher.is_ended())
            .map(|watcher| (watcher.place.clone(), watcher.seen.clone()))
            .collect();
        for (place, seen) in watched {
            let now = match scan(tree, &place.path, place.recursive) {
                Ok(now) => now,
                Err(Refused::TooLarge) => {
                    let why = format!("more than {MAX_ENTRIES} entries are below {}", place.path);
                    self.change(&place, |watcher| watcher.end(&exhausted(why)));
                    continue;
                }
                // The directory was removed.
                Err(_) => Entries::new(),
            };
            let events = compare(&seen, &now, uploaded);
            let (bytes, now) = (bytes_of(&now), Arc::new(now));
            self.change(&place, |watcher| {
                watcher.seen = now;
                watcher.seen_bytes = bytes;
            });
            for (name, kind) in events {
                let event = place.event(tree, &name, kind);
                if !self.change(&place, |watcher| watcher.note(event)) {
                    break;
                }
            }
        }
    }

    /// Changes a watcher unless it has been removed or has ended. False if so.
    fn change(&self, place: &WatchedDirectory, change: impl FnOnce(&mut Watcher)) -> bool {
        let mut all = lock(&self.all);
        let watcher = all.iter_mut().find(|watcher| watcher.place.number == place.number);
        let Some(watcher) = watcher.filter(|watcher| !watcher.is_ended()) else { return false };
        change(watcher);
        self.count(&all);
        true
    }

    /// Counts the memory of all watchers.
    fn count(&self, all: &[Watcher]) {
        let bytes = all.iter().map(|watcher| watcher.seen_bytes + watcher.waiting);
        self.bytes.store(bytes.sum::<usize>() as u64, Ordering::Relaxed);
    }

    /// Bytes of the entries and events of all watchers.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// An upload of this turn has created files.
    pub(crate) fn add_uploaded(&self, files: Vec<Node>) {
        lock(&self.uploaded).extend(files);
    }

    /// Ends all of them with the reason.
    pub(crate) fn end(&self, why: &ConnectError) {
        let mut all = lock(&self.all);
        all.drain(..).for_each(|mut watcher| watcher.end(why));
        self.count(&all);
    }

    /// Whether a client reads events as they come.
    pub(crate) fn has_streams(&self) -> bool {
        let streams = |one: &Watcher| matches!(one.receiver, EventReceiver::Streamed(_));
        lock(&self.all).iter().any(|watcher| streams(watcher) && !watcher.is_left())
    }

    /// Watches a directory by its absolute path, if `admit` agrees to the memory.
    pub(crate) fn add(
        &self,
        tree: &Tree,
        wanted: &WatchRequest,
        (id, receiver): (String, EventReceiver),
        admit: impl FnOnce(u64) -> Result<(), ErrorResponse>,
    ) -> Result<(), ConnectError> {
        let path = wanted.path.as_str();
        let refused = |error: Refused| connect_error(path, &error);
        if tree.stat_path(path).map_err(refused)?.kind != Kind::Directory {
            return Err(refused(Refused::NotDirectory));
        }
        let seen = scan(tree, path, wanted.recursive).map_err(refused)?;
        let mut all = lock(&self.all);
        all.retain(|watcher| !watcher.is_left());
        if all.len() >= MAX_WATCHERS {
            let why = format!("a sandbox has at most {MAX_WATCHERS} watchers; stop one");
            return Err(exhausted(why));
        }
        let seen_bytes = bytes_of(&seen);
        admit(seen_bytes as u64)?;
        let place = Arc::new(WatchedDirectory {
            number: self.next.fetch_add(1, Ordering::Relaxed),
            path: path.trim_end_matches('/').to_owned(),
            recursive: wanted.recursive,
            with_entry: wanted.include_entry,
        });
        all.push(Watcher { id, place, seen: Arc::new(seen), seen_bytes, receiver, waiting: 0 });
        self.count(&all);
        Ok(())
    }

    /// The events since the last poll.
    pub(crate) fn take(&self, id: &str) -> Result<Vec<Value>, ConnectError> {
        let mut all = lock(&self.all);
        let watcher = all.iter_mut().find(|watcher| watcher.id == id);
        let watcher = watcher.ok_or_else(|| unknown(id))?;
        let EventReceiver::Polled(waiting) = &mut watcher.receiver else { return Err(unknown(id)) };
        watcher.waiting = 0;
        let events = waiting.as_mut().map(std::mem::take).map_err(|why| why.clone());
        self.count(&all);
        events
    }

    pub(crate) fn remove(&self, id: &str) -> Result<(), ConnectError> {
        let mut all = lock(&self.all);
        let at = all.iter().position(|watcher| watcher.id == id).ok_or_else(|| unknown(id))?;
        all.swap_remove(at);
        self.count(&all);
        Ok(())
    }
}

fn unknown(id: &str) -> ConnectError {
    ConnectError::new("not_found", format!("the watcher {id} was not found"))
}

#[cfg(test)]
mod tests {
    use afresh::files::{Budget, Time};

    use super::*;

    #[test]
    fn changes_are_events_in_the_words_of_the_agent() {
        let mut tree = Tree::new(Budget::default());
        let now = Time::now;
        tree.write_path("/dir/kept", b"1", now()).unwrap();
        tree.write_path("/dir/gone", b"1", now()).unwrap();
        tree.write_path("/dir/old", b"1", now()).unwrap();
        tree.write_path("/dir/deep/below", b"1", now()).unwrap();
        let before = |recursive| scan(&tree, "/dir", recursive).unwrap();
        let (flat, deep) = (before(false), before(true));
        assert_eq!((flat.len(), deep.len()), (4, 5));
        let mut changed = tree.clone();
        changed.write_path("/dir/kept", b"22", now()).unwrap();
        changed.write_path("/dir/new", b"1", now()).unwrap();
        changed.write_path("/dir/deep/below", b"22", now()).unwrap();
        changed.make_directories("/dir/folder", now()).unwrap();
        changed.remove_path("/dir/gone", now()).unwrap();
        let node = changed.find("/dir/kept").unwrap();
        changed.set_mode(node, 0o700, now()).unwrap();
        let place = |path: &str| {
            let walk = afresh::files::Walk::new(Tree::ROOT).name();
            changed.walk(path.as_bytes(), walk).unwrap()
        };
        let (from, to) = (place("/dir/old"), place("/dir/moved"));
        changed.rename_at(&from, &to, afresh::files::Rename::default(), now()).unwrap();
        let uploaded = BTreeSet::from([changed.write_path("/dir/sent", b"1", now()).unwrap()]);
        let events = compare(&deep, &scan(&changed, "/dir", true).unwrap(), &uploaded);
        let told: Vec<_> = events
            .iter()
            .map(|(name, kind)| format!("{name} {}", kind.trim_start_matches("EVENT_TYPE_")))
            .collect();
        let expected = [
            "deep/below WRITE",
            "folder CREATE",
            "kept WRITE",
            "kept CHMOD",
            "old RENAME",
            "moved CREATE",
            "new CREATE",
            "new WRITE",
            "sent CREATE",
            "sent CHMOD",
            "sent WRITE",
            "gone REMOVE",
        ];
        assert_eq!(told, expected);
        let flat = compare(&flat, &scan(&changed, "/dir", false).unwrap(), &BTreeSet::new());
        assert!(flat.iter().all(|(name, _)| !name.contains('/')));
    }

    /// With time in proportion to the product of old and new entries this would take hours.
    #[test]
    fn many_renames_and_uploads_are_compared_in_little_time() {
        const COUNT: usize = 200_000;
        let mut tree = Tree::new(Budget::default());
        tree.write_path("/file", b"1", Time::now()).unwrap();
        let stat = tree.stat_path("/file").unwrap();
        let entries = |name: &str, count: usize| -> Entries {
            let entry = |number: usize| Entry {
                node: Node(number as u64),
                kind: stat.kind,
                mode: stat.mode,
                size: 1,
                modified: 0,
            };
            (0..count).map(|number| (format!("{name}{number}"), entry(number))).collect()
        };
        let (old, new) = (entries("a", COUNT), entries("b", 2 * COUNT));
        let uploaded: BTreeSet<Node> = new.values().map(|entry| entry.node).collect();
        let events = compare(&old, &new, &uploaded);
        let count = |kind: &str| events.iter().filter(|(_, of)| of.ends_with(kind)).count();
        assert_eq!((count("RENAME"), count("REMOVE"), count("CHMOD")), (COUNT, 0, COUNT));
    }

    #[test]
    fn events_that_are_not_read_are_bounded() {
        let mut tree = Tree::new(Budget::default());
        tree.make_directories("/dir", Time::now()).unwrap();
        let watchers = Watchers::default();
        let wanted = || WatchRequest { path: "/dir".to_owned(), ..WatchRequest::default() };
        let polled = || EventReceiver::Polled(Ok(Vec::new()));
        watchers.add(&tree, &wanted(), ("a".to_owned(), polled()), |_| Ok(())).unwrap();
        for number in 0..=MAX_EVENTS {
            tree.write_path(format!("/dir/{number}"), b"", Time::now()).unwrap();
        }
        watchers.look(&tree, &BTreeSet::new());
        // It has ended, and keeps and compares nothing any more.
        assert!(lock(&watchers.all)[0].is_ended() && lock(&watchers.all)[0].seen.is_empty());
        assert!(watchers.take("a").is_err() && watchers.take("b").is_err());
        watchers.remove("a").unwrap();
        for number in 0..MAX_WATCHERS {
            let bytes = watchers.bytes();
            let admit = |more| {
                assert!(more > 1000 * ENTRY_BYTES as u64);
                Ok(())
            };
            watchers.add(&tree, &wanted(), (number.to_string(), polled()), admit).unwrap();
            assert!(watchers.bytes() > bytes);
        }
        let more = |admit: fn(u64) -> Result<(), ErrorResponse>| {
            watchers.add(&tree, &wanted(), ("more".to_owned(), polled()), admit)
        };
        assert!(more(|_| Ok(())).is_err());
        watchers.remove("0").unwrap();
        assert!(more(|_| Err(ErrorResponse::no_memory())).is_err());
        assert!(more(|_| Ok(())).is_ok());
        watchers.end(&unknown("x"));
        assert!(lock(&watchers.all).is_empty() && watchers.bytes() == 0);
        let nowhere = WatchRequest { path: "/nowhere".to_owned(), ..WatchRequest::default() };
        assert!(watchers.add(&tree, &nowhere, ("a".to_owned(), polled()), |_| Ok(())).is_err());
    }

    /// A thousand events with long paths would be many megabytes.
    #[test]
    fn bytes_of_events_that_are_not_read_are_bounded() {
        let mut tree = Tree::new(Budget::default());
        let deep = format!("/dir{}", format!("/{}", "x".repeat(250)).repeat(14));
        tree.make_directories(&deep, Time::now()).unwrap();
        let watchers = Watchers::default();
        let mut wanted = WatchRequest { path: "/dir".to_owned(), ..WatchRequest::default() };
        wanted.recursive = true;
        let receiver = EventReceiver::Polled(Ok(Vec::new()));
        watchers.add(&tree, &wanted, ("a".to_owned(), receiver), |_| Ok(())).unwrap();
        for round in 1..=MAX_EVENTS / 50 {
            for number in 0..50 {
                let bytes = vec![0; round];
                tree.write_path(format!("{deep}/{number}"), &bytes, Time::now()).unwrap();
            }
            watchers.look(&tree, &BTreeSet::new());
            let all = lock(&watchers.all);
            assert!(all[0].waiting <= MAX_EVENT_BYTES);
            if all[0].is_ended() {
                assert!(round > 1);
                return;
            }
        }
        panic!("{} bytes of events wait", lock(&watchers.all)[0].waiting);
    }
}
