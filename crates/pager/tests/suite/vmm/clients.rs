//! Several control clients that freeze and save one VM.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Mutex;

use afresh_pager::vmm::ControlClient;
use afresh_sys::PAGE_SIZE;
use afresh_sys::planted::{Bug, must_be_caught};
use serde_json::{Value, json};

use super::bench::{Bench, memory_of};
use super::client::{EARLY_BYTE, PAGES};
use super::freeze::{WRITTEN, memory_at};
use super::process::{EARLY_PAGES, VmmProcess};

const CLIENTS: u64 = 3;
/// Requests of a client in a round.
const REQUESTS: usize = 40;
/// Rounds, each with a new VM.
const ROUNDS: u64 = 3;

/// The parts of the reasons for which requests may be refused here.
const REASONS: [&str; 4] = ["is frozen", "is over", "is not frozen", "is detached"];

/// A moment of the guest: its round, and the first page that it had not written to in this round.
type Moment = (u64, usize);

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % limit
    }
}

/// A VM, and the moments of its freezes by watch.
struct Machine {
    control: PathBuf,
    store: PathBuf,
    /// Held by the client that pauses the guest.
    vmm: Mutex<VmmProcess>,
    moments: Mutex<HashMap<String, Moment>>,
}

impl Machine {
    /// The answer to a request; `None` if it was refused.
    fn request(&self, request: Value) -> Option<Value> {
        match ControlClient::connect(&self.control).unwrap().request(&request) {
            Ok(answer) => Some(answer),
            Err(error) => {
                let error = error.to_string();
                let known = REASONS.iter().any(|reason| error.contains(reason));
                assert!(known, "{request}: {error}");
                None
            }
        }
    }

    /// Sends a request while the guest is paused. Returns the answer, and what the guest had
    /// written.
    fn paused(&self, request: Value) -> (Option<Value>, Moment) {
        let mut vmm = self.vmm.lock().unwrap();
        let position = vmm.ask("pause").unwrap();
        let (round, page) = position.split_once(' ').unwrap();
        let answer = self.request(request);
        vmm.ask("resume").unwrap();
        (answer, (round.parse().unwrap(), page.parse().unwrap()))
    }

    fn check(&self, name: &str, (round, page): Moment) {
        let (saved, mut expected) = (memory_of(&self.store, name), memory_at(round, page));
        for early in EARLY_PAGES {
            // The first word is the round, once there was one.
            let first = if early < page || round > 1 { 8 } else { 0 };
            expected[early * PAGE_SIZE + first..(early + 1) * PAGE_SIZE].fill(EARLY_BYTE);
        }
        let torn = (0..PAGES).find(|page| {
            saved[page * PAGE_SIZE..][..PAGE_SIZE] != expected[page * PAGE_SIZE..][..PAGE_SIZE]
        });
        assert_eq!(torn, None, "a page is of another moment than round {round}, page {page}");
    }

    /// A client: does anything in any order, with its own freezes and with those of others.
    fn client(&self, seed: u64) {
        let mut random = Random(seed);
        let name = format!("saved-{seed}");
        let mut watch = Value::Null;
        let mut frozen = (Value::Null, (0, 0));
        for _ in 0..REQUESTS {
            match random.below(12) {
                0..2 => {
                    if let Some(prepared) =
                        self.request(json!({ "request": "prepare", "vm": "vm" }))
                    {
                        watch = prepared["watch"].clone();
                    }
                }
                2..5 => {
                    let named = if random.below(2) == 0 { &watch } else { &Value::Null };
                    let request = json!({ "request": "freeze", "vm": "vm", "watch": named });
                    if let (Some(answer), moment) = self.paused(request) {
                        let taken = answer["watch"].clone();
                        self.moments.lock().unwrap().insert(taken.to_string(), moment);
                        frozen = (taken, moment);
                    }
                }
                // Of this client or of another one.
                5..7 => {
                    let watches: Vec<String> =
                        self.moments.lock().unwrap().keys().cloned().collect();
                    if !watches.is_empty() {
                        let other: Value =
                            serde_json::from_str(&watches[random.below(watches.len())]).unwrap();
                        let other = if random.below(2) == 0 { &other } else { &frozen.0 };
                        if !other.is_null() {
                            self.request(json!({ "request": "thaw", "vm": "vm", "watch": other }));
                        }
                    }
                }
                7 => {
                    let request = json!({ "request": "snapshot", "vm": "vm", "to": name });
                    if let (Some(_), moment) = self.paused(request) {
                        self.check(&name, moment);
                    }
                }
                _ => {
                    let (watch, moment) = &frozen;
                    if watch.is_null() {
                        continue;
                    }
                    let request =
                        json!({ "request": "snapshot", "vm": "vm", "to": name, "watch": watch });
                    if self.request(request).is_some() {
                        self.check(&name, *moment);
                    }
                }
            }
        }
        // While the others continue. Refused while the memory is frozen.
        self.request(json!({ "request": "detach", "vm": "vm" }));
    }
}

#[test]
fn each_image_is_of_one_moment_whatever_several_clients_do() {
    for round in 0..ROUNDS {
        let bench = Bench::new();
        let how = json!({ "on_demand": round % 2 == 0, "window": 1 });
        // Pages that are in place before the handshake have not been filled when the guest writes
        // to them.
        let Some(mut vmm) = bench.vmm_by("vm", how, VmmProcess::start_early) else { return };
        vmm.ask(&format!("run {WRITTEN}")).unwrap();
        let machine = Machine {
            control: bench.path("control"),
            store: bench.path("store"),
            vmm: Mutex::new(vmm),
            moments: Mutex::default(),
        };
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let machine = &machine;
                scope.spawn(move || machine.client(1 + round * CLIENTS + client));
            }
        });
    }
}

#[test]
fn a_snapshot_of_a_freeze_that_is_over_is_caught() {
    let test = "vmm::clients::each_image_is_of_one_moment_whatever_several_clients_do";
    must_be_caught(&[Bug::Over], &[test]);
}

#[test]
fn a_request_reaches_the_watch_that_it_names_only() {
    let bench = Bench::new();
    let Some(mut vmm) = bench.vmm("vm", json!({})) else { return };
    let ask = |request: &str, watch: &Value| {
        let mut fields = json!({ "request": request, "vm": "vm", "watch": watch });
        if request == "snapshot" {
            fields["to"] = "next".into();
        }
        bench.client().request(&fields).map_err(|error| error.to_string())
    };
    let refused = |request: &str, watch: &Value, word: &str| {
        let error = ask(request, watch).unwrap_err();
        assert!(error.contains(word), "{request} {watch}: {error}");
    };
    let none = Value::Null;
    // Two clients share a preparation.
    let prepared = ask("prepare", &none).unwrap()["watch"].clone();
    assert!(prepared.is_u64());
    assert_eq!(ask("prepare", &none).unwrap()["watch"], prepared);
    assert_eq!(bench.stats("vm")["watch"], prepared);
    refused("snapshot", &prepared, "is not frozen");
    assert_eq!(ask("thaw", &prepared).unwrap()["thawed"], true);
    refused("freeze", &prepared, "given up with `thaw`");
    refused("snapshot", &prepared, "given up with `thaw`");
    refused("freeze", &json!(1_000_000), "is over");
    // A freeze is neither replaced nor joined, nor ended by the name of another.
    let frozen = ask("freeze", &none).unwrap()["watch"].clone();
    assert_ne!(frozen, prepared);
    assert_eq!(ask("thaw", &prepared).unwrap()["thawed"], false);
    for request in ["prepare", "freeze", "snapshot"] {
        refused(request, &none, &format!("is frozen, as watch {frozen}"));
    }
    refused("freeze", &frozen, "is frozen");
    let stats = bench.stats("vm");
    assert_eq!((&stats["frozen"], &stats["watch"]), (&json!(true), &frozen));
    vmm.ask("poke 3 7").unwrap();
    ask("snapshot", &frozen).unwrap();
    assert!(bench.memory("next") == super::bench::content());
    refused("snapshot", &frozen, "was saved");
    refused("freeze", &frozen, "was saved");
    // A preparation ends with the service of the pages.
    let prepared = ask("prepare", &none).unwrap()["watch"].clone();
    bench.request(json!({ "request": "detach", "vm": "vm" }));
    assert_eq!(bench.stats("vm")["watch"], none);
    refused("freeze", &prepared, "is detached");
    vmm.ask("poke 3 8").unwrap();
    ask("snapshot", &none).unwrap();
}
