//! The soak: a fleet under load while guests trap, run over their time and grow, clients go away in
//! the middle, and hosts are drained and killed. `cargo xtask soak --server` runs it for a given
//! time.
//!
//! Invariants: every answer is the right one and contains nothing of an earlier request, a sandbox
//! that was acknowledged as saved continues from there or from later, and no state is continued
//! twice. At the end, the server's memory has not grown.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};

use crate::hosts::{Fleet, RunResult, Sandbox, exchange, is_unknown};
use crate::outages::Outages;

/// Seconds that it lasts, if not the few that a test may take.
const SECONDS: &str = "AFRESH_SOAK_SECONDS";
const DEFAULT_SECONDS: u64 = 12;
/// Time between two hosts that are ended.
const FAULT_INTERVAL: Duration = Duration::from_secs(3);
/// Of each client of sandboxes.
const SANDBOXES: usize = 6;
/// The time limit of a request to a guest.
const TIME_LIMIT: Duration = Duration::from_secs(1);
/// The message of a request that was ended by its time limit.
const TOO_LATE: &str = "took longer than this route allows";
/// Parts of a run whose memory is printed.
const SERIES: usize = 12;

/// A guest that keeps what it gets, and answers what it was given when warm: `warm`. `!trap`,
/// `!spin` and `!grow` are named after their effects.
const KEEPER: &str = r#"(module
    (memory (export "memory") 3)
    (data (i32.const 16) "warm")
    (global $length (mut i32) (i32.const 4))
    (func (export "afresh_buffer") (param i32) (result i32)
        (if (result i32) (i32.gt_u (local.get 0) (i32.const 60000))
            (then (i32.const 0)) (else (i32.const 65536))))
    (func (export "handle") (param $n i32) (result i64)
        (local $first i32) (local $answer i32)
        (local.set $first (i32.load (i32.const 65536)))
        (if (i32.eq (local.get $first) (i32.const 0x69707321)) (then (loop (br 0))))
        (local.set $answer (global.get $length))
        (memory.copy (i32.const 131072) (i32.const 16) (global.get $length))
        (memory.copy (i32.const 16) (i32.const 65536) (local.get $n))
        (global.set $length (local.get $n))
        (if (i32.eq (local.get $first) (i32.const 0x61727421)) (then unreachable))
        (if (i32.eq (local.get $first) (i32.const 0x6f726721))
            (then (loop $more
                (i32.store8 (i32.sub (i32.mul (memory.size) (i32.const 65536)) (i32.const 1)) (i32.const 1))
                (br_if $more (i32.ne (memory.grow (i32.const 1)) (i32.const -1))))))
        (i64.or (i64.shl (i64.const 131072) (i64.const 32)) (i64.extend_i32_u (local.get $answer)))))"#;

const GUESTS: &str = "
[[guest]]
name = 'fresh'
guest = 'DIR/keeper.wasm'
route = '/fresh'
timeout = '1s'
memory-mib = 4
[[guest]]
name = 'reset'
guest = 'DIR/keeper.wasm'
route = '/reset'
mode = 'reset'
timeout = '1s'
memory-mib = 4
";

/// Numbers that look random, the same in every run.
pub(crate) struct Dice(u64);

impl Dice {
    /// Dice with this number as their seed.
    pub(crate) fn new(number: u64) -> Self {
        Self(number + 1)
    }

    pub(crate) fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % most as u64) as usize
    }
}

/// The state that all threads share.
struct Soak {
    addresses: RwLock<Vec<SocketAddr>>,
    /// The number of killed hosts; counted before the kill.
    killed: AtomicU64,
    over: AtomicBool,
    outages: Outages,
    requests: AtomicU64,
    runs: AtomicU64,
    saves: AtomicU64,
    refused: AtomicU64,
    /// Requests that the time limit ended, and should not have.
    late: AtomicU64,
    /// The errors, in words.
    wrong: Mutex<Vec<String>>,
}

impl Soak {
    fn any(&self, dice: &mut Dice) -> SocketAddr {
        let addresses = self.addresses.read().unwrap();
        addresses[dice.below(addresses.len())]
    }

    fn goes_on(&self) -> bool {
        !self.over.load(Ordering::Relaxed)
    }

    fn wrong(&self, what: String) {
        self.over.store(true, Ordering::Relaxed);
        self.wrong.lock().unwrap().push(what);
    }

    fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        // A refused client retries a little later.
        std::thread::sleep(Duration::from_millis(5));
    }

    /// Asks the guests for things good and bad.
    fn ask_guests(&self, number: u64) {
        let mut dice = Dice::new(number);
        let mut round = 0;
        while self.goes_on() {
            round += 1;
            let addr = self.any(&mut dice);
            let path = ["/fresh", "/reset"][dice.below(2)];
            let canary = format!("canary {number} {round}");
            let (body, expected) = match dice.below(120) {
                0..=2 => ("!trap".to_owned(), 500),
                3 => ("!spin".to_owned(), 504),
                4..=12 => ("!grow".to_owned() + &canary, 200),
                13 => {
                    // A client that does not wait for its answer.
                    if let Ok(mut gone) = TcpStream::connect(addr) {
                        let head =
                            "POST /reset HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n!spin";
                        let _ = gone.write_all(head.as_bytes());
                    }
                    continue;
                }
                _ => (canary, 200),
            };
            self.requests.fetch_add(1, Ordering::Relaxed);
            let begun = Instant::now();
            match exchange(addr, "POST", path, "", body.as_bytes()) {
                None | Some((429 | 503, _)) => self.refused(),
                // A machine that is busy with other work can be later than the time limit.
                Some((504, text))
                    if expected == 200
                        && text.contains(TOO_LATE)
                        && self.outages.lateness_since(begun) >= TIME_LIMIT =>
                {
                    self.late.fetch_add(1, Ordering::Relaxed);
                }
                Some((504, text)) if is_unknown(&text) => self.refused(),
                Some((status, answer)) => {
                    let right = status == expected && (status != 200 || answer == "warm");
                    if !right || answer.contains("canary") {
                        self.wrong(format!("{path} answered {body:?} with {status} {answer:?}"));
                    }
                }
            }
        }
    }

    /// Has sandboxes count, saves them, ends them and makes others.
    fn use_sandboxes(&self, number: u64) {
        let mut dice = Dice::new(number + 999);
        let mut own: Vec<CountedSandbox> = Vec::new();
        while self.goes_on() {
            let addr = self.any(&mut dice);
            if own.len() < SANDBOXES {
                let killed = self.killed.load(Ordering::SeqCst);
                match Sandbox::make_at(addr) {
                    Some(sandbox) => own.push(CountedSandbox::new(sandbox, killed)),
                    None => self.refused(),
                }
                continue;
            }
            let which = dice.below(own.len());
            let done = match dice.below(30) {
                0 => {
                    // Refused or not, it is not used again: a refused deletion may still take
                    // effect.
                    own[which].sandbox.ask_at(addr, "DELETE", "");
                    Ok(false)
                }
                1..=3 => own[which].save(self, &mut dice).map(|()| true),
                _ => own[which].run(self, addr),
            };
            match done {
                Ok(true) => {}
                Ok(false) => drop(own.swap_remove(which)),
                Err(what) => self.wrong(format!("{:?}: {what}", own[which])),
            }
        }
    }
}

/// A sandbox, and what is known of its count.
#[derive(Debug)]
struct CountedSandbox {
    sandbox: Sandbox,
    /// The least and the most that the next call may answer: a call that was refused may have been
    /// made all the same.
    next: (u64, u64),
    /// The count that was acknowledged as saved.
    saved: Option<u64>,
    /// The number of killed hosts at its last answer.
    killed: u64,
}

impl CountedSandbox {
    fn new(sandbox: Sandbox, killed: u64) -> Self {
        Self { sandbox, next: (1, 1), saved: None, killed }
    }

    /// Runs code; `false` when the sandbox is lost, and may be.
    fn run(&mut self, soak: &Soak, addr: SocketAddr) -> Result<bool, String> {
        let before = soak.killed.load(Ordering::SeqCst);
        let ran = self.sandbox.run_at(addr);
        soak.runs.fetch_add(1, Ordering::Relaxed);
        let host_lost = soak.killed.load(Ordering::SeqCst) != self.killed;
        match ran {
            RunResult::Count(count) => {
                // The host that had it may have been killed: then it continues from the saved
                // state.
                let least =
                    if host_lost { self.saved.map_or(1, |saved| saved + 1) } else { self.next.0 };
                if !(least.min(self.next.0)..=self.next.1).contains(&count) {
                    return Err(format!("it counts {count}"));
                }
                self.next = (count + 1, count + 1);
                self.killed = before;
                Ok(true)
            }
            RunResult::Refused(404 | 502) => match self.saved {
                None if host_lost => Ok(false),
                _ => Err("it is lost".to_owned()),
            },
            RunResult::Refused(0 | 429 | 503 | 504) => {
                self.next.1 += 1;
                soak.refused();
                Ok(true)
            }
            RunResult::Refused(other) => Err(format!("it is refused with {other}")),
        }
    }

    /// Saves it, and lets it continue.
    fn save(&mut self, soak: &Soak, dice: &mut Dice) -> Result<(), String> {
        // The saved state includes its last answer.
        let count = self.next.0 - 1;
        while soak.goes_on() {
            let status = self.sandbox.ask_at(soak.any(dice), "POST", "/pause");
            match status {
                // An answer that got lost, and the pause did not.
                204 | 409 => break,
                0 | 503 | 504 => soak.refused(),
                404 if self.saved.is_none()
                    && soak.killed.load(Ordering::SeqCst) != self.killed =>
                {
                    // The next call gets the same answer.
                    return Ok(());
                }
                other => return Err(format!("pausing it answers {other}")),
            }
        }
        if soak.goes_on() {
            soak.saves.fetch_add(1, Ordering::Relaxed);
            let host_lost = soak.killed.load(Ordering::SeqCst) != self.killed;
            // The saved state may be the one that it was taken back to.
            self.saved = Some(if host_lost { self.saved.unwrap_or(0) } else { count });
        }
        while soak.goes_on() {
            match self.sandbox.ask_at(soak.any(dice), "POST", "/connect") {
                200 | 201 => break,
                0 | 503 | 504 => soak.refused(),
                other => return Err(format!("connecting to it answers {other}")),
            }
        }
        Ok(())
    }
}

/// Drains a host, by a second request where NATS did not answer the first in time.
fn drain(fleet: &Fleet, name: &str) {
    let drain = || fleet.try_command(&["drain", name], false);
    let Err(why) = drain() else { return };
    assert!(why.contains("timed out"), "{name} is not drained: {why}");
    // The host may have heard the first, and have left. If it has not, its end is missed.
    if let Err(why) = drain() {
        println!("soak: {name} may be drained: {why}");
    }
}

/// KiB that the host which is never ended keeps, a sample now and then.
fn watch(fleet: &Fleet, samples: &mut Vec<u64>) {
    let steady = fleet.hosts.iter().find(|host| host.name == "two").unwrap();
    samples.push(steady.resident());
}

#[test]
fn a_soak_finds_no_wrong_answer_no_canary_no_lost_sandbox_and_level_memory() {
    let seconds =
        std::env::var(SECONDS).map_or(DEFAULT_SECONDS, |seconds| seconds.parse().unwrap());
    let Some(mut fleet) = Fleet::with(GUESTS, &[("keeper", KEEPER)]) else { return };
    let soak = Soak {
        addresses: RwLock::new(fleet.hosts.iter().map(|host| host.addr).collect()),
        killed: AtomicU64::new(0),
        over: AtomicBool::new(false),
        outages: Outages::new(),
        requests: AtomicU64::new(0),
        runs: AtomicU64::new(0),
        saves: AtomicU64::new(0),
        refused: AtomicU64::new(0),
        late: AtomicU64::new(0),
        wrong: Mutex::new(Vec::new()),
    };
    let (mut samples, mut drained) = (Vec::new(), 0);
    std::thread::scope(|scope| {
        let soak = &soak;
        for number in 0..4 {
            scope.spawn(move || soak.ask_guests(number));
        }
        for number in 0..3 {
            scope.spawn(move || soak.use_sandboxes(number));
        }
        scope.spawn(|| soak.outages.measure_lateness(&soak.over));
        let begun = Instant::now();
        for round in 0.. {
            let calm = Instant::now();
            while calm.elapsed() < FAULT_INTERVAL && soak.goes_on() {
                std::thread::sleep(Duration::from_millis(200));
                watch(&fleet, &mut samples);
            }
            if begun.elapsed().as_secs() >= seconds || !soak.goes_on() {
                break;
            }
            // One host is never ended, so that its memory can be watched.
            let name = ["one", "three"][round % 2];
            let place = fleet.hosts.iter().position(|host| host.name == name).unwrap();
            if round % 3 == 2 {
                soak.killed.fetch_add(1, Ordering::SeqCst);
                fleet.hosts[place].kill();
            } else {
                drain(&fleet, name);
                fleet.hosts[place].wait();
                drained += 1;
            }
            drop(fleet.hosts.remove(place));
            fleet.add(name);
            *soak.addresses.write().unwrap() = fleet.hosts.iter().map(|host| host.addr).collect();
        }
        soak.over.store(true, Ordering::Relaxed);
    });
    let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
    // The first part is for warming up: pools fill, allocators find their size.
    let part = samples.len() / 4;
    let most = |part: &[u64]| part.iter().copied().max().unwrap_or(0);
    let (early, late) = (most(&samples[part..2 * part]), most(&samples[3 * part..]));
    println!(
        "soak: {seconds} s, {} requests, {} runs, {} saves, {} refused, {} late; {drained} hosts drained, {} killed; {early} KiB resident early, {late} late",
        count(&soak.requests),
        count(&soak.runs),
        count(&soak.saves),
        count(&soak.refused),
        count(&soak.late),
        count(&soak.killed),
    );
    let parts = samples.chunks(samples.len().div_ceil(SERIES).max(1));
    let series: Vec<String> = parts.map(|part| most(part).to_string()).collect();
    println!("soak: KiB resident, the most of each part of the run: {}", series.join(", "));
    let wrong = soak.wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(count(&soak.late) * 10 < count(&soak.requests), "most are answered in time");
    assert!(count(&soak.requests) > 100 && count(&soak.runs) > 20 && count(&soak.saves) > 0);
    assert!(drained > 0);
    // A run of seconds shows little; a leak of one page a request would show in minutes.
    assert!(late <= early + early / 4 + (16 << 10), "{samples:?}");
    let steady = fleet.hosts.iter().find(|host| host.name == "two").unwrap();
    for guest in ["fresh", "reset"] {
        let dropped =
            format!(r#"afresh_pool_dropped_total{{guest="{guest}",reason="quarantined"}}"#);
        assert_eq!(steady.metric(&dropped), 0);
        assert!(steady.metric(&format!(r#"afresh_pool_grown_total{{guest="{guest}"}}"#)) > 0);
    }
}
