//! Calls of one tenant, without and with a flood of another, at the default settings of the server.
//!
//! Both phases take turns in each round, so that other load of the host meets both. The clients of
//! the flood use the same processors as the server.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use serde_json::json;

use super::sandboxes::{KEY, Sandboxes, serve_scripts};
use super::server::{Connection, Server};
use super::{Files, TABLE};
use crate::row::{Options, Sink, summarise};

/// The name of the case.
pub(super) const CASE: &str = "fairness";
/// The phases: the strategies of its rows.
pub(super) const PHASES: [&str; 2] = ["alone", "beside a flood"];

/// The key of the tenant of the flood.
const FLOOD_KEY: &str = "key-of-the-flood";
/// Clients of the flood, each with a sandbox.
const FLOOD: usize = 32;
/// Calls of the measured tenant in a phase.
const CALLS: usize = 50;
/// Pauses of a loop that waits.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A call that computes for some milliseconds.
const SHORT_CALL: &str =
    "(() => { let n = 0; for (let i = 0; i < 200000; i++) n += i; return n })()";
/// A call of the flood, several times as long.
const LONG_CALL: &str =
    "(() => { let n = 0; for (let i = 0; i < 2000000; i++) n += i; return n })()";

/// Times of calls one after another, in microseconds.
fn calls(client: &mut Sandboxes, sandbox: &serde_json::Value) -> anyhow::Result<Vec<f64>> {
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let begun = Instant::now();
        client.run(sandbox, SHORT_CALL)?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

/// Ends the flood, also where the measured calls panic.
struct FloodEnd<'a>(&'a AtomicBool);

impl Drop for FloodEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The calls of a flood, and its time from the first to the last one. Its calls share the places,
/// so they end in groups, and a part of that time has none of their ends.
#[derive(Default)]
struct FloodCost {
    calls: usize,
    elapsed: Duration,
}

/// Runs `work` while the other tenant calls without a pause, and adds to `cost`.
fn beside_a_flood<R>(
    server: &Server,
    sandboxes: &[serde_json::Value],
    cost: &mut FloodCost,
    work: impl FnOnce() -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    let begun = Instant::now();
    let (ends, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let flood = sandboxes.iter().map(|sandbox| {
            let (ends, done) = (&ends, &done);
            scope.spawn(move || -> anyhow::Result<()> {
                let connection = Connection::to(server.addr)?;
                let mut client = Sandboxes { connection, key: FLOOD_KEY };
                while !ends.load(Ordering::Relaxed) {
                    client.run(sandbox, LONG_CALL)?;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        });
        let end = FloodEnd(&ends);
        let flood: Vec<_> = flood.collect();
        let is_over = || flood.iter().any(|client| client.is_finished());
        while done.load(Ordering::Relaxed) < FLOOD && !is_over() {
            std::thread::sleep(POLL_INTERVAL);
        }
        let result = work();
        drop(end);
        for client in flood {
            match client.join() {
                Ok(ended) => ended?,
                Err(_) => bail!("a client of the flood panicked"),
            }
        }
        cost.calls += done.load(Ordering::Relaxed);
        cost.elapsed += begun.elapsed();
        result
    })
}

/// The two rows: medians and 99th percentiles of the tenant, and their ratios.
pub(super) fn fairness(
    files: &Files,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let keys = format!("bench {KEY}\nflood {FLOOD_KEY}\n");
    let server = serve_scripts(files, dir.path(), &keys)?;
    let mut client = Sandboxes::of(&server)?;
    let mut flooding = Sandboxes { connection: Connection::to(server.addr)?, key: FLOOD_KEY };
    let sandbox = client.create("script")?;
    let sandboxes = (0..FLOOD).map(|_| flooding.create("script"));
    let sandboxes = sandboxes.collect::<anyhow::Result<Vec<_>>>()?;
    calls(&mut client, &sandbox)?;
    let (mut alone, mut beside, mut flood) = (Vec::new(), Vec::new(), FloodCost::default());
    for _ in 0..options.rounds {
        alone.extend(calls(&mut client, &sandbox)?);
        let work = || calls(&mut client, &sandbox);
        beside.extend(beside_a_flood(&server, &sandboxes, &mut flood, work)?);
    }
    let [alone, mut beside] = [(PHASES[0], alone), (PHASES[1], beside)]
        .map(|(phase, times)| summarise(TABLE, CASE, phase.to_owned(), 1, times));
    beside.more.push(("times_the_median_alone", json!(beside.median / alone.median)));
    beside.more.push(("times_the_p99_alone", json!(beside.p99 / alone.p99)));
    let rate = flood.calls as f64 / flood.elapsed.as_secs_f64();
    beside.more.push(("flood_calls_per_second", json!(rate)));
    for row in [alone, beside] {
        if options.wants(CASE, &row.strategy) {
            sink(&row);
        }
    }
    Ok(())
}
