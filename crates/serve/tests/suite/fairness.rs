//! Tenants share the processors.
//!
//! A flood of one tenant gets no more CPU time than another tenant whose calls compute all the
//! while. Delays are printed, and none is asserted. `AFRESH_FAIRNESS_CALLS=100` makes the
//! measurement of `docs/deployment.md`: `cargo test -p afresh-serve --all-features --test suite --
//! fairness --nocapture`.

use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Running, built, run, scratch, serve};
use crate::sandbox::{Client, sandboxes, with};
use reqwest::Method;
use serde_json::{Value, json};

/// Clients of the flood.
const FLOOD: usize = 32;

/// A call that computes for some milliseconds.
const SHORT_CALL: &str =
    "(() => { let n = 0; for (let i = 0; i < 200000; i++) n += i; return n })()";
/// A call of the flood, several times as long.
const LONG_CALL: &str =
    "(() => { let n = 0; for (let i = 0; i < 2000000; i++) n += i; return n })()";

/// The median and the 99th percentile of calls one after another.
async fn delays(client: &Client, sandbox: &Value, calls: usize) -> [Duration; 2] {
    let mut all = Vec::with_capacity(calls);
    for _ in 0..calls {
        let began = Instant::now();
        assert_eq!(client.value(sandbox, SHORT_CALL).await, "19999900000");
        all.push(began.elapsed());
    }
    all.sort();
    [all[calls / 2], all[(calls * 99 / 100).min(calls - 1)]]
}

/// A flood of calls of one tenant, until `ends`.
async fn flood(
    server: &Running,
    call: &'static str,
    ends: &Arc<AtomicBool>,
    done: &Arc<AtomicU64>,
) {
    let flood = Arc::new(Client::of(server));
    for _ in 0..FLOOD {
        let sandbox = flood.create().await;
        let (flood, ends, done) = (flood.clone(), ends.clone(), done.clone());
        tokio::spawn(async move {
            while !ends.load(Ordering::Relaxed) {
                flood.value(&sandbox, call).await;
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
}

/// Calls of the flood in a second, in whole rounds of its clients.
async fn rate(done: &AtomicU64) -> f64 {
    let count = || done.load(Ordering::Relaxed);
    let until = async |calls: u64| {
        while count() < calls {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    until(FLOOD as u64).await;
    let began = Instant::now();
    until(4 * FLOOD as u64).await;
    3.0 * FLOOD as f64 / began.elapsed().as_secs_f64()
}

/// Places of the test of shares. Half of them are for each of two tenants.
const PLACES: usize = 4;

/// CPU seconds of a tenant.
async fn cpu_seconds(client: &Client) -> f64 {
    let (status, usage) = client.ask(Method::GET, "/usage", json!({})).await;
    assert_eq!(status, 200, "{usage}");
    usage["totals"]["cpuSeconds"].as_f64().unwrap()
}

#[test]
fn a_flood_gets_no_more_cpu_time_than_another_tenant_that_computes() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.max_computing_calls = PLACES;
        let server = serve(with(sandboxes)).await;
        let (flooding, other) = (Client::of(&server), Client::with_key(&server, "key-of-other"));
        let other = Arc::new(other);
        let mut own = Vec::new();
        for _ in 0..PLACES {
            own.push(other.create().await);
        }
        let (ends, done): (_, Arc<AtomicU64>) = (Arc::default(), Arc::default());
        // Short ones, since their CPU time counts when they end.
        flood(&server, SHORT_CALL, &ends, &done).await;
        while done.load(Ordering::Relaxed) < FLOOD as u64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let before = (cpu_seconds(&flooding).await, cpu_seconds(&other).await);
        let calls = own.into_iter().map(|sandbox| {
            let other = other.clone();
            tokio::spawn(async move {
                for _ in 0..4 {
                    other.value(&sandbox, LONG_CALL).await;
                }
            })
        });
        for call in calls.collect::<Vec<_>>() {
            call.await.unwrap();
        }
        let after = (cpu_seconds(&flooding).await, cpu_seconds(&other).await);
        ends.store(true, Ordering::Relaxed);
        let (flooded, computed) = (after.0 - before.0, after.1 - before.1);
        println!("CPU seconds: the flood {flooded:.2}, the other tenant {computed:.2}");
        // By turns without regard to tenants it would be eight times as much.
        assert!(flooded < 3.0 * computed, "{flooded} s beside {computed} s");
        while Arc::strong_count(&ends) > 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        server.end().await;
    });
}

#[test]
fn a_flood_of_one_tenant_leaves_processors_to_another() {
    let Some(script) = built("quickjs.wasm") else { return };
    let given = std::env::var("AFRESH_FAIRNESS_CALLS").ok();
    let measures = given.is_some();
    let calls = given.map_or(10, |calls| calls.parse().expect("a number of calls"));
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    // The default, the number that fills processors whose calls wait, and no limit.
    for bound in [None, Some(2 * processors - 1), Some(1000)] {
        let dir = scratch();
        run(async {
            let mut sandboxes = sandboxes(dir.path(), &script);
            let places = bound.unwrap_or(sandboxes.max_computing_calls);
            sandboxes.max_computing_calls = places;
            let server = serve(with(sandboxes)).await;
            let other = Client::with_key(&server, "key-of-other");
            let sandbox = other.create().await;
            let alone = delays(&other, &sandbox, calls).await;
            let (ends, done): (_, Arc<AtomicU64>) = (Arc::default(), Arc::default());
            flood(&server, LONG_CALL, &ends, &done).await;
            let rate = match measures {
                true => rate(&done).await,
                false => 0.0,
            };
            let beside = delays(&other, &sandbox, calls).await;
            ends.store(true, Ordering::Relaxed);
            let flooded = done.load(Ordering::Relaxed);
            println!(
                "{places} places: p50 and p99 alone {alone:?}, beside {beside:?}, flood {flooded} calls, {rate:.1} a second alone"
            );
            while Arc::strong_count(&ends) > 1 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            server.end().await;
        });
    }
}
