//! A fleet under a checker: three hosts, three NATS servers and an S3 server, with one fault or two
//! at a time, while clients call, pause, connect and delete sandboxes by way of any host. Each
//! sandbox's history is checked as it grows, and a deleted sandbox is never found again.
//!
//! `cargo xtask soak --fleet` runs it for half an hour, or for another number of seconds.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Fault, HOSTS};
use crate::deletion::{Deletion, Deletions};
use crate::history::{self, History, Step};
use crate::hosts::{Sandbox, exchange, until};
use crate::outages::Outages;
use crate::soak::Dice;

/// The variable with the seconds of a run.
const SECONDS: &str = "AFRESH_CHECKER_SECONDS";
/// The faults of a run without the variable.
const SHORT_RUN: usize = 8;
const CLIENTS: u64 = 4;
/// Of each client.
const SANDBOXES: usize = 3;
/// A sandbox is replaced after this many calls: each answer is the whole log.
const MAX_CALLS: u32 = 400;
/// Deleted sandboxes of each client that are looked up.
const MAX_DELETED: usize = 50;
/// Faults between two collections of the store.
const COLLECTION_ROUNDS: usize = 20;
/// Time without any request before a collection: a host may still work on an earlier one.
const REST: Duration = Duration::from_secs(2);
/// Between two faults.
const FAULT_INTERVAL: Duration = Duration::from_millis(500);

/// A guest that appends eight bytes of each piece of code to a log, and answers the log.
const LOGGER: &str = r#"(module
    (memory (export "memory") 3)
    ;; An array of three, with a text of two bytes of length; the length is kept at 1020, too.
    (data (i32.const 1024) "\83\00\f6\79\00\00")
    (func (export "warm"))
    (func (export "afresh_buffer") (param i32) (result i32)
        (if (result i32) (i32.gt_u (local.get 0) (i32.const 60000))
            (then (i32.const 0)) (else (i32.const 65536))))
    (func (export "evaluate") (param i32) (result i64)
        (local $length i32)
        (local.set $length (i32.load (i32.const 1020)))
        (i64.store (i32.add (i32.const 1030) (local.get $length)) (i64.load (i32.const 65540)))
        (local.set $length (i32.add (local.get $length) (i32.const 8)))
        (i32.store (i32.const 1020) (local.get $length))
        (i32.store8 (i32.const 1028) (i32.shr_u (local.get $length) (i32.const 8)))
        (i32.store8 (i32.const 1029) (local.get $length))
        (i64.or
            (i64.shl (i64.const 1024) (i64.const 32))
            (i64.extend_i32_u (i32.add (local.get $length) (i32.const 6))))))"#;

/// The state of a run.
struct Run {
    addresses: RwLock<Vec<SocketAddr>>,
    /// Odd while acknowledged calls may be undone.
    losses: AtomicU64,
    logs: Vec<PathBuf>,
    /// The leases that hosts had lost at the end of the last fault.
    leases_lost: AtomicUsize,
    /// Whether a disk may be full.
    full: AtomicBool,
    over: AtomicBool,
    /// Read by a client while it makes requests.
    activity: RwLock<()>,
    outages: Outages,
    counts: Mutex<BTreeMap<&'static str, u64>>,
    violations: Mutex<Vec<String>>,
}

impl Run {
    fn runs(&self) -> bool {
        !self.over.load(Ordering::Relaxed)
    }

    fn count(&self, what: &'static str, number: usize) {
        *self.counts.lock().unwrap().entry(what).or_default() += number as u64;
    }

    fn refused(&self) {
        self.count("refused", 1);
        std::thread::sleep(Duration::from_millis(10));
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        self.addresses.read().unwrap().clone()
    }

    fn address(&self, dice: &mut Dice) -> Option<SocketAddr> {
        let addresses = self.addresses.read().unwrap();
        addresses.get(dice.below(addresses.len().max(1))).copied()
    }

    fn moment(&self) -> Moment {
        let losses = self.losses.load(Ordering::SeqCst);
        Moment { losses, leases_lost: self.leases_lost.load(Ordering::SeqCst) }
    }

    /// The leases that hosts have lost, by their logs: a host of a busy machine can lose one
    /// without a fault.
    fn leases_lost(&self) -> usize {
        let logs = self.logs.iter().map(|log| fs::read_to_string(log).unwrap_or_default());
        let signs = ["the lease was broken", "gave no sign for the time of a lease"];
        logs.map(|log| signs.map(|sign| log.matches(sign).count()).iter().sum::<usize>()).sum()
    }

    fn violation(&self, what: String) {
        self.over.store(true, Ordering::Relaxed);
        self.violations.lock().unwrap().push(what);
    }

    /// Checks that this host does not find a deleted sandbox. The result is whether it answered.
    fn check_absence(&self, sandbox: &Sandbox, address: SocketAddr) -> Result<bool, String> {
        match sandbox.ask_at(address, "GET", "") {
            404 => {
                self.count("absent", 1);
                Ok(true)
            }
            0 | 429 | 503 | 504 => {
                self.refused();
                Ok(false)
            }
            status => Err(format!("{sandbox:?} was deleted, and is answered with {status}")),
        }
    }

    /// Checks by way of each host that deleted sandboxes are not found, once no fault is left.
    fn check_all_absences(&self, deleted: &[Sandbox]) {
        for (sandbox, address) in deleted
            .iter()
            .flat_map(|sandbox| self.addresses().into_iter().map(move |a| (sandbox, a)))
        {
            let mut done = Ok(false);
            until("every host answers for a deleted sandbox", || {
                done = self.check_absence(sandbox, address);
                done != Ok(false)
            });
            if let Err(what) = done {
                return self.violation(what);
            }
        }
    }

    /// Uses sandboxes until the run is over.
    fn use_sandboxes(&self, number: u64, client: &mut Client) {
        let Client { own, leaving, deleted } = client;
        let mut dice = Dice::new(number);
        while self.runs() {
            let _active = self.activity.read().unwrap();
            let Some(address) = self.address(&mut dice) else { continue };
            if let Some((subject, mut deletions)) = leaving.pop() {
                let status = subject.sandbox.ask_at(address, "DELETE", "");
                match deletions.answered(status, subject.may_be_lost(self)) {
                    Ok(Deletion::Done) if deleted.len() < MAX_DELETED => {
                        deleted.push(subject.sandbox);
                    }
                    Ok(Deletion::Done | Deletion::Gone) => {}
                    Ok(Deletion::Refused) => {
                        leaving.insert(0, (subject, deletions));
                        self.refused();
                    }
                    Err(what) => self.violation(format!("{:?}: {what}", subject.sandbox)),
                }
            }
            if own.len() < SANDBOXES {
                let since = self.moment();
                match Sandbox::make_at(address) {
                    Some(sandbox) => own.push(Subject::new(sandbox, since)),
                    None => self.refused(),
                }
                continue;
            }
            let which = dice.below(own.len());
            let subject = &mut own[which];
            let done = match dice.below(60) {
                0 => {
                    leaving.push((own.swap_remove(which), Deletions::default()));
                    continue;
                }
                1 if !deleted.is_empty() => {
                    let sandbox = &deleted[dice.below(deleted.len())];
                    self.check_absence(sandbox, address).map(|_| true)
                }
                1..=7 => subject.save(self, &mut dice).map(|()| true),
                8..=17 => subject.append(self, address).map(|called| called != CallOutcome::Gone),
                _ => subject.call(self, address).map(|called| called != CallOutcome::Gone),
            };
            match done {
                Ok(true) if subject.history.calls() < MAX_CALLS => {}
                Ok(true) => leaving.push((own.swap_remove(which), Deletions::default())),
                Ok(false) => drop(own.swap_remove(which)),
                Err(what) => self.violation(format!("{:?}: {what}", subject.sandbox)),
            }
        }
    }
}

/// The sandboxes of a client.
#[derive(Default)]
struct Client {
    own: Vec<Subject>,
    /// Those that are to be deleted.
    leaving: Vec<(Subject, Deletions)>,
    /// Some of those that were deleted.
    deleted: Vec<Sandbox>,
}

/// The losses that were known at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Moment {
    losses: u64,
    leases_lost: usize,
}

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallOutcome {
    Answered,
    /// It was refused for now, or its connection broke.
    Refused,
    /// Its sandbox was lost with its host, which it may be before its first save.
    Gone,
}

impl Moment {
    /// Whether a host may have been lost since.
    fn lost(self, run: &Run) -> bool {
        self.lost_by_fault(run) || self.leases_lost != run.leases_lost()
    }

    /// Whether a fault may have cost a host its lease since.
    fn lost_by_fault(self, run: &Run) -> bool {
        self.losses % 2 == 1 || self != run.moment()
    }
}

/// A sandbox under test.
struct Subject {
    sandbox: Sandbox,
    /// The log in its memory.
    history: History,
    /// When its last answered call was begun.
    since: Moment,
    /// The log in its file.
    file: History,
    /// The same for the file.
    file_since: Moment,
    /// It may be paused: the run ended before a connect, or the connection of a pause broke, and
    /// its host may make the pause at any later time.
    may_be_paused: bool,
    /// The start of the first request since its last answer.
    waiting: Option<Instant>,
}

impl Subject {
    fn new(sandbox: Sandbox, since: Moment) -> Self {
        let (history, file) = (History::default(), History::default());
        let (may_be_paused, waiting) = (false, None);
        Self { sandbox, history, since, file, file_since: since, may_be_paused, waiting }
    }

    /// Whether it may be lost with its host, which it may be before its first save.
    fn may_be_lost(&self, run: &Run) -> bool {
        self.since.lost(run) && self.history.is_unsaved()
    }

    /// Begins a request.
    fn wait(&mut self) {
        self.waiting.get_or_insert_with(Instant::now);
    }

    /// It answered the last request.
    fn answered(&mut self, run: &Run) {
        if let Some(since) = self.waiting.take() {
            run.outages.answered(since);
        }
    }

    /// Makes a call by way of this address.
    fn call(&mut self, run: &Run, address: SocketAddr) -> Result<CallOutcome, String> {
        let begun = run.moment();
        let call = self.history.call();
        self.wait();
        match self.sandbox.answer_at(address, &history::text(call)) {
            Ok((answer, generation)) => {
                self.answered(run);
                let log = history::parse(&answer)?;
                let lost = self.since.lost_by_fault(run)
                    || self.history.is_undone_by(&log) && self.since.lost(run);
                run.count("calls", 1);
                if let Step::Undone(calls) = self.history.answered(&log, generation, lost)? {
                    run.count("undone", calls);
                }
                self.since = begun;
                Ok(CallOutcome::Answered)
            }
            Err(refusal) => {
                if refusal.may_come_later {
                    self.history.broken_off();
                }
                self.refused(run, address, refusal.status)
            }
        }
    }

    /// Appends to its file by way of this address: reads it, and writes it with one call more.
    fn append(&mut self, run: &Run, address: SocketAddr) -> Result<CallOutcome, String> {
        let begun = run.moment();
        self.wait();
        let (text, generation) = match self.sandbox.file_at(address, None) {
            Ok(read) => {
                self.answered(run);
                read
            }
            Err(refusal) => return self.refused(run, address, refusal.status),
        };
        let log = history::parse(&text)?;
        let lost = self.file_since.lost_by_fault(run)
            || self.file.is_undone_by(&log) && self.file_since.lost(run);
        let in_file = |what| format!("in its file, {what}");
        if let Step::Undone(writes) = self.file.read(&log, generation, lost).map_err(in_file)? {
            run.count("undone writes", writes);
        }
        self.file_since = begun;
        let call = self.file.call();
        let written = text + &history::text(call);
        match self.sandbox.file_at(address, Some(&written)) {
            Ok(_) if self.file_since.lost_by_fault(run) => {
                // Acknowledged, but a loss between the read and the write may have undone calls
                // that it has.
                run.count("writes", 1);
                self.refused(run, address, 503)
            }
            Ok((_, generation)) => {
                run.count("writes", 1);
                let log = history::parse(&written)?;
                self.file.answered(&log, generation, false).map_err(in_file)?;
                Ok(CallOutcome::Answered)
            }
            Err(refusal) => {
                if refusal.may_come_later {
                    self.file.broken_off();
                }
                self.refused(run, address, refusal.status)
            }
        }
    }

    /// The outcome of a refusal, unless it is a violation.
    fn refused(&self, run: &Run, address: SocketAddr, status: u16) -> Result<CallOutcome, String> {
        match status {
            502 if self.may_be_paused
                && matches!(
                    self.sandbox.ask_at(address, "POST", "/connect"),
                    0 | 200 | 201 | 503 | 504
                ) =>
            {
                run.refused();
                Ok(CallOutcome::Refused)
            }
            404 | 502 if self.may_be_lost(run) => {
                run.count("gone", 1);
                Ok(CallOutcome::Gone)
            }
            0 | 429 | 503 | 504 => {
                run.refused();
                Ok(CallOutcome::Refused)
            }
            _ => Err(format!("it is refused with {status}: {:?}", self.history)),
        }
    }

    /// Pauses it, and connects to it again.
    fn save(&mut self, run: &Run, dice: &mut Dice) -> Result<(), String> {
        self.wait();
        while run.runs() {
            let Some(address) = run.address(dice) else { continue };
            let full = run.full.load(Ordering::SeqCst);
            match self.sandbox.ask_at(address, "POST", "/pause") {
                // 409: an earlier pause was done, and its answer is lost.
                204 | 409 => {
                    self.history.saved(self.since.lost(run));
                    self.file.saved(self.file_since.lost(run));
                    run.count("saves", 1);
                    break;
                }
                // Its outcome is unknown.
                0 | 504 => {
                    self.may_be_paused = true;
                    run.refused();
                }
                503 => run.refused(),
                // Its host has a full disk, and serves it on.
                507 if full || run.full.load(Ordering::SeqCst) => {
                    self.answered(run);
                    run.count("saves refused with a full disk", 1);
                    return Ok(());
                }
                // The next call finds the same.
                404 if self.may_be_lost(run) => return Ok(()),
                status => return Err(format!("a pause is answered with {status}")),
            }
        }
        while run.runs() {
            let Some(address) = run.address(dice) else { continue };
            match self.sandbox.ask_at(address, "POST", "/connect") {
                200 | 201 => {
                    self.answered(run);
                    return Ok(());
                }
                0 | 503 | 504 => run.refused(),
                status => return Err(format!("a connect is answered with {status}")),
            }
        }
        self.may_be_paused = true;
        Ok(())
    }

    /// Checks it by way of each host, once no fault is left.
    fn check(&mut self, run: &Run) {
        for address in run.addresses() {
            let mut done = Ok(CallOutcome::Refused);
            until("every sandbox is answered for once all faults are over", || {
                done = self.call(run, address).and_then(|called| match called {
                    CallOutcome::Answered => self.append(run, address),
                    other => Ok(other),
                });
                !matches!(done, Ok(CallOutcome::Refused))
            });
            match done {
                Ok(CallOutcome::Gone) => return,
                Ok(_) => {}
                Err(what) => return run.violation(format!("{:?}: {what}", self.sandbox)),
            }
        }
    }
}

/// Ends the run when it is dropped.
struct EndOfRun<'a>(&'a AtomicBool);

impl Drop for EndOfRun<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Deletes all sandboxes, also those whose making was not answered: then the store has what it had
/// before them.
fn delete_all(run: &Run, cluster: &Cluster, before: &BTreeSet<PathBuf>) {
    const KEY: &str = "X-API-Key: key-of-acme\r\n";
    let address = run.addresses()[0];
    until("no sandbox is listed", || {
        let path = "/v2/sandboxes?state=running,paused";
        let Some((200, listed)) = exchange(address, "GET", path, KEY, b"") else { return false };
        let listed: Vec<serde_json::Value> = serde_json::from_str(&listed).unwrap();
        for sandbox in &listed {
            let path = format!("/sandboxes/{}", sandbox["sandboxID"].as_str().unwrap());
            let status =
                exchange(address, "DELETE", &path, KEY, b"").map_or(0, |(status, _)| status);
            assert!(matches!(status, 0 | 204 | 404 | 429 | 503 | 504), "{path}: {status}");
        }
        listed.is_empty()
    });
    // Sandboxes of a lost host are removed by the one that broke its lease.
    let mut left = Vec::new();
    let mut collect = || {
        println!("checker: {}", cluster.collect(Duration::ZERO));
        left = cluster.objects().difference(before).cloned().collect();
        left.is_empty()
    };
    if cluster.has_one_version() {
        until("the store has the templates alone", collect);
    } else {
        // Each version may have stored a template.
        collect();
        println!("checker: {} objects more than at the start", left.len());
    }
}

#[test]
fn a_fleet_under_faults_loses_no_acknowledged_call_and_has_no_two_lives() {
    let seconds = std::env::var(SECONDS).ok().map(|seconds| seconds.parse::<u64>().unwrap());
    let Some(mut cluster) = Cluster::start(LOGGER) else { return };
    let (all, before) = (cluster.faults(), cluster.objects());
    let run = Run {
        addresses: RwLock::new(cluster.addresses()),
        losses: AtomicU64::new(0),
        logs: cluster.logs(),
        leases_lost: AtomicUsize::new(0),
        full: AtomicBool::new(false),
        over: AtomicBool::new(false),
        activity: RwLock::new(()),
        outages: Outages::new(),
        counts: Mutex::new(BTreeMap::new()),
        violations: Mutex::new(Vec::new()),
    };
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| Client::default()).collect();
    let mut faults = Vec::new();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let run = &run;
        for (number, client) in clients.iter_mut().enumerate() {
            scope.spawn(move || run.use_sandboxes(number as u64, client));
        }
        scope.spawn(|| run.outages.measure_lateness(&run.over));
        // Also if a fault panics: the scope waits for the clients.
        let _over = EndOfRun(&run.over);
        let changed = |addresses| *run.addresses.write().unwrap() = addresses;
        for round in 0.. {
            let over = match seconds {
                Some(seconds) => begun.elapsed().as_secs() >= seconds,
                None => round == SHORT_RUN,
            };
            if over || !run.runs() {
                break;
            }
            std::thread::sleep(FAULT_INTERVAL);
            let start = Instant::now();
            let together = all[round % all.len()];
            let undoes = u64::from(together.iter().any(|fault| fault.undoes()));
            run.losses.fetch_add(undoes, Ordering::SeqCst);
            run.full.store(together.contains(&Fault::FullDisk), Ordering::SeqCst);
            run.outages.begin(format!("{together:?}"));
            cluster.suffer(together, (round + round / all.len()) % HOSTS, &run.outages, changed);
            cluster.recover();
            run.full.store(false, Ordering::SeqCst);
            run.leases_lost.store(run.leases_lost(), Ordering::SeqCst);
            run.losses.fetch_add(undoes, Ordering::SeqCst);
            println!("checker: {together:?} took {:?}", start.elapsed());
            faults.push(together);
            if faults.len() % COLLECTION_ROUNDS == 1 {
                let _rest = run.activity.write().unwrap();
                run.outages.rest();
                std::thread::sleep(REST);
                println!("checker: {}", cluster.collect(begun.elapsed()));
            }
        }
    });
    run.outages.print();
    if run.violations.lock().unwrap().is_empty() {
        for client in &mut clients {
            client.own.iter_mut().for_each(|subject| subject.check(&run));
            run.check_all_absences(&client.deleted);
        }
    }
    if run.violations.lock().unwrap().is_empty() {
        delete_all(&run, &cluster, &before);
    }
    let counts = run.counts.into_inner().unwrap();
    println!("checker: {} s, {} faults, {counts:?}", begun.elapsed().as_secs(), faults.len());
    let violations = run.violations.into_inner().unwrap();
    assert!(violations.is_empty(), "after {faults:?}: {violations:#?}");
    let count = |what: &str| counts.get(what).copied().unwrap_or(0);
    assert!(count("calls") > 100 && count("saves") > 0 && count("refused") > 0, "{counts:?}");
}
