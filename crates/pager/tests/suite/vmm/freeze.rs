//! Memory that is frozen and saved while its guest runs.

use std::time::{Duration, Instant};

use afresh_sys::PAGE_SIZE;
use afresh_sys::planted::{Bug, must_be_caught};
use serde_json::json;

use super::bench::{Bench, TEST_TIMEOUT, content};
use super::client::PAGES;

/// Pages that the guest writes to.
const WRITTEN: usize = 250;

/// The memory of a guest that has written `round` to its pages before `page`, and the round before to the others.
fn memory_at(round: u64, page: usize) -> Vec<u8> {
    let mut memory = content();
    for number in 0..WRITTEN {
        let written = if number < page { round } else { round - 1 };
        if written > 0 {
            memory[number * PAGE_SIZE..][..8].copy_from_slice(&written.to_ne_bytes());
        }
    }
    memory
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
        bench.request(json!({ "request": "freeze", "vm": "vm" }));
        vmm.ask("resume").unwrap();
        // Missing at the freeze, and then written to or discarded.
        vmm.ask(&format!("poke {} 9", 260 + attempt)).unwrap();
        vmm.ask(&format!("discard {} 1", 280 + attempt)).unwrap();
        // The guest writes to pages before they are saved, and after that.
        let faults = |stats: &serde_json::Value| stats["faults"].as_u64().unwrap();
        let before = faults(&bench.stats("vm"));
        bench.until("vm", |stats| faults(stats) > before + 20);
        let again = bench.refused(json!({ "request": "freeze", "vm": "vm" }));
        assert!(again.contains("is frozen"), "{again}");
        bench.request(json!({ "request": "snapshot", "vm": "vm", "to": "next" }));
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
    bench.request(json!({ "request": "freeze", "vm": "vm" }));
    let detached = bench.refused(json!({ "request": "detach", "vm": "vm" }));
    assert!(detached.contains("is frozen"), "{detached}");
    vmm.ask("discard 20 1").unwrap();
    let lost = bench.refused(json!({ "request": "snapshot", "vm": "vm", "to": "next" }));
    assert!(lost.contains("discarded a page of its frozen memory"), "{lost}");
    // Given up, so that the next one can be taken.
    bench.request(json!({ "request": "thaw", "vm": "vm" }));
    bench.request(json!({ "request": "freeze", "vm": "vm" }));
    vmm.ask("poke 21 7").unwrap();
    bench.request(json!({ "request": "snapshot", "vm": "vm", "to": "next" }));
    let mut expected = content();
    expected[20 * PAGE_SIZE..21 * PAGE_SIZE].fill(0);
    assert!(bench.memory("next") == expected);
    bench.request(json!({ "request": "detach", "vm": "vm" }));
    vmm.ask("poke 22 7").unwrap();
}

#[test]
fn copies_of_a_frozen_image_are_charged_to_the_budget() {
    let bench = Bench::new();
    let mut door = afresh_pager::vmm::DoorOptions::new("vm", "base", bench.path("vm"));
    // Room for the states of the pages, and for four copies.
    door.budget = Some(PAGES * 4 + 4 * (PAGE_SIZE + 64));
    let source = bench.source("base");
    bench.host.open_door(door, source).unwrap();
    let Some(mut vmm) = super::process::VmmProcess::start(&bench.path("vm")) else { return };
    let started = Instant::now();
    while bench.host.vm("vm").is_err() {
        assert!(started.elapsed() < TEST_TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
    bench.until("vm", |stats| stats["state"] == "filled");
    bench.request(json!({ "request": "freeze", "vm": "vm" }));
    for page in 0..4 {
        vmm.ask(&format!("poke {page} 7")).unwrap();
    }
    assert_eq!(bench.stats("vm")["copied_bytes"], 4 * PAGE_SIZE);
    bench.request(json!({ "request": "snapshot", "vm": "vm", "to": "next" }));
    assert!(bench.memory("next") == content());
    bench.request(json!({ "request": "freeze", "vm": "vm" }));
    for page in 0..5 {
        vmm.ask(&format!("poke {page} 8")).unwrap();
    }
    let error = bench.refused(json!({ "request": "snapshot", "vm": "vm", "to": "next" }));
    assert!(error.contains("raise the budget of the door"), "{error}");
    assert_eq!(bench.stats("vm")["frozen"], false);
    assert_eq!(vmm.peek(299), super::bench::byte_of(299));
}
