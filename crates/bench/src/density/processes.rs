//! Processes that each open the same snapshot of the JavaScript guest and answer once: with
//! separate images, and with the memory of an image server.
//!
//! The server is a thread of the benchmark, which maps no image. So all memory of images is in the
//! sum of the processes.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use afresh_store::Store;
use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::TABLE;
use super::usage::Usage;
use crate::js::REQUEST;
use crate::start;
use crate::{Options, Row, Sink};

/// Time for the pages of an image to arrive.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(120);

/// The work of such a process: opens the snapshot, answers, prints the microseconds to the answer,
/// and waits for the end of its input.
///
/// # Errors
/// Any of opening and answering.
pub fn process(dir: &Path, socket: Option<&Path>) -> Result<()> {
    let started = Instant::now();
    let snapshot = Store::open(dir.join("store"))?.load(start::NAME)?;
    let cache = dir.join("cache");
    let first = match socket {
        Some(socket) => start::shared(&cache, snapshot, socket, REQUEST)?,
        None => start::lazily(&cache, snapshot, REQUEST)?,
    };
    let took = first.at - started;
    crate::js::answered(&first.bytes)?;
    // The rest of the image arrives behind the first answer.
    first
        .frozen
        .as_ref()
        .context("the guest is not out of a snapshot")?
        .memory()
        .wait(ARRIVAL_TIMEOUT)?;
    println!("{}", took.as_micros());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// A process, and the microseconds to its answer.
fn spawn(dir: &Path, socket: Option<&Path>) -> Result<(Child, f64)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("density-process").arg(dir).args(socket);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    let output = child.stdout.take().context("no pipe")?;
    BufReader::new(output).read_line(&mut line)?;
    let took = line.trim().parse().with_context(|| format!("a process answers {line:?}"))?;
    Ok((child, took))
}

/// The two cases, one process after the other of each.
pub(super) fn all(js: &[u8], count: usize, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let names = ["own", "shared"].map(|strategy| ("js-processes", strategy));
    if !names.iter().any(|(case, strategy)| options.wants(case, strategy)) {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let store = Store::create(dir.path().join("store"))?;
    start::prepare(js, &dir.path().join("cache"), &store, REQUEST)?;
    let socket = dir.path().join("images.sock");
    start::serve_image(&socket, &store.load(start::NAME)?)?;
    for names in names.into_iter().filter(|(case, strategy)| options.wants(case, strategy)) {
        let socket = (names.1 == "shared").then_some(&*socket);
        let mut processes = Vec::new();
        let measured = measure(dir.path(), socket, count, &mut processes);
        for child in &mut processes {
            // The end of its input ends it.
            drop(child.stdin.take());
            child.wait()?;
        }
        let (memory, times) = measured?;
        report(names, count, "memory", "KiB/process", memory, sink);
        report(names, count, "start", "us", times, sink);
    }
    Ok(())
}

/// The proportional memory of each of `count` processes, and their times to the answer.
fn measure(
    dir: &Path,
    socket: Option<&Path>,
    count: usize,
    processes: &mut Vec<Child>,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let mut times = Vec::new();
    for _ in 0..count {
        let (child, took) = spawn(dir, socket)?;
        processes.push(child);
        times.push(took);
    }
    let memory = processes.iter().map(|child| Ok(Usage::of(child.id())?.pss_kib as f64));
    let memory: Vec<f64> = memory.collect::<Result<_>>()?;
    ensure!(!memory.is_empty(), "no process was asked for");
    Ok((memory, times))
}

fn report(
    (case, strategy): (&str, &str),
    count: usize,
    part: &str,
    unit: &'static str,
    samples: Vec<f64>,
    sink: &mut Sink<'_>,
) {
    let [median, min, p99] = crate::row::spread(samples.clone());
    sink(&Row {
        table: TABLE,
        case: format!("{case}/{part}"),
        strategy: strategy.to_owned(),
        threads: 1,
        median,
        min,
        p99,
        unit,
        samples,
        more: vec![("processes", json!(count))],
    });
}
