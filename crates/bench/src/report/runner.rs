//! Runs the tables one after the other, each in a separate process.
//!
//! A table that fails, or that exceeds several times its expected duration, is ended with its
//! children and marked; the others run. `report.json` is written after each table, so an
//! interrupted run keeps its results.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process_group};

use super::{FORMAT, Machine, Measurement, Report, TableResult};

/// What to run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Rough versions of all tables.
    pub quick: bool,
    /// Only these tables; all if empty.
    pub only: Vec<String>,
    /// Command of afresh for the table `serve`.
    pub afresh: Option<PathBuf>,
}

/// A table and its expected duration in seconds on two idle cores.
struct Plan {
    name: &'static str,
    quick: u64,
    full: u64,
}

/// All tables that a report runs. `docs/benchmarks.md` describes each.
const PLANS: [Plan; 15] = [
    Plan { name: "wasm", quick: 30, full: 150 },
    Plan { name: "session", quick: 25, full: 90 },
    Plan { name: "linux", quick: 22, full: 110 },
    Plan { name: "gvisor", quick: 15, full: 50 },
    Plan { name: "eryx", quick: 10, full: 30 },
    Plan { name: "fuzz", quick: 20, full: 120 },
    Plan { name: "vm", quick: 15, full: 70 },
    Plan { name: "serve", quick: 25, full: 100 },
    Plan { name: "start", quick: 10, full: 45 },
    Plan { name: "restore", quick: 25, full: 110 },
    Plan { name: "save", quick: 10, full: 70 },
    Plan { name: "density", quick: 8, full: 70 },
    Plan { name: "arena", quick: 2, full: 15 },
    Plan { name: "fault", quick: 18, full: 110 },
    Plan { name: "fleet", quick: 5, full: 60 },
];

/// A table is ended after this multiple of its expected duration, and at least
/// [`MIN_TABLE_TIMEOUT`].
const TIMEOUT_FACTOR: u32 = 5;
const MIN_TABLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Messages that are kept of one table.
const MAX_NOTES: usize = 200;
/// Longest line of a row or message.
const MAX_LINE: u64 = 1 << 20;

impl Plan {
    fn expected(&self, quick: bool) -> Duration {
        Duration::from_secs(if quick { self.quick } else { self.full })
    }
}

/// Runs the tables of `program`, an `afresh-bench`, and writes the results into `directory` as they
/// arrive. Reports progress and the time left to standard error.
///
/// # Errors
/// When a chosen table does not exist, or a result cannot be written. A table that fails is in the
/// report.
pub fn run(program: &Path, directory: &Path, options: &RunOptions) -> anyhow::Result<Report> {
    for name in &options.only {
        anyhow::ensure!(
            PLANS.iter().any(|plan| plan.name == name),
            "there is no table {name}; the tables of a report are {}",
            PLANS.map(|plan| plan.name).join(", ")
        );
    }
    let chosen = |plan: &&Plan| options.only.is_empty() || options.only.contains(&plan.name.into());
    let plans: Vec<&Plan> = PLANS.iter().filter(chosen).collect();
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut report = Report {
        format: FORMAT,
        started: since_1970.as_secs(),
        quick: options.quick,
        machine: Machine::detect(),
        ..Report::default()
    };
    if !report.machine.is_optimised {
        eprintln!("this build has no optimisation; `cargo run --release -p afresh-bench` has");
    }
    // Tables share the code of their guests: a guest takes seconds to compile.
    let code_cache = tempfile::tempdir().context("cannot make a folder for compiled guests")?;
    let started = Instant::now();
    let mut expected = Duration::ZERO;
    for (number, plan) in plans.iter().enumerate() {
        // The pace of the tables so far predicts the rest.
        let pace = match expected.as_secs_f64() {
            0.0 => 1.0,
            seconds => started.elapsed().as_secs_f64() / seconds,
        };
        let rest: Duration = plans[number..].iter().map(|plan| plan.expected(options.quick)).sum();
        eprintln!(
            "[{}/{}] {}, about {:.0} s of {:.0} s left",
            number + 1,
            plans.len(),
            plan.name,
            plan.expected(options.quick).as_secs_f64() * pace,
            rest.as_secs_f64() * pace
        );
        report.tables.push(measure(program, plan, options, code_cache.path())?);
        expected += plan.expected(options.quick);
        report.seconds = started.elapsed().as_secs_f64();
        report.write(directory)?;
    }
    Ok(report)
}

/// Runs one table.
fn measure(
    program: &Path,
    plan: &Plan,
    options: &RunOptions,
    code_cache: &Path,
) -> anyhow::Result<TableResult> {
    let mut arguments = vec![plan.name.to_owned()];
    if options.quick {
        arguments.push("--quick".to_owned());
    }
    let mut command = Command::new(program);
    command.args(&arguments).args(["-o", "json"]).arg("--code-cache").arg(code_cache);
    if let Some(afresh) = options.afresh.as_ref().filter(|_| plan.name == "serve") {
        command.arg("--afresh").arg(afresh);
    }
    let timeout = (plan.expected(options.quick) * TIMEOUT_FACTOR).max(MIN_TABLE_TIMEOUT);
    let started = Instant::now();
    let mut result = TableResult {
        name: plan.name.to_owned(),
        command: format!("afresh-bench {}", arguments.join(" ")),
        ..TableResult::default()
    };
    // A new process group lets a timeout end the servers and guests of the table as well.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().context("cannot start this program again")?;
    let outcome = read_rows(&mut child, started + timeout, &mut result);
    end_group(&child);
    let status = child.wait().context("cannot wait for a table")?;
    result.seconds = started.elapsed().as_secs_f64();
    result.error = match outcome {
        Err(error) => Some(format!("{error:#}")),
        Ok(()) if !status.success() => {
            Some(result.notes.last().cloned().unwrap_or_else(|| format!("it ended with {status}")))
        }
        Ok(()) => None,
    };
    if let Some(error) = &result.error {
        eprintln!("{}: {error}", plan.name);
    }
    Ok(result)
}

/// Ends the processes of a table that are left.
fn end_group(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // An error means that the table left no process. The leader is not waited for yet, so its
        // number belongs to no other group.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// A line from a table.
enum Line {
    Row(String),
    Note(String),
}

/// Reads rows and messages until both streams end.
fn read_rows(child: &mut Child, until: Instant, result: &mut TableResult) -> anyhow::Result<()> {
    let (sender, lines) = channel();
    let rows = child.stdout.take().context("no standard output")?;
    let notes = child.stderr.take().context("no standard error")?;
    let (of_rows, of_notes) = (sender.clone(), sender);
    std::thread::spawn(move || forward(rows, |line| of_rows.send(Line::Row(line)).is_ok()));
    std::thread::spawn(move || forward(notes, |line| of_notes.send(Line::Note(line)).is_ok()));
    loop {
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Line::Row(line)) => match serde_json::from_str::<Measurement>(&line) {
                Ok(row) => result.rows.push(row),
                // Not every line is a row: the count of the steady state is a note.
                Err(_) => result.notes.push(line),
            },
            Ok(Line::Note(line)) => {
                if result.notes.len() < MAX_NOTES {
                    result.notes.push(line);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                anyhow::bail!("it was ended because it exceeded its time limit")
            }
        }
    }
}

/// Hands on line after line until the stream ends or `take` returns false.
fn forward(stream: impl Read, mut take: impl FnMut(String) -> bool) {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        match stream.by_ref().take(MAX_LINE).read_line(&mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let line = line.trim_end();
                if !line.is_empty() && !take(line.to_owned()) {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maximum seconds of a quick and of a full report: docs/benchmarks.md.
    const MAX_SECONDS: [u64; 2] = [240, 1200];

    #[test]
    fn the_expected_durations_add_up_to_four_and_to_twenty_minutes_at_most() {
        let sums = [true, false]
            .map(|quick| PLANS.iter().map(|plan| plan.expected(quick)).sum::<Duration>().as_secs());
        for (sum, max) in sums.into_iter().zip(MAX_SECONDS) {
            assert!(sum <= max, "{sum} s of {max} s");
        }
    }

    #[test]
    fn each_table_of_the_plan_has_another_name_and_is_quicker_with_quick() {
        for (at, plan) in PLANS.iter().enumerate() {
            assert!(plan.quick > 0 && plan.quick < plan.full, "{}", plan.name);
            assert!(PLANS[..at].iter().all(|earlier| earlier.name != plan.name), "{}", plan.name);
        }
    }
}
