//! `afresh-bench demo`: shows on a JavaScript engine that a reset leaves no trace, and its cost.
//!
//! One call plants a secret and pollutes the prototype of every object. The next call starts from
//! the same warm heap without a trace of it. The cost is in microseconds per request, compared with
//! wasmtime's best configurations and with a full copy of the memory.

use std::path::PathBuf;
use std::process::ExitCode;

use afresh::memory::Strategy;
use afresh::wasm::{Engine, EngineConfig, Guest, GuestOptions, Mode, Warm, WarmUp};
use afresh_bench::{Options, Row, js};
use anyhow::Context;
use clap::Args;
use serde_json::json;

use crate::output::{Format, say};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Path of the JavaScript guest.
    #[arg(long, default_value = "target/guests/js.wasm")]
    js: PathBuf,
}

const PLANT: &[u8] = br#"{"op":"plant","secret":"canary-7f3a"}"#;
const PROBE: &[u8] = br#"{"op":"probe"}"#;
const RANDOM: &[u8] = br#"{"op":"random","count":2}"#;

fn ask(warm: &Warm, input: &[u8]) -> anyhow::Result<String> {
    let entry = warm.bytes_entry("handle")?;
    let answer = warm.lease()?.call_bytes(&entry, input)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Shortens an answer for one line.
fn brief(text: &str) -> String {
    let mut text: String = text.chars().take(110).collect();
    if text.len() >= 110 {
        text.push('…');
    }
    text
}

pub(crate) fn run(arguments: &Arguments, format: Format) -> anyhow::Result<ExitCode> {
    let wasm = std::fs::read(&arguments.js).with_context(|| {
        format!("cannot read {}; `cargo xtask guests --only js` builds it", arguments.js.display())
    })?;
    let text = format == Format::Text;
    let engine = Engine::new(EngineConfig { timeouts: false, ..EngineConfig::default() })?;
    let load = |mode, strategy| -> anyhow::Result<Warm> {
        let options = GuestOptions { mode, strategy, ..GuestOptions::default() };
        let guest = Guest::with_options(&engine, &wasm, options)?;
        Ok(guest.warm(WarmUp::new().call("warm", &[]))?)
    };
    eprintln!("compiling QuickJS and building its warm heap of 200,000 objects");
    let warm = load(Mode::Reset, Strategy::Auto)?;
    let report = warm.report();
    let before = ask(&warm, PROBE)?;
    let planted = {
        let entry = warm.bytes_entry("handle")?;
        let mut lease = warm.lease()?;
        let planted = lease.call_bytes(&entry, PLANT)?;
        let seen = lease.call_bytes(&entry, PROBE)?;
        let changed = lease.differences()?.0;
        (
            String::from_utf8_lossy(&planted).into_owned(),
            String::from_utf8_lossy(&seen).into_owned(),
            changed,
        )
    };
    let differences = warm.differences()?;
    let after = ask(&warm, PROBE)?;
    let pristine = differences == (0, 0) && after == before && planted.1 != before;
    let (one, other) = (ask(&warm, RANDOM)?, ask(&warm, RANDOM)?);
    if text {
        say!(
            "QuickJS, warmed in {:.2} s: {:.1} MiB of memory, {:.1} MiB stored in the image",
            report.warm_up.as_secs_f64(),
            report.memory_bytes as f64 / f64::from(1 << 20),
            report.image_bytes as f64 / f64::from(1 << 20)
        )?;
        say!("strategy: {}\n", report.strategy)?;
        say!("call 1, probe:        {}", brief(&before))?;
        say!("call 2, plant:        {}", brief(&planted.0))?;
        say!("        then probe:   {}", brief(&planted.1))?;
        say!("        it changed {} bytes", planted.2)?;
        say!("call 3, probe:        {}", brief(&after))?;
        say!(
            "        {} bytes differ, {} globals and tables differ\n",
            differences.0,
            differences.1
        )?;
        say!("two clones' Math.random(): {} / {}\n", brief(&one), brief(&other))?;
    }
    anyhow::ensure!(one != other, "two clones produced the same random numbers");

    // The cost, in one contest.
    let full_copy = load(Mode::Reset, Strategy::FullCopy)?;
    let entry = full_copy.bytes_entry("handle")?;
    let options = Options { rounds: 9, ..Options::quick() };
    let mut rows: Vec<Row> = Vec::new();
    js::request(&wasm, "js/request", js::REQUEST, &options, &mut |row| rows.push(row.clone()))?;
    let copying = vec![afresh_bench::Contestant::new("reset/full-copy", || {
        full_copy.lease()?.call_bytes(&entry, js::REQUEST)?;
        Ok(())
    })];
    afresh_bench::contest("wasm", "js/request", &options, copying, &mut |row| {
        rows.push(row.clone());
    })?;
    let ours = rows.iter().find(|r| r.strategy == "reset").map_or(f64::NAN, |r| r.median);
    let dirty = {
        let entry = warm.bytes_entry("handle")?;
        let mut lease = warm.lease()?;
        lease.call_bytes(&entry, js::REQUEST)?;
        drop(lease);
        warm.pool_stats().resident_bytes / afresh::memory::PAGE_SIZE
    };
    if text {
        say!("requests, each from the warm heap; {dirty} pages in the write set")?;
        say!("{:<30} {:>12} {:>9}", "", "us/request", "times")?;
        for row in &rows {
            say!("{:<30} {:>12.1} {:>9.1}", row.strategy, row.median, row.median / ours)?;
        }
    } else {
        for row in &rows {
            say!("{}", row.json())?;
        }
        say!(
            "{}",
            json!({
                "pristine": pristine, "bytes_differ": differences.0, "items_differ": differences.1,
                "bytes_changed": planted.2, "write_set_pages": dirty,
            })
        )?;
    }
    anyhow::ensure!(
        pristine,
        "the call after the planted secret did not start from the warm state"
    );
    Ok(ExitCode::SUCCESS)
}
