//! Three hosts over three NATS servers and an S3 server, with faults between them.

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::clock::Clock;
use crate::hosts::{Host, template, until, write_keys};
use crate::nats_server::NatsServer;
use crate::outages::Outages;
use crate::samples::{Sample, kib_below};
use crate::servers::{FleetStore, Proxy};
use crate::small_disk::SmallDisk;

pub(crate) const HOSTS: usize = 3;
/// Short, since most faults are about its loss. The checker expects that a host of a busy machine
/// loses it without a fault.
const LEASE: Duration = Duration::from_secs(2);
/// Longer than the lease, with the time that others need to see its end.
const LONG_FAULT: Duration = Duration::from_millis(4500);
/// Shorter than the lease.
const SHORT_FAULT: Duration = Duration::from_millis(700);
/// Steps of a host's wall clock, in seconds: forward within the time of a sandbox, beyond it, and
/// back before its start.
const CLOCK_STEPS: [i64; 3] = [3000, 100_000, -100_000];
/// Between two steps.
const STEP_INTERVAL: Duration = Duration::from_millis(700);
/// The variable with the program of an earlier version: hosts of both versions share the fleet.
const PREVIOUS: &str = "AFRESH_TEST_PREVIOUS";
/// A refused save in the log of a host, and its reason for a host without its lease.
const NOT_SAVED: &str = "a sandbox is not saved";
const LOST_LEASE: &str = "not sure that the sandbox is still its own";
/// The disk of each host.
const DISK_MIB: usize = 64;
/// Time for a new leader of each stream.
const ELECTION: Duration = Duration::from_millis(1500);

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// NATS does a host's changes, and the answers are lost for a part of the lease.
    AnswersLost,
    /// The S3 server does a host's changes, and the answers are lost for a part of the lease.
    ObjectsLost,
    /// A host's requests to NATS are lost for longer than the lease; messages from NATS still
    /// arrive.
    RequestsLost,
    /// All between a host and NATS is lost for longer than the lease.
    Partition,
    /// A host stands still for longer than the lease.
    Pause,
    /// A host dies, and starts again.
    Kill,
    /// A host is drained, and starts again.
    Drain,
    /// A NATS server dies, and starts again.
    ServerKill,
    /// The wall clock of a host is stepped forwards and backwards, and set right.
    ClockSteps,
    /// The S3 server answers no host for longer than the lease.
    StoreOutage,
    /// The disk of a host is full.
    FullDisk,
    /// A host is drained, and starts again with the other version.
    Upgrade,
}

impl Fault {
    /// In the order of a run. A second fault happens to the next host at the same time. The first
    /// eight are the short run.
    const ALL: [&[Self]; 21] = [
        &[Self::AnswersLost],
        &[Self::ClockSteps],
        &[Self::Pause],
        &[Self::ServerKill],
        &[Self::RequestsLost],
        &[Self::Drain],
        &[Self::Kill],
        &[Self::Partition, Self::Drain],
        &[Self::ObjectsLost],
        &[Self::Partition],
        &[Self::StoreOutage],
        &[Self::ServerKill, Self::Kill],
        &[Self::Pause, Self::ClockSteps],
        // The host starts again once the store answers: without it a host does not join.
        &[Self::Kill, Self::StoreOutage],
        &[Self::RequestsLost, Self::AnswersLost],
        &[Self::ObjectsLost, Self::Pause],
        &[Self::FullDisk],
        &[Self::Upgrade],
        &[Self::FullDisk, Self::Drain],
        &[Self::Upgrade, Self::Partition],
        &[Self::FullDisk, Self::Kill],
    ];

    /// Whether acknowledged calls that were not saved may be undone.
    pub(crate) fn undoes(self) -> bool {
        matches!(self, Self::RequestsLost | Self::Partition | Self::Pause | Self::Kill)
    }

    /// The time for which it stays.
    fn duration(self) -> Duration {
        match self {
            Self::AnswersLost | Self::ObjectsLost => SHORT_FAULT,
            Self::RequestsLost | Self::Partition | Self::Pause => LONG_FAULT,
            Self::StoreOutage | Self::FullDisk => LONG_FAULT,
            Self::ServerKill => ELECTION,
            Self::Kill | Self::Drain | Self::Upgrade | Self::ClockSteps => Duration::ZERO,
        }
    }
}

/// Whether each refused save in the log of a host has the loss of its lease as the reason.
fn lost_its_lease(log: &str) -> bool {
    let refused = || log.lines().filter(|line| line.contains(NOT_SAVED));
    refused().count() > 0 && refused().all(|line| line.contains(LOST_LEASE))
}

#[test]
fn a_refused_save_with_another_reason_is_no_lost_lease() {
    let lost = format!("ERROR {NOT_SAVED}: its calls are lost why={LOST_LEASE}\n");
    let other = format!("ERROR {NOT_SAVED}: its calls are lost why=the disk is full\n");
    assert!(lost_its_lease(&lost));
    let unnamed = format!("WARN why={LOST_LEASE}\n");
    for log in [&unnamed, &format!("{other}{lost}"), &format!("{lost}{other}")] {
        assert!(!lost_its_lease(log), "{log}");
    }
}

/// The program of the present version.
fn present() -> OsString {
    env!("CARGO_BIN_EXE_afresh").into()
}

/// That of the earlier version, if there is one.
fn previous() -> Option<OsString> {
    std::env::var_os(PREVIOUS)
}

/// The ways of one host to the servers.
struct Links {
    nats: Vec<Proxy>,
    s3: Option<Proxy>,
}

pub(crate) struct Cluster {
    hosts: Vec<Host>,
    /// The time at which each host was started.
    started: Vec<Instant>,
    /// The program of each host.
    programs: Vec<OsString>,
    /// Their disks; none without the right to mount them.
    disks: Vec<SmallDisk>,
    clocks: Vec<Clock>,
    links: Vec<Links>,
    nats: Vec<NatsServer>,
    place: FleetStore,
    dir: TempDir,
}

impl Cluster {
    /// Starts it with this guest; `None` without a nats-server.
    pub(crate) fn start(guest: &str) -> Option<Self> {
        let nats = NatsServer::start_cluster()?;
        let (place, dir) = (FleetStore::start(), tempfile::tempdir().unwrap());
        fs::write(dir.path().join("counter.wasm"), wat::parse_str(guest).unwrap()).unwrap();
        write_keys(dir.path());
        let links = (0..HOSTS).map(|_| Links {
            nats: nats.iter().map(|server| Proxy::before(server.address)).collect(),
            s3: place.address().map(Proxy::before),
        });
        let links = links.collect();
        let library = Clock::build(dir.path());
        let clocks =
            (0..HOSTS).map(|host| Clock::new(&library, dir.path(), &format!("h{host}"))).collect();
        let mount = |host| {
            let folder = dir.path().join(format!("h{host}/sandboxes"));
            fs::create_dir_all(&folder).unwrap();
            SmallDisk::mount(&folder, DISK_MIB)
        };
        let disks = (0..HOSTS).map_while(mount).collect();
        // A fleet is upgraded from the earlier version.
        let program = previous().unwrap_or_else(present);
        let programs = vec![program; HOSTS];
        let (hosts, started) = (Vec::new(), vec![Instant::now(); HOSTS]);
        let mut cluster = Self { hosts, started, programs, disks, clocks, links, nats, place, dir };
        for number in 0..HOSTS {
            let host = cluster.host(number);
            cluster.hosts.push(host);
        }
        cluster.settle();
        Some(cluster)
    }

    fn host(&self, number: usize) -> Host {
        let (name, links) = (format!("h{number}"), &self.links[number]);
        let nats: Vec<String> =
            links.nats.iter().map(|proxy| format!("nats://{}", proxy.address)).collect();
        let mut command = Command::new(&self.programs[number]);
        command.args(["-o", "json", "serve", "--addr", "127.0.0.1:0", "--nats", &nats.join(",")]);
        let lease = format!("{}s", LEASE.as_secs());
        command.args(["--lease", &lease, "--nats-replicas", &self.nats.len().to_string()]);
        self.clocks[number].equip(&mut command);
        let s3 = links.s3.as_ref().map(|proxy| proxy.address);
        let config = template(self.dir.path(), &name);
        Host::start(self.dir.path(), &name, &config, &mut command, &self.place, s3)
    }

    /// The faults of a run, in their order: those of [`Fault::ALL`] that can happen here.
    pub(crate) fn faults(&self) -> Vec<&'static [Fault]> {
        let can = |fault: &Fault| match fault {
            Fault::FullDisk => self.disks.len() == HOSTS,
            Fault::Upgrade => previous().is_some(),
            _ => true,
        };
        Fault::ALL.into_iter().filter(|together| together.iter().all(can)).collect()
    }

    /// Removes all unreferenced states, whatever their age, and measures the fleet. No client may
    /// change anything until then.
    pub(crate) fn collect(&self, at: Duration) -> Sample {
        let before = self.place.kib();
        self.place.age();
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        self.place.name(command.args(["-o", "json", "gc"]));
        let output = command.args(["--nats", &self.server()]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let hosts = self.hosts.iter().zip(&self.started);
        Sample {
            at,
            hosts: hosts.map(|(host, started)| (host.resident(), started.elapsed())).collect(),
            local: (0..HOSTS)
                .map(|host| kib_below(&self.dir.path().join(format!("h{host}/sandboxes"))))
                .sum(),
            nats: self.nats.iter().map(|server| kib_below(server.dir())).sum(),
            store: (before, self.place.kib()),
        }
    }

    /// The files of all objects.
    pub(crate) fn objects(&self) -> std::collections::BTreeSet<PathBuf> {
        self.place.names()
    }

    /// Whether all hosts have the present version all the time.
    pub(crate) fn has_one_version(&self) -> bool {
        previous().is_none()
    }

    fn server(&self) -> String {
        format!("nats://{}", self.nats[0].address)
    }

    /// Waits until every host knows the others.
    pub(crate) fn settle(&self) {
        until("every host knows the others", || {
            self.hosts
                .iter()
                .all(|host| host.known_hosts().is_some_and(|known| known >= HOSTS as u64))
        });
    }

    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.hosts.iter().map(|host| host.addr).collect()
    }

    /// The logs of all hosts.
    pub(crate) fn logs(&self) -> Vec<PathBuf> {
        self.hosts.iter().map(|host| host.log().to_owned()).collect()
    }

    /// Has the first fault happen to this host, or to the NATS server of this number, and each
    /// other one to the next, until all are over. `changed` gets the addresses that clients can
    /// use. A host starts again once its NATS servers have: without a majority it does not join.
    pub(crate) fn suffer(
        &mut self,
        faults: &[Fault],
        number: usize,
        outages: &Outages,
        changed: impl Fn(Vec<SocketAddr>),
    ) {
        let targets =
            || faults.iter().enumerate().map(|(at, fault)| (*fault, (number + at) % HOSTS));
        targets().for_each(|(fault, number)| self.begin(fault, number, &changed));
        std::thread::sleep(faults.iter().map(|fault| fault.duration()).max().unwrap_or_default());
        let (servers, others): (Vec<_>, Vec<_>) =
            targets().rev().partition(|(fault, _)| *fault == Fault::ServerKill);
        for (fault, number) in servers.into_iter().chain(others) {
            self.end(fault, number, outages, &changed);
        }
    }

    fn begin(&mut self, fault: Fault, number: usize, changed: impl Fn(Vec<SocketAddr>)) {
        match fault {
            Fault::Pause => {
                // A client of a paused host waits with it; most call the others.
                let others = self.hosts.iter().enumerate().filter(|(other, _)| *other != number);
                changed(others.map(|(_, host)| host.addr).collect());
                self.hosts[number].stop();
            }
            Fault::Kill => self.hosts[number].kill(),
            Fault::ServerKill => self.nats[number].kill(),
            Fault::ClockSteps => {
                for seconds in CLOCK_STEPS {
                    self.clocks[number].step(seconds);
                    std::thread::sleep(STEP_INTERVAL);
                }
            }
            Fault::FullDisk => self.disks[number].fill(0),
            Fault::Drain | Fault::Upgrade => {}
            network => self.swallow(network, number, true),
        }
    }

    fn end(
        &mut self,
        fault: Fault,
        number: usize,
        outages: &Outages,
        changed: impl Fn(Vec<SocketAddr>),
    ) {
        match fault {
            Fault::Pause => {
                // The first requests after the pause are for sandboxes that the host has lost.
                changed(self.addresses());
                std::thread::sleep(Duration::from_millis(100));
                self.hosts[number].go_on();
            }
            Fault::Kill => self.restart(number, changed),
            Fault::ServerKill => self.nats[number].start_again(),
            Fault::ClockSteps => self.clocks[number].step(0),
            Fault::FullDisk => self.disks[number].empty(),
            Fault::Drain => {
                self.drain(number, outages);
                self.restart(number, changed);
            }
            Fault::Upgrade => {
                self.drain(number, outages);
                let program = &mut self.programs[number];
                *program = if *program == present() { previous().unwrap() } else { present() };
                self.restart(number, changed);
            }
            network => self.swallow(network, number, false),
        }
    }

    /// Begins or ends a fault of the network.
    fn swallow(&self, fault: Fault, number: usize, swallows: bool) {
        let Links { nats, s3 } = &self.links[number];
        match fault {
            Fault::AnswersLost => nats.iter().for_each(|proxy| proxy.swallow_answers(swallows)),
            Fault::RequestsLost => nats.iter().for_each(|proxy| proxy.swallow_requests(swallows)),
            Fault::Partition => nats.iter().for_each(|proxy| proxy.swallow(swallows)),
            Fault::ObjectsLost => s3.iter().for_each(|proxy| proxy.swallow_answers(swallows)),
            Fault::StoreOutage => {
                let proxies = self.links.iter().filter_map(|links| links.s3.as_ref());
                proxies.for_each(|proxy| proxy.swallow(swallows));
            }
            other => unreachable!("{other:?} is no fault of the network"),
        }
    }

    /// Drains a host, and waits for its end. On a machine that is busy with other work it can lose
    /// its lease in that time, and leave sandboxes to others without a save.
    fn drain(&mut self, number: usize, outages: &Outages) {
        let name = self.hosts[number].name.clone();
        // The lease was renewed last within its time before.
        let since = Instant::now().checked_sub(LEASE).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        let output = command.args(["drain", &name, "--nats", &self.server()]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let host = &mut self.hosts[number];
        if !host.has_ended_well() {
            let log = fs::read_to_string(host.log()).unwrap();
            let late = outages.lateness_since(since);
            assert!(lost_its_lease(&log) && late >= LEASE, "{name} did not save all: {log}");
            println!("checker: {name} lost its lease while it was drained, {late:?} late");
        }
    }

    fn restart(&mut self, number: usize, changed: impl Fn(Vec<SocketAddr>)) {
        self.hosts[number] = self.host(number);
        self.started[number] = Instant::now();
        changed(self.addresses());
    }

    /// Waits until a fault has no more effect on leases.
    pub(crate) fn recover(&self) {
        let begun = Instant::now();
        self.settle();
        std::thread::sleep(Duration::from_secs(1).saturating_sub(begun.elapsed()));
    }
}
