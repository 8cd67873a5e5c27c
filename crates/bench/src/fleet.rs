//! `fleet`: a fleet of thousands of hosts, simulated with the code that real hosts decide with
//! ([`afresh_serve::fleet::policy`]): placement, heartbeat intervals, and expiry of leases.
//!
//! Nothing here measures a network or a NATS server. Time is simulated, so the figures do not depend on the machine.
//! [`Scale`] lists the assumptions, which are part of each row. One table of adverts stands for those of all hosts,
//! which differ only by when the same adverts arrive.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use afresh_serve::fleet::policy::{
    FailureDetector, HeartbeatInterval, Members, NodeStatus, Placement, Seed, Terms, Verdict,
};
use anyhow::ensure;
use serde_json::json;

use crate::row::{Options, Row, Sink};

/// Name of the table.
const TABLE: &str = "fleet";
/// Hosts that are tried before a session is refused.
const MAX_HOSTS_ASKED: usize = 4;
/// Microseconds in a second.
const SECOND: u64 = 1_000_000;

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Hosts.
    pub hosts: usize,
    /// Sessions, over all of the time.
    pub sessions: usize,
    /// Templates, the most wanted far more than the others.
    pub templates: usize,
    /// Templates that one host holds; the one used least recently gives way.
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
    /// Ten thousand hosts and ten million sessions in an hour, at about seven tenths of the hosts' capacity.
    #[must_use]
    pub fn full() -> Self {
        Self {
            hosts: 10_000,
            sessions: 10_000_000,
            templates: 2_000,
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
        Self { hosts: 100, sessions: 100_000, templates: 200, ..Self::full() }
    }
}

/// Random times and templates.
struct Chance(Seed);

impl Chance {
    /// Above 0, at most 1.
    fn part(&mut self) -> f64 {
        ((self.0.number() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Microseconds, by an exponential law.
    fn time(&mut self, seconds: f64) -> u64 {
        (-self.part().ln() * seconds * SECOND as f64) as u64
    }

    /// A template, by a law of powers: the most wanted one about a tenth of all.
    fn template(&mut self, count: usize) -> usize {
        let place = (count as f64).powf(self.part()) - 1.0;
        (place as usize).min(count - 1)
    }
}

/// A host as it is, not as others know it.
struct Host {
    name: String,
    /// The most recently used last.
    held: VecDeque<usize>,
    sessions: usize,
    alive: bool,
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives,
    Leaves { host: usize },
    Tells { host: usize },
}

struct World {
    scale: Scale,
    hosts: Vec<Host>,
    templates: Vec<String>,
    members: Members,
    chance: Chance,
    seed: Seed,
    pace: HeartbeatInterval,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    placed: u64,
    hits: u64,
    refused: u64,
    again: u64,
    told: u64,
    told_bytes: u64,
}

fn moment(microseconds: u64) -> Duration {
    Duration::from_micros(microseconds)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl World {
    fn new(scale: Scale) -> Self {
        let mut seed = Seed::new(42);
        let hosts = (0..scale.hosts).map(|number| Host {
            name: format!("{number:012x}-1"),
            held: VecDeque::new(),
            sessions: 0,
            alive: true,
        });
        let templates = (0..scale.templates).map(|number| format!("sha256:{number:064x}"));
        let mut events = BinaryHeap::new();
        for host in 0..scale.hosts {
            // They are started within a minute.
            events.push(Reverse((seed.below(60_000_000) as u64, Event::Tells { host })));
        }
        // Sessions come once most are there.
        events.push(Reverse((60 * SECOND, Event::Arrives)));
        Self {
            hosts: hosts.collect(),
            templates: templates.collect(),
            members: Members::default(),
            chance: Chance(Seed::new(43)),
            seed,
            pace: HeartbeatInterval::default(),
            events,
            placed: 0,
            hits: 0,
            refused: 0,
            again: 0,
            told: 0,
            told_bytes: 0,
            scale,
        }
    }

    fn number(name: &str) -> usize {
        let digits = name.split('-').next().unwrap_or_default();
        usize::from_str_radix(digits, 16).unwrap_or(0)
    }

    /// Places one session; the host that took it. A full or dead host refuses, and any other is tried.
    fn place(&mut self, template: usize) -> Option<usize> {
        self.placed += 1;
        // The host that received the request chooses. One host sends another a negligible part of all sessions there,
        // so its own count of them is ignored here.
        let asked = self.seed.below(self.scale.hosts);
        let choice = Placement { members: &self.members, own: Some(&self.hosts[asked].name) };
        let mut taken = None;
        for attempt in 0..MAX_HOSTS_ASKED {
            let chosen = match attempt {
                0 => choice.host(&self.templates[template], &mut self.seed)?,
                _ => Placement { own: None, ..choice }.any(&mut self.seed)?,
            };
            let number = Self::number(chosen);
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
        if let Some(at) = host.held.iter().position(|held| *held == template) {
            self.hits += 1;
            host.held.remove(at);
        } else if host.held.len() >= self.scale.held {
            host.held.pop_front();
        }
        host.held.push_back(template);
        Some(number)
    }

    fn tell(&mut self, number: usize, now: u64) {
        let host = &self.hosts[number];
        if !host.alive {
            return;
        }
        let mut held: Vec<String> =
            host.held.iter().map(|template| self.templates[*template].clone()).collect();
        held.sort_unstable();
        let advert = NodeStatus {
            host: host.name.clone(),
            name: format!("host-{number}"),
            load: (host.sessions * 1000 / self.scale.places) as u32,
            sandboxes: host.sessions,
            held,
            draining: false,
        };
        if self.told.is_multiple_of(1000) {
            let bytes = serde_json::to_vec(&advert).map_or(0, |bytes| bytes.len());
            self.told_bytes += bytes as u64 * 1000;
        }
        self.told += 1;
        let hosts = self.members.len().max(1);
        self.members.heard(advert, moment(now) + self.pace.expiry(hosts));
        let next = now + micros(self.pace.next(hosts, &mut self.seed));
        self.events.push(Reverse((next, Event::Tells { host: number })));
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
                Event::Arrives => {
                    let template = self.chance.template(self.scale.templates);
                    if let Some(host) = self.place(template) {
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
    let terms = Terms { time: Duration::from_secs(10) };
    let dead = (scale.hosts / 100).max(1);
    let mut lost = 0;
    for number in 0..dead {
        let host = &mut world.hosts[number * 97 % scale.hosts];
        lost += host.sessions;
        (host.sessions, host.alive) = (0, false);
    }
    // When each of them is given up: its neighbours look once in a renewal, and its lease was renewed at some time before.
    let mut given_up = Vec::with_capacity(dead);
    for _ in 0..dead {
        let mut watch = FailureDetector::new(terms);
        let renewal = micros(terms.renewal());
        let mut now = world.seed.below(renewal as usize) as u64;
        while watch.saw("host", 1, moment(now)) != Verdict::Over {
            now += renewal;
        }
        given_up.push(now);
    }
    // Each lost session comes back with its next call, which is sent again each second until its host is given up and
    // another takes it.
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
    let mut each = std::collections::BTreeMap::<u64, u64>::new();
    let mut back: Vec<u64> = Vec::with_capacity(lost);
    let mut got = vec![0_u32; scale.hosts];
    let (before, hits, mut again) = (world.placed, world.hits, 0_u64);
    while let Some(Reverse((call, first))) = calls.pop() {
        world.run(begun + call);
        // Hosts that were given up receive no more sessions.
        while let Some((_, name)) = given_up_hosts.pop_if(|(over, _)| *over <= call) {
            world.members.remove(&name);
        }
        let template = world.chance.template(scale.templates);
        *each.entry(call / SECOND).or_default() += 1;
        match world.place(template) {
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

/// Requests a second of hosts whose calls take five milliseconds each, at sixteen places; a host that forwards a
/// request works on it for half a millisecond as well.
fn throughput(hosts: usize) -> f64 {
    const PLACES: usize = 16;
    const CLIENTS: usize = 200;
    let mut chance = Chance(Seed::new(7));
    let mut seed = Seed::new(8);
    // Each client has a session on one host, and sends to any.
    let clients = CLIENTS * hosts;
    let mut free: Vec<BinaryHeap<Reverse<u64>>> =
        (0..hosts).map(|_| (0..PLACES).map(|_| Reverse(0)).collect()).collect();
    // When a client's call is at a host, and which.
    let mut ready: BinaryHeap<Reverse<(u64, usize, usize)>> =
        (0..clients).map(|client| Reverse((0, client, seed.below(hosts)))).collect();
    let end = 20 * SECOND;
    let mut done = 0_u64;
    while let Some(Reverse((now, client, host))) = ready.pop() {
        let Some(Reverse(place)) = free[host].pop() else { continue };
        let owner = client % hosts;
        let work = if host == owner { chance.time(0.005) } else { 500 };
        let over = place.max(now) + work;
        free[host].push(Reverse(over));
        if over >= end {
            continue;
        }
        let next = if host == owner { seed.below(hosts) } else { owner };
        done += u64::from(host == owner);
        ready.push(Reverse((over, client, next)));
    }
    done as f64 / 20.0
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
    if !options.wants_any(&["placement/hits", "adverts/heard", "storm/wait"], &["simulated"]) {
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
    let seconds = (60 + scale.seconds) as f64;
    let mut adverts = row("adverts/heard", world.told as f64 / seconds, "adverts/s", &scale);
    adverts.more.push(("bytes_a_second", json!((world.told_bytes as f64 / seconds) as u64)));
    adverts
        .more
        .push(("sent_every_s", json!(seconds * scale.hosts as f64 / world.told.max(1) as f64)));
    let terms = Terms { time: Duration::from_secs(10) };
    let renewals = scale.hosts as f64 / terms.renewal().as_secs_f64();
    adverts.more.push(("lease_renewals_a_second_of_all", json!(renewals)));
    adverts.more.push(("lease_reads_a_second_of_all", json!(2.0 * renewals)));
    sink(&adverts);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_fleet_places_where_things_are_held_and_stays_within_its_budget() {
        let scale =
            Scale { hosts: 60, sessions: 10_000, templates: 100, seconds: 600, ..Scale::full() };
        let mut rows = Vec::new();
        all(scale, &Options::quick(), &mut |row| rows.push(row.clone())).unwrap();
        let of = |case: &str| rows.iter().find(|row| row.case == case).unwrap().median;
        assert!(of("placement/hits") >= 95.0, "{}", of("placement/hits"));
        assert!(of("adverts/heard") <= 550.0);
        assert!(of("throughput/3") >= 2.5 * of("throughput/1"));
    }
}
