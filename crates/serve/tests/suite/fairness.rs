//! Tenants share the processors.
//!
//! The delays of calls of one tenant while another floods are printed, and no delay is asserted.
//! `AFRESH_FAIRNESS_CALLS=300` makes the measurement of `docs/deployment.md`: `cargo test --release
//! -p afresh-serve --test suite -- fairness --nocapture`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Running, built, run, scratch, serve};
use crate::sandbox::{Client, sandboxes, with};
use serde_json::Value;

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

/// A flood of one tenant, until `ends`.
async fn flood(server: &Running, ends: &Arc<AtomicBool>, done: &Arc<AtomicU64>) {
    let flood = Arc::new(Client::of(server));
    for _ in 0..FLOOD {
        let sandbox = flood.create().await;
        let (flood, ends, done) = (flood.clone(), ends.clone(), done.clone());
        tokio::spawn(async move {
            while !ends.load(Ordering::Relaxed) {
                flood.value(&sandbox, LONG_CALL).await;
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
}

#[test]
fn a_flood_of_one_tenant_leaves_processors_to_another() {
    let Some(script) = built("quickjs.wasm") else { return };
    let given = std::env::var("AFRESH_FAIRNESS_CALLS").ok();
    let calls = given.map_or(10, |calls| calls.parse().expect("a number of calls"));
    for shares in [true, false] {
        let dir = scratch();
        run(async {
            let mut sandboxes = sandboxes(dir.path(), &script);
            if !shares {
                sandboxes.max_computing_calls = 1000;
            }
            let server = serve(with(sandboxes)).await;
            let other = Client::with_key(&server, "key-of-other");
            let sandbox = other.create().await;
            let alone = delays(&other, &sandbox, calls).await;
            let (ends, done) = (Arc::default(), Arc::default());
            flood(&server, &ends, &done).await;
            let beside = delays(&other, &sandbox, calls).await;
            ends.store(true, Ordering::Relaxed);
            let flooded = done.load(Ordering::Relaxed);
            println!(
                "bounded {shares}: p50 and p99 alone {alone:?}, beside {beside:?}, flood {flooded} calls"
            );
            while Arc::strong_count(&ends) > 1 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            server.end().await;
        });
    }
}
