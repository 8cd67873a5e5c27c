//! The known hosts, and the things that each holds.
//!
//! Promises: a silent host is not chosen once its heartbeat has expired. The list of things that a
//! host holds is bounded, and so are the number of hosts and the bytes of their lists together.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use serde::{Deserialize, Serialize};

use super::bounds::{bound_held, is_bounded};
use super::{MonotonicTime, TenantUses};

/// Maximum hosts that are remembered.
const MAX_HOSTS: usize = 100_000;
/// Maximum bytes of the names of held things of all hosts together.
const MAX_ALL_HELD_BYTES: usize = 256 << 20;

/// The heartbeat of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// This life of the host: a new one after each start, and after a lease that was lost.
    pub host: String,
    /// Name of the host for people.
    pub name: String,
    /// Load in thousandths of its capacity.
    pub load: u32,
    /// Live sandboxes.
    pub sandboxes: usize,
    /// Guests by their routes (`route:HOST/PATH`), and templates and snapshots by their digests.
    pub held: Vec<String>,
    /// It is ending, and takes nothing new.
    pub draining: bool,
}

/// The heartbeat of a host as it is sent: things that most hosts hold are a digest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// As in [`NodeStatus`].
    pub host: String,
    /// As in [`NodeStatus`].
    pub name: String,
    /// As in [`NodeStatus`].
    pub load: u32,
    /// As in [`NodeStatus`].
    pub sandboxes: usize,
    /// As in [`NodeStatus`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
    /// Digest of the routes and templates that it holds.
    pub set: String,
    /// Other things that it holds: the last that it opened.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<String>,
    /// Milliseconds until the next heartbeat, usually.
    pub every: u64,
    /// Use of tenants on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenants: Option<TenantUses>,
}

/// Maximum things outside the set that a heartbeat names.
const MAX_NAMED: usize = 8;

/// The digest of a set of held things.
#[must_use]
pub fn set_digest(held: &[String]) -> String {
    use sha2::{Digest, Sha256};
    let mut sorted: Vec<&String> = held.iter().collect();
    sorted.sort_unstable();
    let mut digest = Sha256::new();
    for one in sorted {
        digest.update((one.len() as u64).to_le_bytes());
        digest.update(one);
    }
    digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

impl Heartbeat {
    /// The heartbeat of a host that holds `set` and `others`.
    #[must_use]
    pub fn new(status: &NodeStatus, set: &[String], others: &[String], every: u64) -> Self {
        Self {
            host: status.host.clone(),
            name: status.name.clone(),
            load: status.load,
            sandboxes: status.sandboxes,
            draining: status.draining,
            set: set_digest(set),
            held: others.iter().rev().take(MAX_NAMED).cloned().collect(),
            every,
            tenants: None,
        }
    }

    /// The status of the host, which holds the things of its `set`.
    #[must_use]
    pub fn status(self, set: &[String]) -> NodeStatus {
        NodeStatus {
            host: self.host,
            name: self.name,
            load: self.load,
            sandboxes: self.sandboxes,
            held: set.iter().cloned().chain(self.held).collect(),
            draining: self.draining,
        }
    }
}

/// A host, as it was when it last spoke.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its heartbeat.
    pub advert: NodeStatus,
    /// Requests that were sent to it since.
    pub sent: u32,
    expires: MonotonicTime,
}

/// The hosts that are known.
#[derive(Clone, Debug, Default)]
pub struct Members {
    all: BTreeMap<String, Member>,
    /// The hosts that hold a thing.
    held: BTreeMap<String, HostNames>,
    /// Bytes of the lists of all hosts.
    held_bytes: usize,
    hosts: HostNames,
}

/// Names of hosts in order, so that a choice at random and a search both take a few steps.
#[derive(Clone, Debug, Default)]
struct HostNames(Vec<String>);

impl HostNames {
    fn position(&self, host: &str) -> Result<usize, usize> {
        self.0.binary_search_by(|other| other.as_str().cmp(host))
    }

    fn insert(&mut self, host: &str) {
        if let Err(at) = self.position(host) {
            self.0.insert(at, host.to_owned());
        }
    }

    fn remove(&mut self, host: &str) {
        if let Ok(at) = self.position(host) {
            self.0.remove(at);
        }
    }
}

fn byte_len(held: &[String]) -> usize {
    held.iter().map(|one| one.len() + size_of::<String>()).sum()
}

fn contains(held: &[String], wanted: &str) -> bool {
    held.iter().any(|one| one == wanted)
}

fn set_of(held: &[String]) -> BTreeSet<&str> {
    held.iter().map(String::as_str).collect()
}

impl Members {
    /// A heartbeat of a host, which counts until `expires`.
    pub fn receive(&mut self, mut advert: NodeStatus, expires: MonotonicTime) {
        if !is_bounded(&advert.host, &advert.name) {
            return;
        }
        bound_held(&mut advert.held);
        let host = advert.host.clone();
        let room = self.all.len() < MAX_HOSTS;
        let before = match self.all.get_mut(&host) {
            Some(known) if known.advert.held == advert.held => {
                *known = Member { advert, sent: 0, expires };
                return;
            }
            Some(known) => std::mem::take(&mut known.advert.held),
            None if !room => return,
            None => {
                self.hosts.insert(&host);
                Vec::new()
            }
        };
        self.held_bytes -= byte_len(&before);
        // Such a host is still watched, and gets what any host can do.
        if self.held_bytes + byte_len(&advert.held) > MAX_ALL_HELD_BYTES {
            advert.held = Vec::new();
        }
        self.held_bytes += byte_len(&advert.held);
        // A host opens a snapshot now and then, and its templates, which come first, stay.
        let same = before.iter().zip(&advert.held).take_while(|(old, new)| old == new).count();
        let kept = &advert.held[..same];
        let (old, new) = (set_of(&before[same..]), set_of(&advert.held[same..]));
        for held in old.difference(&new).filter(|held| !contains(kept, held)) {
            self.holds_no_more(&host, held);
        }
        for held in new.difference(&old).filter(|held| !contains(kept, held)) {
            match self.held.get_mut(*held) {
                Some(hosts) => hosts.insert(&host),
                None => {
                    self.held.insert((*held).to_owned(), HostNames(vec![host.clone()]));
                }
            }
        }
        self.all.insert(host, Member { advert, sent: 0, expires });
    }

    fn holds_no_more(&mut self, host: &str, held: &str) {
        if let Some(hosts) = self.held.get_mut(held) {
            hosts.remove(host);
            if hosts.0.is_empty() {
                self.held.remove(held);
            }
        }
    }

    /// Removes a host.
    pub fn remove(&mut self, host: &str) {
        let Some(member) = self.all.remove(host) else { return };
        self.held_bytes -= byte_len(&member.advert.held);
        for held in set_of(&member.advert.held) {
            self.holds_no_more(host, held);
        }
        self.hosts.remove(host);
    }

    /// Removes hosts with expired heartbeats.
    pub fn expire(&mut self, now: MonotonicTime) {
        let old = self.all.iter().filter(|(_, member)| member.expires <= now);
        for host in old.map(|(host, _)| host.clone()).collect::<Vec<_>>() {
            self.remove(&host);
        }
    }

    /// Something was sent to a host, which counts until it next speaks.
    pub fn note_sent(&mut self, host: &str) {
        if let Some(member) = self.all.get_mut(host) {
            member.sent = member.sent.saturating_add(1);
        }
    }

    /// A host.
    #[must_use]
    pub fn get(&self, host: &str) -> Option<&Member> {
        self.all.get(host)
    }

    /// All of them, in order.
    pub fn all(&self) -> impl Iterator<Item = &Member> {
        self.all.values()
    }

    /// The number of hosts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether no host is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Those that hold something, in order.
    #[must_use]
    pub fn holders(&self, held: &str) -> &[String] {
        self.held.get(held).map_or(&[], |hosts| hosts.0.as_slice())
    }

    /// Whether a host holds something.
    #[must_use]
    pub fn is_holder(&self, host: &str, held: &str) -> bool {
        self.held.get(held).is_some_and(|hosts| hosts.position(host).is_ok())
    }

    /// The things that any host holds and whose names begin with `prefix`, in order.
    pub fn kinds<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        let kinds = self.held.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        kinds.map(|(held, _)| held.as_str()).take_while(move |held| held.starts_with(prefix))
    }

    /// All hosts, in order.
    #[must_use]
    pub fn hosts(&self) -> &[String] {
        &self.hosts.0
    }

    /// The `count` hosts that follow `host` in a ring of those that are `near`: whose leases it
    /// looks after. So each is looked after by as many, however many there are.
    #[must_use]
    pub fn after(&self, host: &str, count: usize, near: impl Fn(&str) -> bool) -> Vec<String> {
        let behind = self.all.range(host.to_owned()..).map(|(name, _)| name);
        let ring = behind.chain(self.all.keys()).filter(|name| *name != host && near(name));
        let mut after: Vec<String> = Vec::new();
        for name in ring.take(2 * count) {
            if after.len() < count && !after.contains(name) {
                after.push(name.clone());
            }
        }
        after
    }

    /// The number of hosts that are `near`.
    #[must_use]
    pub fn count(&self, near: impl Fn(&str) -> bool) -> usize {
        self.all.keys().filter(|host| near(host)).count()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use super::super::bounds::MAX_HELD;
    use super::*;

    fn advert(host: &str, held: &[&str]) -> NodeStatus {
        NodeStatus {
            host: host.to_owned(),
            held: held.iter().map(|held| (*held).to_owned()).collect(),
            ..NodeStatus::default()
        }
    }

    #[test]
    fn holders_follow_the_adverts() {
        let mut members = Members::default();
        let at = Duration::from_secs;
        members.receive(advert("a", &["x", "y"]), at(10));
        members.receive(advert("b", &["y"]), at(20));
        assert_eq!(members.holders("y"), ["a", "b"]);
        assert_eq!(members.hosts(), ["a", "b"]);
        members.receive(advert("a", &["y"]), at(11));
        assert!(members.holders("x").is_empty());
        members.expire(at(11));
        assert_eq!((members.holders("y"), members.len()), (&["b".to_owned()][..], 1));
        members.remove("b");
        assert!(
            members.is_empty() && members.hosts().is_empty() && members.holders("y").is_empty()
        );
        let many: Vec<String> = (0..1000).map(|n| n.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        members.receive(advert("c", &many), at(30));
        assert_eq!(members.get("c").unwrap().advert.held.len(), MAX_HELD);
        // A host with a long name is not remembered, and the lists of the others are counted.
        members.receive(advert(&"d".repeat(1 << 20), &[]), at(30));
        members.receive(advert("e", &["z"]), at(30));
        assert_eq!(members.len(), 2);
        assert!(members.held_bytes > MAX_HELD * size_of::<String>());
        members.receive(advert("c", &[]), at(30));
        assert_eq!(members.held_bytes, 1 + size_of::<String>());
        members.remove("e");
        assert_eq!(members.held_bytes, 0);
        members.held_bytes = MAX_ALL_HELD_BYTES;
        members.receive(advert("f", &["z"]), at(30));
        assert!(
            members.get("f").unwrap().advert.held.is_empty() && members.holders("z").is_empty()
        );
    }

    #[test]
    fn a_changed_list_changes_its_own_entries_only() {
        let mut members = Members::default();
        for host in ["b", "a", "c"] {
            members.receive(advert(host, &["route:*/", "t", "s1", "s1"]), Duration::MAX);
        }
        members.receive(advert("b", &["t", "s2", "route:*/", "route:*/x"]), Duration::MAX);
        assert_eq!(members.holders("t"), ["a", "b", "c"]);
        assert_eq!(members.holders("s1"), ["a", "c"]);
        assert_eq!(members.holders("s2"), ["b"]);
        assert!(members.is_holder("a", "s1") && !members.is_holder("b", "s1"));
        assert!(!members.is_holder("a", "s3"));
        assert_eq!(members.kinds("route:").collect::<Vec<_>>(), ["route:*/", "route:*/x"]);
        // A name that a list has twice counts once.
        members.receive(advert("c", &["t", "s1", "t", "s3"]), Duration::MAX);
        members.receive(advert("c", &["t", "s1", "s1"]), Duration::MAX);
        assert_eq!(members.holders("t"), ["a", "b", "c"]);
        assert_eq!(members.holders("s1"), ["a", "c"]);
        assert!(members.holders("s3").is_empty());
        members.remove("b");
        assert_eq!(members.kinds("").collect::<Vec<_>>(), ["route:*/", "s1", "t"]);
        assert_eq!(members.hosts(), ["a", "c"]);
        for host in ["a", "c"] {
            members.remove(host);
        }
        assert_eq!((members.kinds("").count(), members.held_bytes), (0, 0));
    }

    #[test]
    fn a_heartbeat_and_its_set_are_the_status_of_the_host() {
        let names =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let (set, others) = (names(&["route:*/", "template:a"]), names(&["1", "2"]));
        let status = NodeStatus {
            load: 7,
            sandboxes: 2,
            ..advert("h", &["route:*/", "template:a", "2", "1"])
        };
        let beat = Heartbeat::new(&status, &set, &others, 1000);
        assert_eq!(beat.clone().status(&set), status);
        assert_eq!(beat.set, set_digest(&names(&["template:a", "route:*/"])));
        assert_ne!(beat.set, set_digest(&names(&["template:ar", "oute:*/"])));
        let sent = serde_json::to_vec(&beat).unwrap();
        assert_eq!(serde_json::from_slice::<Heartbeat>(&sent).unwrap(), beat);
        let many: Vec<String> = (0..1000).map(|n| n.to_string()).collect();
        assert_eq!(Heartbeat::new(&status, &set, &many, 1).held.len(), MAX_NAMED);
    }

    #[test]
    fn every_host_is_watched_by_the_same_number_of_hosts() {
        let mut members = Members::default();
        for host in 0..10 {
            members.receive(advert(&format!("h{host}"), &[]), Duration::MAX);
        }
        let mut counts = HashMap::new();
        for host in 0..10 {
            for after in members.after(&format!("h{host}"), 3, |_| true) {
                *counts.entry(after).or_insert(0) += 1;
            }
        }
        assert_eq!(counts.len(), 10);
        assert!(counts.values().all(|count| *count == 3), "{counts:?}");
        // The last of a group looks after its first.
        assert_eq!(members.after("h4", 1, |host| host < "h5"), ["h0"]);
        assert_eq!(members.count(|host| host < "h5"), 5);
        for host in ["h1", "h2", "h3", "h4", "h5", "h6", "h7", "h8", "h9"] {
            members.remove(host);
        }
        assert!(members.after("h0", 3, |_| true).is_empty());
        assert_eq!(members.after("new", 3, |_| true), ["h0"]);
    }
}
