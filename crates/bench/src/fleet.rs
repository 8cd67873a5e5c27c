//! `fleet`: a fleet of thousands of hosts, simulated with the code that real hosts decide with
//! ([`afresh_serve::fleet::policy`]): placement, heartbeat intervals, and expiry of leases.
//!
//! Nothing here measures a network or a NATS server. Time is simulated, so the figures do not
//! depend on the machine. [`Scale`] lists the assumptions, which are part of each row. Hosts of one
//! group hear the same heartbeats, so one table stands for theirs.

mod chance;
mod throughput;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::time::Duration;

use afresh_serve::fleet::policy::{
    FailureDetector, Group, Heartbeat, HeartbeatCost, HeartbeatGroups, HeartbeatInterval,
    LeaseParameters, Members, NodeStatus, Placement, SplitMix64, Verdict, expiry, place_tokens,
};
use anyhow::ensure;
use serde_json::json;

use crate::row::{Options, Row, Sink};

use chance::{Chance, SECOND};
use throughput::throughput;

/// Name of the table.
const TABLE: &str = "fleet";
/// Hosts that are tried before a session is refused.
const MAX_HOSTS_ASKED: usize = 4;
/// Time until hosts listen to another far group.
const FAR_INTERVAL: u64 = 300 * SECOND;

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Hosts.
    pub hosts: usize,
    /// Sessions, over all of the time.
    pub sessions: usize,
    /// Templates. Each host opens all of them.
    pub templates: usize,
    /// Snapshots, the most wanted far more than the others. One session in four is made from one.
    pub snapshots: usize,
    /// Snapshots that one host holds; the one used least recently gives way.
    pub held: usize,
    /// Sessions that one host takes.
    pub places: usize,
    /// Seconds that are simulated.
    pub seconds: u64,
    /// Seconds that a session lives, on average.
    pub life: u64,
    /// Seconds between two calls of a session, on average.
    pub pause: u64,
}

impl Scale {
    /// Ten thousand hosts and ten million sessions in an hour, at about seven tenths of the hosts'
    /// capacity.
    #[must_use]
    pub fn full() -> Self {
        Self {
            hosts: 10_000,
            sessions: 10_000_000,
            templates: 20,
            snapshots: 2_000,
            held: 16,
            places: 120,
            seconds: 3_600,
            life: 300,
            pause: 30,
        }
    }

    /// A hundredth of that.
    #[must_use]
    pub fn quick() -> Self {
        Self { hosts: 100, sessions: 100_000, snapshots: 200, ..Self::full() }
    }
}

/// A host as it is, not as others know it.
struct Host {
    name: String,
    /// The group that it is in.
    group: Group,
    /// The most recently used last.
    held: VecDeque<usize>,
    sessions: usize,
    alive: bool,
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives,
    Leaves {
        host: usize,
    },
    Tells {
        host: usize,
    },
    /// Groups listen to others than before.
    Regroups,
}

/// The known hosts of a group.
struct View {
    around: HeartbeatGroups,
    members: Members,
    /// Hosts of the group.
    hosts: usize,
    /// When expired heartbeats are removed next: hosts do that when they look at leases.
    next_expiry: u64,
    /// Known hosts of the group, until one comes or goes.
    near: Option<usize>,
}

impl View {
    fn near(&mut self) -> usize {
        *self.near.get_or_insert_with(|| self.members.count(|host| self.around.has_near(host)))
    }

    /// A heartbeat at `now`, which counts until `expires`.
    fn receive(&mut self, status: NodeStatus, now: u64, expires: Duration) {
        if self.next_expiry <= now {
            self.members.expire(moment(now));
            self.next_expiry = now + micros(LEASES.renewal());
            self.near = None;
        }
        let known = self.members.len();
        self.members.receive(status, expires);
        if self.members.len() != known {
            self.near = None;
        }
    }
}

struct World {
    scale: Scale,
    hosts: Vec<Host>,
    numbers: HashMap<String, usize>,
    templates: Vec<String>,
    snapshots: Vec<String>,
    /// In order, so that each run draws the same numbers.
    views: BTreeMap<Group, View>,
    /// The groups whose hosts hear a group.
    hearers: HashMap<Group, Vec<Group>>,
    chance: Chance,
    seed: SplitMix64,
    pace: HeartbeatInterval,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    placed: u64,
    hits: u64,
    /// Sessions from snapshots, and how many were placed where theirs was open.
    from_snapshots: u64,
    open_there: u64,
    refused: u64,
    again: u64,
    sent_adverts: u64,
    /// Heartbeats that were delivered to hosts, and their bytes.
    delivered: u64,
    delivered_bytes: u64,
}

/// The bytes of NATS's protocol around a message, without its subject.
const MESSAGE_OVERHEAD: usize = 24;
/// Leases, with the default time.
const LEASES: LeaseParameters = LeaseParameters { time: Duration::from_secs(10) };
/// Leases of other hosts that each host reads per renewal.
const WATCHED_NEIGHBOURS: u64 = 2;
/// Bytes of a renewal and of its answer, as a host and nats-server 2.15 exchange them.
const RENEWAL_BYTES: u64 = 276 + 131;
/// Bytes of a request for the lease of another host, and of the answer.
const LEASE_READ_BYTES: u64 = 188 + 483;

fn moment(microseconds: u64) -> Duration {
    Duration::from_micros(microseconds)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl World {
    fn new(scale: Scale) -> Self {
        let mut seed = SplitMix64::new(42);
        let mut views = BTreeMap::new();
        let mut hosts = Vec::with_capacity(scale.hosts);
        for _ in 0..scale.hosts {
            let name = format!("{:012x}-1", seed.next_word() >> 16);
            let around = HeartbeatGroups::new(&name, scale.hosts, &mut seed);
            let group = around.groups().next().expect("a host is in its own group");
            let view =
                View { around, members: Members::default(), hosts: 0, next_expiry: 0, near: None };
            views.entry(group).or_insert(view).hosts += 1;
            hosts.push(Host { name, group, held: VecDeque::new(), sessions: 0, alive: true });
        }
        let numbers = hosts.iter().enumerate().map(|(number, host)| (host.name.clone(), number));
        let numbers = numbers.collect();
        let templates = (0..scale.templates).map(|number| format!("template:{number}")).collect();
        let snapshots = (0..scale.snapshots).map(|number| format!("{number:022x}")).collect();
        let mut events = BinaryHeap::new();
        for host in 0..scale.hosts {
            // They are started within a minute.
            events.push(Reverse((seed.below(60_000_000) as u64, Event::Tells { host })));
        }
        // Sessions come once most are there.
        events.push(Reverse((60 * SECOND, Event::Arrives)));
        events.push(Reverse((FAR_INTERVAL, Event::Regroups)));
        let mut this = Self {
            hosts,
            numbers,
            templates,
            snapshots,
            views,
            hearers: HashMap::new(),
            chance: Chance(SplitMix64::new(43)),
            seed,
            pace: HeartbeatInterval::default(),
            events,
            placed: 0,
            hits: 0,
            from_snapshots: 0,
            open_there: 0,
            refused: 0,
            again: 0,
            sent_adverts: 0,
            delivered: 0,
            delivered_bytes: 0,
            scale,
        };
        this.listen();
        this
    }

    /// Enters who hears whom.
    fn listen(&mut self) {
        self.hearers.clear();
        for (own, view) in &self.views {
            for group in view.around.groups() {
                self.hearers.entry(group).or_default().push(*own);
            }
        }
    }

    /// Places one session; the host that took it. A full or dead host refuses, and any other is
    /// tried.
    fn place(&mut self, snapshot: Option<usize>) -> Option<usize> {
        self.placed += 1;
        // The host that received the request chooses. It sends each other one a negligible part of
        // all sessions there, so its own count of them is ignored here.
        let asked = self.seed.below(self.scale.hosts);
        let members = &self.views[&self.hosts[asked].group].members;
        let choice = Placement { members, own: Some(&self.hosts[asked].name) };
        let source = match snapshot {
            Some(snapshot) => &self.snapshots[snapshot],
            None => &self.templates[self.seed.below(self.scale.templates)],
        };
        let mut taken = None;
        for attempt in 0..MAX_HOSTS_ASKED {
            let chosen = match attempt {
                0 => choice.host(source, &mut self.seed)?,
                _ => Placement { own: None, ..choice }.any(&mut self.seed)?,
            };
            let number = self.numbers[chosen];
            let host = &self.hosts[number];
            if host.alive && host.sessions < self.scale.places {
                taken = Some(number);
                break;
            }
            self.again += 1;
        }
        let Some(number) = taken else {
            self.refused += 1;
            return None;
        };
        let host = &mut self.hosts[number];
        host.sessions += 1;
        let Some(snapshot) = snapshot else {
            self.hits += 1;
            return Some(number);
        };
        self.from_snapshots += 1;
        if let Some(at) = host.held.iter().position(|held| *held == snapshot) {
            self.hits += 1;
            self.open_there += 1;
            host.held.remove(at);
        } else if host.held.len() >= self.scale.held {
            host.held.pop_front();
        }
        host.held.push_back(snapshot);
        Some(number)
    }

    fn tell(&mut self, number: usize, now: u64) {
        let host = &self.hosts[number];
        if !host.alive {
            return;
        }
        let others: Vec<String> =
            host.held.iter().map(|snapshot| self.snapshots[*snapshot].clone()).collect();
        let status = NodeStatus {
            host: host.name.clone(),
            name: format!("host-{number}"),
            load: (host.sessions * 1000 / self.scale.places) as u32,
            sandboxes: host.sessions,
            held: Vec::new(),
            draining: false,
        };
        let beat = Heartbeat::new(&status, &self.templates, &others, 20_000);
        let message = serde_json::to_vec(&beat).map_or(0, |bytes| bytes.len());
        let subject = format!("afresh.default.advert.{}", place_tokens(&host.name));
        let bytes = message + subject.len() + MESSAGE_OVERHEAD;
        let view = self.views.get_mut(&host.group).expect("a group of hosts has a view");
        // As a host computes it, from the hosts of its group that it has heard.
        let near = view.near().max(1);
        let heard_by = if view.around.is_partial() { 2 * near } else { near };
        let cost = HeartbeatCost { hosts: view.around.hosts(near), heard_by, bytes };
        let (every, group) = (self.pace.usual(cost), host.group);
        let status = beat.status(&self.templates);
        for hearer in &self.hearers[&group] {
            let Some(view) = self.views.get_mut(hearer) else { continue };
            self.delivered += view.hosts as u64;
            self.delivered_bytes += (view.hosts * bytes) as u64;
            view.receive(status.clone(), now, moment(now) + expiry(every));
        }
        self.sent_adverts += 1;
        let next = now + micros(self.pace.next(cost, &mut self.seed));
        self.events.push(Reverse((next, Event::Tells { host: number })));
    }

    /// The snapshot that a session is made from, if it is not a template.
    fn source(&mut self) -> Option<usize> {
        let snapshot = self.seed.below(4) == 0;
        snapshot.then(|| self.chance.snapshot(self.scale.snapshots))
    }

    /// Runs until `end`.
    fn run(&mut self, end: u64) {
        let every = self.scale.seconds * SECOND / self.scale.sessions as u64;
        while let Some(Reverse((now, event))) = self.events.pop() {
            if now >= end {
                self.events.push(Reverse((now, event)));
                return;
            }
            match event {
                Event::Tells { host } => self.tell(host, now),
                Event::Leaves { host } => {
                    self.hosts[host].sessions = self.hosts[host].sessions.saturating_sub(1)
                }
                Event::Regroups => {
                    for view in self.views.values_mut() {
                        view.around.change_far(&mut self.seed);
                    }
                    self.listen();
                    self.events.push(Reverse((now + FAR_INTERVAL, Event::Regroups)));
                }
                Event::Arrives => {
                    let source = self.source();
                    if let Some(host) = self.place(source) {
                        let leaves = now + self.chance.time(self.scale.life as f64);
                        self.events.push(Reverse((leaves, Event::Leaves { host })));
                    }
                    self.events.push(Reverse((now + every, Event::Arrives)));
                }
            }
        }
    }
}

fn row(case: &str, figure: f64, unit: &'static str, scale: &Scale) -> Row {
    Row {
        table: TABLE,
        case: case.to_owned(),
        strategy: "simulated".to_owned(),
        threads: 1,
        median: figure,
        min: figure,
        p99: figure,
        unit,
        samples: Vec::new(),
        more: vec![("hosts", json!(scale.hosts)), ("sessions", json!(scale.sessions))],
    }
}

/// One part in a hundred of the hosts dies at once, in the middle of everything.
fn storm(world: &mut World, begun: u64, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let scale = world.scale;
    let dead = (scale.hosts / 100).max(1);
    let mut lost = 0;
    for number in 0..dead {
        let host = &mut world.hosts[number * 97 % scale.hosts];
        lost += host.sessions;
        (host.sessions, host.alive) = (0, false);
    }
    // When each of them is given up: its neighbours look once in a renewal, and its lease was
    // renewed at some time before.
    let mut given_up = Vec::with_capacity(dead);
    for _ in 0..dead {
        let mut watch = FailureDetector::new(LEASES);
        let renewal = micros(LEASES.renewal());
        let mut now = world.seed.below(renewal as usize) as u64;
        while watch.observe("host", 1, moment(now)) != Verdict::Over {
            now += renewal;
        }
        given_up.push(now);
    }
    // Each lost session comes back with its next call, which is sent again each second until its
    // host is given up and another takes it.
    let mut calls: BinaryHeap<Reverse<(u64, u64)>> = BinaryHeap::new();
    for session in 0..lost {
        let first = world.chance.time(scale.pause as f64);
        let over = given_up[session % dead];
        calls.push(Reverse((first + over.saturating_sub(first).div_ceil(SECOND) * SECOND, first)));
    }
    let mut given_up_hosts: Vec<(u64, String)> = given_up
        .iter()
        .enumerate()
        .map(|(number, over)| (*over, world.hosts[number * 97 % scale.hosts].name.clone()))
        .collect();
    given_up_hosts.sort_unstable_by(|one, two| two.cmp(one));
    let mut each = BTreeMap::<u64, u64>::new();
    let mut back: Vec<u64> = Vec::with_capacity(lost);
    let mut got = vec![0_u32; scale.hosts];
    let (before, hits, mut again) = (world.placed, world.hits, 0_u64);
    while let Some(Reverse((call, first))) = calls.pop() {
        world.run(begun + call);
        // Hosts that were given up receive no more sessions.
        while let Some((_, name)) = given_up_hosts.pop_if(|(over, _)| *over <= call) {
            for view in world.views.values_mut() {
                view.members.remove(&name);
                view.near = None;
            }
        }
        let source = world.source();
        *each.entry(call / SECOND).or_default() += 1;
        match world.place(source) {
            Some(host) => {
                got[host] += 1;
                back.push(call - first);
            }
            None => {
                again += 1;
                ensure!(call < 600 * SECOND, "a lost session found no place for ten minutes");
                calls.push(Reverse((call + SECOND, first)));
            }
        }
    }
    let peak = each.values().copied().max().unwrap_or(0);
    back.sort_unstable();
    let at = |part: usize| {
        back.get(back.len().saturating_sub(1) * part / 100).copied().unwrap_or(0) as f64
            / SECOND as f64
    };
    let mut row = row("storm/wait", at(50), "s", &scale);
    row.p99 = at(99);
    row.min = at(0);
    row.more.push(("dead_hosts", json!(dead)));
    row.more.push(("lost_sessions", json!(lost)));
    row.more.push(("peak_takes_a_second", json!(peak)));
    row.more.push(("most_for_one_host", json!(got.iter().max())));
    row.more.push(("tried_again", json!(again)));
    row.more.push((
        "hits_while_it_lasts",
        json!((world.hits - hits) as f64 / (world.placed - before).max(1) as f64),
    ));
    sink(&row);
    Ok(())
}

/// The whole table.
///
/// # Errors
/// When the outcome contradicts the policy's promises.
pub fn all(scale: Scale, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let sink: &mut Sink<'_> = &mut |row: &Row| {
        if options.wants(&row.case, &row.strategy) {
            sink(row);
        }
    };
    if options.wants_any(&["throughput/1", "throughput/3"], &["simulated"]) {
        let one = throughput(1);
        for hosts in [1, 3] {
            let figure = if hosts == 1 { one } else { throughput(hosts) };
            let mut row = row(&format!("throughput/{hosts}"), figure, "calls/s", &scale);
            row.more = vec![("hosts", json!(hosts)), ("times_one_host", json!(figure / one))];
            sink(&row);
        }
    }
    if !options.wants_any(
        &["placement/hits", "placement/snapshots", "adverts/heard", "traffic", "storm/wait"],
        &["simulated"],
    ) {
        return Ok(());
    }
    let mut world = World::new(scale);
    let middle = 60 * SECOND + scale.seconds * SECOND / 2;
    world.run(middle);
    storm(&mut world, middle, sink)?;
    world.run(60 * SECOND + scale.seconds * SECOND);
    let hits = world.hits as f64 / (world.placed - world.refused).max(1) as f64;
    let mut placement = row("placement/hits", hits * 100.0, "%", &scale);
    placement.more.push(("placed", json!(world.placed)));
    placement.more.push(("asked_another", json!(world.again)));
    placement.more.push(("refused", json!(world.refused)));
    let loads = world.hosts.iter().filter(|host| host.alive).map(|host| host.sessions);
    placement.more.push(("sessions_of_the_fullest", json!(loads.clone().max())));
    placement.more.push(("sessions_of_the_emptiest", json!(loads.min())));
    sink(&placement);
    let mut snapshots = row(
        "placement/snapshots",
        100.0 * world.open_there as f64 / world.from_snapshots.max(1) as f64,
        "%",
        &scale,
    );
    snapshots.more.push(("placed", json!(world.from_snapshots)));
    sink(&snapshots);
    let seconds = (60 + scale.seconds) as f64;
    let hosts = scale.hosts as f64;
    let heard = world.delivered as f64 / seconds / hosts;
    let mut adverts = row("adverts/heard", heard, "adverts/s", &scale);
    let bytes = world.delivered_bytes as f64 / seconds;
    adverts.more.push(("bytes_a_second", json!((bytes / hosts) as u64)));
    adverts.more.push(("bytes_a_second_of_all", json!(bytes as u64)));
    adverts.more.push(("bytes_of_one", json!(world.delivered_bytes / world.delivered.max(1))));
    let known: usize = world.views.values().map(|view| view.members.len() * view.hosts).sum();
    adverts.more.push(("known_hosts", json!(known as f64 / hosts)));
    adverts.more.push(("sent_every_s", json!(seconds * hosts / world.sent_adverts.max(1) as f64)));
    sink(&adverts);
    let renewals = hosts / LEASES.renewal().as_secs_f64();
    let leases = renewals * (RENEWAL_BYTES + WATCHED_NEIGHBOURS * LEASE_READ_BYTES) as f64;
    let mut traffic = row("traffic", (bytes + leases) / 1e6, "MB/s", &scale);
    traffic.more.push(("heartbeats_mb_a_second", json!(bytes / 1e6)));
    traffic.more.push(("leases_mb_a_second", json!(leases / 1e6)));
    traffic.more.push(("lease_renewals_a_second", json!(renewals)));
    traffic.more.push(("lease_reads_a_second", json!(WATCHED_NEIGHBOURS as f64 * renewals)));
    sink(&traffic);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_fleet_places_where_things_are_held_and_stays_within_its_budget() {
        let scale =
            Scale { hosts: 60, sessions: 10_000, snapshots: 100, seconds: 600, ..Scale::full() };
        let mut rows = Vec::new();
        all(scale, &Options::quick(), &mut |row| rows.push(row.clone())).unwrap();
        let of = |case: &str| rows.iter().find(|row| row.case == case).unwrap().median;
        assert!(of("placement/hits") >= 95.0, "{}", of("placement/hits"));
        assert!(of("adverts/heard") <= 65.0);
        assert!(of("throughput/3") >= 2.5 * of("throughput/1"));
    }

    #[test]
    fn a_large_fleet_keeps_to_its_budget_of_bytes_and_fills_all_of_its_hosts() {
        let scale = Scale { hosts: 300, sessions: 10_000, seconds: 120, ..Scale::full() };
        let mut rows = Vec::new();
        all(scale, &Options::quick(), &mut |row| rows.push(row.clone())).unwrap();
        let of = |case: &str, key: &str| {
            let row = rows.iter().find(|row| row.case == case).unwrap();
            row.more.iter().find(|(name, _)| *name == key).unwrap().1.as_f64().unwrap()
        };
        let budget = HeartbeatInterval::default().bytes as f64;
        let sent = of("adverts/heard", "bytes_a_second_of_all");
        assert!(sent <= 1.25 * budget, "{sent}");
        assert!(of("adverts/heard", "known_hosts") <= 150.0);
        assert_eq!(of("placement/hits", "refused"), 0.0);
        assert!(of("placement/hits", "sessions_of_the_emptiest") >= 5.0, "{rows:?}");
    }
}
