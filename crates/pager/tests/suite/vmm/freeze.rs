//! Memory that is frozen and saved while its guest runs.

use std::time::{Duration, Instant};

use afresh_sys::PAGE_SIZE;
use afresh_sys::inject::{Plan, with};
use afresh_sys::planted::{Bug, must_be_caught};
use serde_json::{Value, json};

use super::bench::{Bench, TEST_TIMEOUT, content};
use super::client::{EARLY_BYTE, PAGES};
use super::process::{EARLY_PAGES, VmmProcess};

/// Pages that the guest writes to.
pub(super) const WRITTEN: usize = 250;

/// The memory of a guest that has written `round` to its pages before `page`, and the round before
/// to the others.
pub(super) fn memory_at(round: u64, page: usize) -> Vec<u8> {
    let mut memory = content();
    for number in 0..WRITTEN {
        let written = if number < page { round } else { round - 1 };
        if written > 0 {
            memory[number * PAGE_SIZE..][..8].copy_from_slice(&written.to_ne_bytes());
        }
    }
    memory
}

/// Saves the memory that the answer to a `freeze` stands for as `next`.
fn save(bench: &Bench, frozen: &Value) -> Result<Value, String> {
    let request = json!({
        "request": "snapshot", "vm": "vm", "to": "next", "watch": frozen["watch"],
    });
    bench.client().request(&request).map_err(|error| error.to_string())
}

#[test]
fn an_image_of_a_running_guest_is_of_one_moment() {
    let bench = Bench::new();
    let Some(mut vmm) = bench.vmm("vm", json!({ "on_demand": true, "window": 1 })) else { return };
    vmm.ask("discard 290 2").unwrap();
    vmm.ask(&format!("run {WRITTEN}")).unwrap();
    for attempt in 0..6 {
        if attempt % 2 == 0 {
            bench.request(json!({ "request": "prepare", "vm": "vm" }));
        }
        let position = vmm.ask("pause").unwrap();
        let (round, page) = position.split_once(' ').unwrap();
        let frozen = bench.request(json!({ "request": "freeze", "vm": "vm" }));
        let faults = |stats: &Value| stats["faults"].as_u64().unwrap();
        let before = faults(&bench.stats("vm"));
        vmm.ask("resume").unwrap();
        // Missing at the freeze, and then written to or discarded.
        vmm.ask(&format!("poke {} 9", 260 + attempt)).unwrap();
        vmm.ask(&format!("discard {} 1", 280 + attempt)).unwrap();
        // The guest writes to pages before they are saved, and after that.
        bench.until("vm", |stats| faults(stats) > before + 20);
        let again = bench.refused(json!({ "request": "freeze", "vm": "vm" }));
        assert!(again.contains("is frozen"), "{again}");
        save(&bench, &frozen).unwrap();
        let mut expected = memory_at(round.parse().unwrap(), page.parse().unwrap());
        expected[290 * PAGE_SIZE..292 * PAGE_SIZE].fill(0);
        for earlier in 0..attempt {
            expected[(260 + earlier) * PAGE_SIZE..][..99].fill(9);
            expected[(280 + earlier) * PAGE_SIZE..][..PAGE_SIZE].fill(0);
        }
        let saved = bench.memory("next");
        let torn = (0..PAGES).find(|page| {
            saved[page * PAGE_SIZE..][..PAGE_SIZE] != expected[page * PAGE_SIZE..][..PAGE_SIZE]
        });
        assert_eq!(torn, None, "attempt {attempt}: a page is of another moment than {position}");
        let stats = bench.stats("vm");
        assert_eq!((&stats["frozen"], &stats["copied_bytes"]), (&json!(false), &json!(0)));
    }
}

#[test]
fn a_page_that_is_opened_before_it_is_copied_is_caught() {
    let test = "vmm::freeze::an_image_of_a_running_guest_is_of_one_moment";
    must_be_caught(&[Bug::Torn], &[test]);
}

#[test]
fn a_frozen_image_that_has_lost_a_page_is_not_saved() {
    let bench = Bench::new();
    let Some(mut vmm) = bench.vmm("vm", json!({})) else { return };
    bench.until("vm", |stats| stats["state"] == "filled");
    let frozen = bench.request(json!({ "request": "freeze", "vm": "vm" }));
    let detached = bench.refused(json!({ "request": "detach", "vm": "vm" }));
    assert!(detached.contains("is frozen"), "{detached}");
    vmm.ask("discard 20 1").unwrap();
    let lost = save(&bench, &frozen).unwrap_err();
    assert!(lost.contains("discarded a page of its frozen memory"), "{lost}");
    // Given up, so that the next one can be taken.
    let lost = save(&bench, &frozen).unwrap_err();
    assert!(lost.contains("is over") && lost.contains("discarded a page"), "{lost}");
    let frozen = bench.request(json!({ "request": "freeze", "vm": "vm" }));
    vmm.ask("poke 21 7").unwrap();
    save(&bench, &frozen).unwrap();
    let mut expected = content();
    expected[20 * PAGE_SIZE..21 * PAGE_SIZE].fill(0);
    assert!(bench.memory("next") == expected);
    bench.request(json!({ "request": "detach", "vm": "vm" }));
    vmm.ask("poke 22 7").unwrap();
}

#[test]
fn copies_of_a_frozen_image_are_charged_to_the_budget() {
    let bench = Bench::new();
    let mut endpoint = afresh_pager::vmm::EndpointOptions::new("vm", "base", bench.path("vm"));
    // Room for the states of the pages, the record of write protection, four copies, and lists of
    // few ranges.
    let record = PAGES + PAGES.div_ceil(8);
    endpoint.budget = Some(PAGES * 4 + record + 4 * (PAGE_SIZE + 64) + 1024);
    let source = bench.source("base");
    bench.host.open_endpoint(endpoint, source).unwrap();
    let Some(mut vmm) = super::process::VmmProcess::start(&bench.path("vm")) else { return };
    let started = Instant::now();
    while bench.host.vm("vm").is_err() {
        assert!(started.elapsed() < TEST_TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
    bench.until("vm", |stats| stats["state"] == "filled");
    let frozen = bench.request(json!({ "request": "freeze", "vm": "vm" }));
    for page in 0..4 {
        vmm.ask(&format!("poke {page} 7")).unwrap();
    }
    assert_eq!(bench.stats("vm")["copied_bytes"], 4 * PAGE_SIZE);
    save(&bench, &frozen).unwrap();
    assert!(bench.memory("next") == content());
    let frozen = bench.request(json!({ "request": "freeze", "vm": "vm" }));
    for page in 0..5 {
        vmm.ask(&format!("poke {page} 8")).unwrap();
    }
    let error = save(&bench, &frozen).unwrap_err();
    assert!(error.contains("raise the budget of the endpoint"), "{error}");
    assert_eq!(bench.stats("vm")["frozen"], false);
    // Nothing else is saved in its place.
    let error = save(&bench, &frozen).unwrap_err();
    assert!(error.contains("raise the budget of the endpoint"), "{error}");
    assert_eq!(vmm.peek(299), super::bench::byte_of(299));
    assert_eq!(bench.host.endpoints()[0].used, PAGES * 4);
}

#[test]
fn a_vmm_whose_record_exceeds_the_budget_is_not_protected() {
    let bench = Bench::new();
    let mut endpoint = afresh_pager::vmm::EndpointOptions::new("vm", "base", bench.path("vm"));
    endpoint.budget = Some(PAGES * 4 + PAGES);
    bench.host.open_endpoint(endpoint, bench.source("base")).unwrap();
    let Some(mut vmm) = super::process::VmmProcess::start(&bench.path("vm")) else { return };
    assert_eq!(vmm.peek(0), super::bench::byte_of(0));
    let error = bench.refused(json!({ "request": "prepare", "vm": "vm" }));
    assert!(error.contains("raise the budget of the endpoint"), "{error}");
    assert_eq!(bench.stats("vm")["watch"], serde_json::Value::Null);
}

/// Content that is in place before the handshake is the memory of the guest, as a snapshot of a
/// paused one saves it.
#[test]
fn pages_from_before_the_handshake_are_frozen_as_they_are() {
    let bench = Bench::new();
    let on_demand = json!({ "on_demand": true, "window": 1 });
    let Some(mut vmm) = bench.vmm_by("vm", on_demand, VmmProcess::start_early) else { return };
    bench.request(json!({ "request": "prepare", "vm": "vm" }));
    vmm.ask("poke 8 9").unwrap();
    let frozen = bench.request(json!({ "request": "freeze", "vm": "vm" }));
    vmm.ask("poke 8 10").unwrap();
    vmm.ask("poke 180 10").unwrap();
    save(&bench, &frozen).unwrap();
    let mut expected = content();
    for page in EARLY_PAGES {
        expected[page * PAGE_SIZE..][..PAGE_SIZE].fill(EARLY_BYTE);
    }
    expected[8 * PAGE_SIZE..][..99].fill(9);
    let saved = bench.memory("next");
    let wrong = (0..PAGES).find(|page| {
        saved[page * PAGE_SIZE..][..PAGE_SIZE] != expected[page * PAGE_SIZE..][..PAGE_SIZE]
    });
    assert_eq!(wrong, None, "a page is not as it was at the freeze");
}

#[test]
fn a_prepare_that_fails_lifts_its_write_protection() {
    let bench = Bench::new();
    let Some(mut vmm) = bench.vmm("vm", json!({})) else { return };
    bench.until("vm", |stats| stats["state"] == "filled");
    let served = bench.host.vm("vm").unwrap();
    // The first of the two mappings is protected then.
    let call = Some(afresh_sys::Call::UffdWriteProtect);
    let plan = Plan { call, after: 1, times: 1, errno: libc::ENOMEM };
    let (prepared, fired) = with(plan, || served.prepare());
    assert!(prepared.is_err() && fired == 1, "{prepared:?}");
    let before = bench.stats("vm")["faults"].clone();
    vmm.ask("poke 5 7").unwrap();
    assert_eq!(bench.stats("vm")["faults"], before, "the page is still protected");
    // The same for a freeze that begins with it.
    let (frozen, fired) = with(plan, || served.freeze(None));
    assert!(frozen.is_err() && fired == 1, "{frozen:?}");
    vmm.ask("poke 6 7").unwrap();
    assert_eq!(bench.stats("vm")["faults"], before, "the page is still protected");
}
